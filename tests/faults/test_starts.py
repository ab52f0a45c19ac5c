"""All nodes start or none does, whatever happens while they start; and what a running run shrugs off."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from fault_lab import (
    FAILURE,
    ROUNDS,
    WORST_S,
    Run,
    bundled,
    expect_failed,
    make_plan,
    repeat,
    running,
    script,
    until,
)

from gpuctl.core.cluster import PortRange
from gpuctl.core.run import RunState


def refused(run: Run) -> dict:
    """Wait for a launch that starts nothing; return its error."""
    run.wait_for_client(time.monotonic(), 40)
    run.wait_until_gone(time.monotonic(), 3)
    assert run.client.returncode == 1
    assert not [event for event in run.events if event["event"] == "started"]
    return run.event("error", 1)


def test_one_node_that_cannot_start_keeps_all_from_starting_and_is_named(tmp_path):
    plan = make_plan(tmp_path, script(tmp_path, "import time; time.sleep(600)"))
    broken = replace(plan.nodes[1], workdir=str(tmp_path / "nowhere"))
    run = Run(replace(plan, nodes=(plan.nodes[0], broken)))
    try:
        error = refused(run)
        assert error["message"] == "1 of 2 nodes cannot start; nothing was started"
        assert error["cause"].startswith("n1: the working directory ") and "nowhere" in error["cause"]
    finally:
        run.close()


def test_a_second_launch_on_the_same_nodes_is_told_who_holds_them(tmp_path):
    with running(tmp_path, bundled("ring")) as first:
        second = Run(make_plan(tmp_path, bundled("ring")))
        try:
            error = refused(second)
            assert f"held by run {first.run_id}" in error["cause"]
        finally:
            second.close()
        before = first.step()
        until(lambda: first.step() > before + 5, 10, "the first run was disturbed")
        end(first)


def test_two_launches_at_once_have_one_winner(tmp_path):
    for _ in range(ROUNDS):
        racers = [Run(make_plan(tmp_path, bundled("idle"))) for _ in range(2)]
        try:
            until(lambda racers=racers: [r for r in racers if r.client.poll() is not None], 30, "no loser")
            loser, winner = sorted(racers, key=lambda r: r.client.poll() is None)
            error = refused(loser)
            assert f"held by run {winner.run_id}" in error["cause"]
            winner.wait_until_stepping()
            end(winner)
            assert winner.event("outcome")["state"] == "stopped"
        finally:
            for run in racers:
                run.close()


def test_ctrl_c_at_any_moment_of_the_start_leaves_nothing(tmp_path):
    def fault(dice: random.Random) -> float:
        run = Run(make_plan(tmp_path, bundled("idle")))
        try:
            deadline = time.monotonic() + dice.uniform(0.3, 1.2)
            until(lambda: time.monotonic() > deadline, 2)
            began = time.monotonic()
            os.kill(run.client.pid, signal.SIGINT)
            run.wait_for_client(began)
            took = run.wait_until_gone(began)
            assert run.client.returncode in (130, -signal.SIGINT), run.events
            return took
        finally:
            run.close()

    repeat(fault)


def test_a_client_killed_at_any_moment_of_the_start_leaves_nothing_or_a_run_that_goes_on(tmp_path):
    for seed in range(ROUNDS):
        dice = random.Random(seed)
        run = Run(make_plan(tmp_path, bundled("ring")))
        try:
            deadline = time.monotonic() + dice.uniform(0.3, 1.0)
            until(lambda deadline=deadline: time.monotonic() > deadline, 2)
            os.kill(run.client.pid, signal.SIGKILL)
            run.client.wait()

            def settled(run=run) -> bool:
                return not run.processes() or run.events_written().count('"stepping"') == 4

            until(settled, 5, "neither gone nor running")
            if run.processes():
                os.kill(run.agent_of(0), signal.SIGTERM)
            run.wait_until_gone(time.monotonic())
        finally:
            run.close()


def test_a_port_that_is_taken_is_passed_over_within_the_range(tmp_path):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        plan = replace(make_plan(tmp_path, bundled("ring")), ports=PortRange(port, port + 20))
        run = Run(plan)
        try:
            run.wait_until_stepping()
            assert port < run.event("started")["master_port"] <= port + 20
            end(run)
        finally:
            run.close()


def test_a_port_that_was_asked_for_and_is_taken_fails_the_run_by_its_number(tmp_path):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        run = Run(replace(make_plan(tmp_path, bundled("ring")), master_port=port))
        try:
            run.wait_for_client(time.monotonic(), 30)
            run.wait_until_gone(time.monotonic(), 3)
            assert run.client.returncode == 1
            assert str(port) in str(run.events[-1]), run.events
        finally:
            run.close()


@pytest.mark.skipif(os.getuid() == 0, reason="nothing is read-only for root")
def test_a_state_directory_that_cannot_be_written_is_named(tmp_path):
    plan = make_plan(tmp_path, bundled("idle"))
    Path(plan.nodes[1].state_dir).mkdir(mode=0o500)
    run = Run(plan)
    try:
        run.wait_for_client(time.monotonic(), 30)
        assert plan.nodes[1].state_dir in str(run.event("error", 1))
    finally:
        run.close()


def test_files_are_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        with running(tmp_path, bundled("idle")) as run:
            end(run)  # `running` looks at the modes
            assert run.record(0).state is RunState.STOPPED
    finally:
        os.umask(before)


def test_a_run_directory_of_another_boot_is_shown_as_lost_and_in_nobodys_way(tmp_path):
    with running(tmp_path, bundled("idle")) as run:
        state = run.run_dir(1).state
        held = state.read_text()
        end(run)
    old_boot = held.replace(run.record(1).boot_id, "an-earlier-boot")
    state.write_text(old_boot)
    assert run.record(1).state is RunState.LOST
    with running(tmp_path, bundled("idle")) as again:
        end(again)


def test_strangers_on_the_leads_port_do_not_disturb_the_run(tmp_path):
    with running(tmp_path, bundled("ring")) as run:
        port = listening_port(run.agent_of(0))
        dice = random.Random(1)
        strangers = []
        for _ in range(60):
            stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
            stranger.settimeout(5)
            strangers.append(stranger)
            try:
                stranger.sendall(dice.randbytes(dice.choice([0, 1, 5, 600, 20000])))
            except OSError:
                pass  # refused already: more than a few are not kept
        before = run.step()
        until(lambda: run.step() > before + 30, 10, "the strangers stopped it")
        assert memory_mib(run.agent_of(0)) < 60
        for stranger in strangers:
            stranger.close()
        end(run)
        assert not [e for e in run.events if e["event"] in ("failed", "node_lost")]


@pytest.mark.parametrize("node", [1, 0])
def test_an_agent_that_stands_still_for_four_seconds_is_not_declared_dead(tmp_path, node):
    with running(tmp_path, bundled("ring")) as run:
        pid = run.agent_of(node)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(4.0)  # the length of the fault is what is tested; dead_s is 5
        os.kill(pid, signal.SIGCONT)
        before = run.step()
        until(lambda: run.step() > before + 10, 10, "it did not go on")
        end(run)
        assert not [e for e in run.events if e["event"] in ("failed", "node_lost")]


def test_an_agent_that_stands_still_for_longer_is_declared_dead_and_ends_when_it_wakes(tmp_path):
    run = Run(make_plan(tmp_path, bundled("ring")))
    try:
        run.wait_until_stepping()
        pid = run.agent_of(1)
        began = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        run.wait_for_client(began, 20)
        took = time.monotonic() - began
        assert FAILURE.dead_s - 1 <= took <= FAILURE.dead_s + WORST_S
        assert expect_node(run) == "n1"
        began = time.monotonic()
        os.kill(pid, signal.SIGCONT)
        assert run.wait_until_gone(began) <= WORST_S
    finally:
        run.close()


def test_a_run_whose_directory_is_removed_under_it_goes_on_and_can_end(tmp_path):
    with running(tmp_path, bundled("ring")) as run:
        shutil.rmtree(run.run_dir(1).path)
        before = run.step()
        until(lambda: run.step() > before + 10, 10, "the run needs its files to go on")
        began = time.monotonic()
        os.kill(run.pids("gpuctl:r2")[0], signal.SIGKILL)
        assert run.wait_until_gone(began) <= WORST_S
        assert expect_failed(run, began)["rank"] == 2


def expect_node(run: Run) -> str:
    failed = [event for event in run.events if event["event"] == "failed"]
    assert len(failed) == 1 and run.client.returncode == 1
    return str(failed[0]["node"])


def end(run: Run) -> None:
    """End a run from outside, so that nothing is left."""
    os.kill(run.client.pid, signal.SIGINT)
    run.wait_for_client(time.monotonic())
    run.wait_until_gone(time.monotonic())


def listening_port(pid: int) -> int:
    """Return the TCP port on which ``pid`` listens."""
    inodes = {path.readlink().name for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            return int(fields[1].split(":")[1], 16)
    raise AssertionError("the agent does not listen")


def memory_mib(pid: int) -> float:
    """Return the resident memory of ``pid``."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1024
