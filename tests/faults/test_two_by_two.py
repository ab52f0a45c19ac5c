"""Two nodes, two ranks each, every one with strays: what ends what, how fast, and what is left of it.

Each fault is made ``GPUCTL_FAULT_ROUNDS`` times (3; 10 in the nightly suite): median at most 1 s and worst at
most 2 s from the fault to the last process on the last node; nothing left, by the environment tag that
every process of a run carries; the cause named; and the next launch, which wants the same locks, works.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from fault_lab import FAILURE, WORST_S, Run, bundled, expect_failed, make_plan, repeat, running, until

from gpuctl.core.run import RunState
from gpuctl.services import runs

MODES = ("ring", "idle")


@pytest.mark.parametrize("mode", MODES)
def test_kill_9_of_a_rank_ends_the_run_everywhere(tmp_path, mode):
    def fault(dice: random.Random) -> float:
        with running(tmp_path, bundled(mode)) as run:
            rank = dice.randrange(4)
            (pid,) = run.pids(f"gpuctl:r{rank}")
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            took = run.wait_until_gone(began)
            failed = expect_failed(run, began)
            assert (failed["rank"], failed["node"], failed["signal"]) == (rank, f"n{rank // 2}", "SIGKILL")
            assert failed["exit_code"] is None
            assert {run.record(i).state for i in (0, 1)} == {RunState.FAILED}
            return took

    repeat(fault)


def test_kill_9_of_a_rank_in_torchs_all_reduce_ends_the_run_and_names_that_rank(tmp_path):
    def fault(dice: random.Random) -> float:
        with running(tmp_path, bundled("gloo", preload=("torch",))) as run:
            rank = dice.randrange(4)
            (pid,) = run.pids(f"gpuctl:r{rank}")
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            took = run.wait_until_gone(began)
            failed = expect_failed(run, began)
            assert (failed["rank"], failed["signal"]) == (rank, "SIGKILL")
            return took

    repeat(fault, rounds=2)


@pytest.mark.parametrize("mode", MODES)
def test_an_exception_in_a_rank_ends_the_run_and_shows_its_traceback_once(tmp_path, mode):
    def fault(dice: random.Random) -> float:
        rank = dice.randrange(4)
        run = Run(make_plan(tmp_path, bundled(mode, raise_at={rank: 5})))
        try:
            run.event("failed", 30)
            took = run.wait_until_gone(time.monotonic())
            failed = expect_failed(run, time.monotonic())
            assert (failed["rank"], failed["exit_code"], failed["signal"]) == (rank, 1, None)
            assert failed["message"] == "ValueError: on purpose at step 5 [/x]"
            assert "fault_program.py" in failed["traceback"]
            return took
        finally:
            run.close()

    repeat(fault)


def test_ranks_that_ignore_term_are_killed_half_a_second_later(tmp_path):
    def fault(dice: random.Random) -> float:
        with running(tmp_path, bundled("idle", is_deaf=True)) as run:
            (pid,) = run.pids(f"gpuctl:r{dice.randrange(4)}")
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            took = run.wait_until_gone(began)
            expect_failed(run, began)
            return took

    repeat(fault)


def test_a_stopped_rank_does_not_hold_up_the_end(tmp_path):
    def fault(dice: random.Random) -> float:
        with running(tmp_path, bundled("ring")) as run:
            stopped, killed = dice.sample(range(4), 2)
            os.kill(run.pids(f"gpuctl:r{stopped}")[0], signal.SIGSTOP)
            began = time.monotonic()
            os.kill(run.pids(f"gpuctl:r{killed}")[0], signal.SIGKILL)
            took = run.wait_until_gone(began)
            assert expect_failed(run, began)["rank"] == killed
            return took

    repeat(fault)


@pytest.mark.parametrize("mode", MODES)
def test_kill_9_of_an_agent_ends_its_ranks_and_the_others(tmp_path, mode):
    def fault(_dice: random.Random) -> float:
        with running(tmp_path, bundled(mode)) as run:
            began = time.monotonic()
            os.kill(run.agent_of(1), signal.SIGKILL)
            took = run.wait_until_gone(began)
            failed = expect_failed(run, began)
            assert failed["node"] == "n1" and "agent" in failed["message"]
            assert run.record(0).state is RunState.FAILED
            assert run.record(1).state is RunState.LOST
            return took

    repeat(fault)


@pytest.mark.parametrize("mode", MODES)
def test_kill_9_of_the_lead_agent_ends_the_run_on_every_node(tmp_path, mode):
    def fault(_dice: random.Random) -> float:
        with running(tmp_path, bundled(mode)) as run:
            began = time.monotonic()
            os.kill(run.agent_of(0), signal.SIGKILL)
            took = run.wait_until_gone(began)
            failed = expect_failed(run, began)
            assert failed["node"] == "n0" and "died" in failed["message"]
            assert {run.record(i).state for i in (0, 1)} == {RunState.LOST}
            return took

    repeat(fault)


def test_kill_9_of_the_guardian_does_not_disturb_the_run_and_its_end_is_complete(tmp_path):
    with running(tmp_path, bundled("ring")) as run:
        for pid in run.pids("gpuctl:guard"):
            os.kill(pid, signal.SIGKILL)
        before = run.step()
        until(lambda: run.step() > before + 5, 10.0, "no steps after the guardians")
        began = time.monotonic()
        os.kill(run.pids("gpuctl:r2")[0], signal.SIGKILL)
        assert run.wait_until_gone(began) <= WORST_S
        expect_failed(run, began)


def test_a_killed_client_leaves_the_run_to_go_on_and_stop_ends_it(tmp_path):
    def fault(_dice: random.Random) -> float:
        with running(tmp_path, bundled("ring")) as run:
            os.kill(run.client.pid, signal.SIGKILL)
            run.client.wait()
            before = last_step(run)
            until(lambda: last_step(run) > before + 20, 10.0, "it stood still")
            connections = run.connections()
            (found,) = [r for r in runs.list_runs(connections)[0] if r.run_id == run.run_id]
            began = time.monotonic()
            result = runs.stop_run(found, connections, grace_s=5, is_forced=True, by="the test")
            took = run.wait_until_gone(began)
            assert result.state is RunState.STOPPED and not result.was_finished
            assert {run.record(i).state for i in (0, 1)} == {RunState.STOPPED}
            again = runs.stop_run(
                runs.list_runs(connections)[0][0], connections, grace_s=5, is_forced=False, by="x"
            )
            assert again.was_finished and again.state is RunState.STOPPED
            return took

    repeat(fault)


def test_ctrl_c_once_lets_the_ranks_save_and_leave(tmp_path):
    def fault(_dice: random.Random) -> float:
        with running(tmp_path, bundled("idle")) as run:
            began = time.monotonic()
            os.kill(run.client.pid, signal.SIGINT)
            run.wait_for_client(began)
            took = run.wait_until_gone(began)
            assert run.client.returncode == 130
            outcome = run.event("outcome")
            assert outcome["state"] == "stopped" and "Ctrl-C" in outcome["reason"]
            assert not [event for event in run.events if event["event"] == "failed"]
            assert all(rank.is_done for i in (0, 1) for rank in run.record(i).ranks)
            return took

    repeat(fault)


def test_ctrl_c_once_waits_for_the_grace_and_not_longer(tmp_path):
    with running(tmp_path, bundled("idle", is_deaf=True)) as run:
        began = time.monotonic()
        os.kill(run.client.pid, signal.SIGINT)
        took = run.wait_until_gone(began, FAILURE.grace_s + 10)
        assert FAILURE.grace_s - 0.5 <= took <= FAILURE.grace_s + WORST_S
        run.wait_for_client(began)
        assert run.client.returncode == 130


def test_ctrl_c_twice_ends_everything_at_once(tmp_path):
    def fault(_dice: random.Random) -> float:
        with running(tmp_path, bundled("ring", is_deaf=True)) as run:
            os.kill(run.client.pid, signal.SIGINT)
            run.event("stopping")
            began = time.monotonic()
            os.kill(run.client.pid, signal.SIGINT)
            took = run.wait_until_gone(began)
            run.wait_for_client(began)
            assert run.client.returncode == 130
            return took

    repeat(fault)


def test_ctrl_c_three_times_lets_the_client_go_and_the_agents_finish(tmp_path):
    with running(tmp_path, bundled("idle", is_deaf=True)) as run:
        for event in ("stopping", "killing"):
            os.kill(run.client.pid, signal.SIGINT)
            run.event(event)
        began = time.monotonic()
        os.kill(run.client.pid, signal.SIGINT)
        assert run.wait_for_client(began) <= 0.5
        assert run.client.returncode == 130
        assert run.wait_until_gone(began) <= WORST_S


def test_a_detached_run_outlives_its_client_and_ends_by_itself_when_a_rank_dies(tmp_path):
    def fault(dice: random.Random) -> float:
        with running(tmp_path, bundled("ring"), is_detached=True) as run:
            run.wait_for_client(time.monotonic())
            assert run.client.returncode == 0
            rank = dice.randrange(4)
            began = time.monotonic()
            os.kill(run.pids(f"gpuctl:r{rank}")[0], signal.SIGKILL)
            took = run.wait_until_gone(began)
            record = run.record(0)
            assert record.state is RunState.FAILED
            assert record.failure.rank == rank and record.failure.signal == "SIGKILL"
            return took

    repeat(fault)


def test_a_detached_run_is_stopped_gracefully(tmp_path):
    with running(tmp_path, bundled("idle"), is_detached=True) as run:
        connections = run.connections()
        (found,) = runs.list_runs(connections)[0]
        result = runs.stop_run(found, connections, grace_s=10, is_forced=False, by="the test")
        assert result.state is RunState.STOPPED and result.elapsed_s < 5
        run.wait_until_gone(time.monotonic())
        assert all(rank.is_done for i in (0, 1) for rank in run.record(i).ranks)


def test_kill_9_of_a_fork_server_ends_the_run_and_is_named(tmp_path):
    def fault(dice: random.Random) -> float:
        with running(tmp_path, bundled("ring")) as run:
            began = time.monotonic()
            os.kill(dice.choice(run.pids("gpuctl:fork")), signal.SIGKILL)
            took = run.wait_until_gone(began)
            assert "fork server" in expect_failed(run, began)["message"]
            return took

    repeat(fault)


def last_step(run: Run) -> int:
    """Return how far the run is by what the lead has written down."""
    return run.events_written().count('"loss"')
