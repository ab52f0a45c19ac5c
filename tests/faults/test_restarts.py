"""Restarts of all ranks: another generation, another port, the same agents, connections and fork servers."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fault_lab import WORST_S, Run, bundled, expect_failed, make_plan, until


@pytest.fixture
def launch(tmp_path):
    started: list[Run] = []

    def start(program, max_restarts: int) -> Run:
        started.append(Run(replace(make_plan(tmp_path, program), max_restarts=max_restarts)))
        started[-1].wait_until_stepping()
        return started[-1]

    yield start
    for run in started:
        run.close()


def wait_for_generation(run: Run, generation: int, timeout_s: float = 15.0) -> float:
    """Return how long it took until all ranks of ``generation`` step."""
    began = time.monotonic()

    def all_step() -> bool:
        lines = [line for line in run.events_written().splitlines() if '"stepping"' in line]
        return len(lines) == (generation + 1) * run.plan.world_size

    until(all_step, timeout_s, f"generation {generation}: {run.events[-4:]}")
    return time.monotonic() - began


def end(run: Run) -> None:
    os.kill(run.client.pid, signal.SIGINT)
    run.wait_for_client(time.monotonic())
    run.wait_until_gone(time.monotonic())


def kept(run: Run) -> set[int]:
    return {*run.pids("gpuctl:agent"), *run.pids("gpuctl:guard"), *run.pids("gpuctl:fork")}


def test_a_killed_rank_restarts_all_ranks_and_nothing_of_the_old_generation_stays(launch):
    run = launch(bundled("ring"), max_restarts=3)
    agents, old = kept(run), set(run.processes())
    os.kill(run.pids("gpuctl:r2")[0], signal.SIGKILL)
    wait_for_generation(run, 1)
    assert kept(run) == agents
    assert set(run.processes()) & old == agents
    starts = [event for event in run.events if event["event"] == "started"]
    assert [event["restart_count"] for event in starts] == [0, 1]
    assert starts[0]["master_port"] != starts[1]["master_port"]
    assert (run.run_dir(0).path / "gen-1" / "rank-0.out").is_file()
    failed = [event for event in run.events if event["event"] == "failed"]
    assert [(event["rank"], event["final"]) for event in failed] == [(2, False)]
    before = run.step()
    until(lambda: run.step() > before, 10)
    end(run)


def test_each_generation_has_its_own_failure_and_the_last_ends_the_run(launch):
    run = launch(bundled("idle"), max_restarts=1)
    os.kill(run.pids("gpuctl:r1")[0], signal.SIGKILL)
    wait_for_generation(run, 1)
    began = time.monotonic()
    os.kill(run.pids("gpuctl:r3")[0], signal.SIGKILL)
    assert run.wait_until_gone(began) <= WORST_S
    run.wait_for_client(began)
    assert run.client.returncode == 1
    failed = [event for event in run.events if event["event"] == "failed"]
    assert [(e["rank"], e["generation"], e["final"]) for e in failed] == [(1, 0, False), (3, 1, True)]


def test_ctrl_c_while_it_waits_for_the_restart_ends_it(launch):
    run = launch(bundled("idle"), max_restarts=5)
    os.kill(run.pids("gpuctl:r1")[0], signal.SIGKILL)
    run.event("restarting", 10)
    began = time.monotonic()
    os.kill(run.client.pid, signal.SIGINT)
    assert run.wait_until_gone(began) <= WORST_S
    run.wait_for_client(began)
    assert run.client.returncode == 130


def test_a_killed_agent_is_not_restarted_without_its_node(launch):
    run = launch(bundled("idle"), max_restarts=3)
    began = time.monotonic()
    os.kill(run.agent_of(1), signal.SIGKILL)
    assert run.wait_until_gone(began) <= WORST_S
    assert expect_failed(run, began)["node"] == "n1"


def test_a_killed_fork_server_is_started_again_with_the_ranks(launch):
    run = launch(bundled("ring"), max_restarts=3)
    servers = set(run.pids("gpuctl:fork"))
    os.kill(min(servers), signal.SIGKILL)
    wait_for_generation(run, 1)
    now = set(run.pids("gpuctl:fork"))
    assert len(now) == 2 and len(now & servers) == 1
    end(run)


def test_the_locks_are_held_all_the_time(launch, tmp_path):
    run = launch(bundled("idle"), max_restarts=3)
    os.kill(run.pids("gpuctl:r1")[0], signal.SIGKILL)
    run.event("restarting", 10)
    other = Run(make_plan(tmp_path, bundled("idle")))
    try:
        other.wait_for_client(time.monotonic(), 20)
        assert f"held by run {run.run_id}" in other.event("error", 1)["cause"]
    finally:
        other.close()
    wait_for_generation(run, 1)
    assert not Path(other.run_dir(0).path / "gen-0").exists()
    end(run)
