"""How ranks end, bundled ones and users' scripts, and what the user is told of it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from fault_lab import (
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

from gpuctl.agent import identity
from gpuctl.core.run import RunState
from gpuctl.services import runs

#: A script's ranks say that they run in the log of rank 0's node; sleeping is all they do then.
WAITING = """
import os, subprocess, sys, time
subprocess.run(["sh", "-c", "setsid sleep 600 & (setsid sleep 600 &)"])
print("up", os.environ["RANK"], flush=True)
time.sleep(600)
"""


def finish(run: Run) -> dict:
    """Wait for the end of the command and return its outcome."""
    run.wait_for_client(time.monotonic(), 40)
    run.wait_until_gone(time.monotonic(), 5)
    outcome = run.event("outcome", 1)
    assert not run.open_modes()
    return outcome


@pytest.fixture
def launch(tmp_path):
    started: list[Run] = []

    def start(program, **options) -> Run:
        started.append(Run(make_plan(tmp_path, program), **options))
        return started[-1]

    yield start
    for run in started:
        run.close()


def test_kill_9_of_a_scripts_rank_ends_it_everywhere(tmp_path, launch):
    def fault(dice: random.Random) -> float:
        run = launch(script(tmp_path, WAITING))
        rank = dice.randrange(4)
        pid = until(lambda: rank_pid(run, rank), 20)
        until(lambda: b"up" in run.log(rank, "out"), 20)
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        took = run.wait_until_gone(began)
        failed = expect_failed(run, began)
        assert (failed["rank"], failed["signal"]) == (rank, "SIGKILL")
        return took

    repeat(fault)


def test_a_scripts_rank_that_is_done_does_not_end_the_others(tmp_path, launch):
    code = "import os, time\ntime.sleep(0.8 if os.environ['RANK'] == '2' else 0)\nprint('over', flush=True)"
    run = launch(script(tmp_path, code))
    assert finish(run)["state"] == "done" and run.client.returncode == 0
    assert all(run.log(rank, "out") == b"over\n" for rank in range(4))
    assert {run.record(i).state for i in (0, 1)} == {RunState.DONE}


@pytest.mark.parametrize("code", ["raise ValueError('[/x] no')", "sys.exit(3)", "sys.exit(256 + 7)"])
def test_a_scripts_error_is_named_with_rank_and_code(tmp_path, launch, code):
    text = f"import os, sys, time\nif os.environ['RANK'] == '3':\n    {code}\ntime.sleep(600)"
    run = launch(script(tmp_path, text))
    failed = expect_failed(run, time.monotonic())
    expected = {"r": 1, "3": 3, "2": 7}[code.removeprefix("sys.exit(")[0]]
    assert (failed["rank"], failed["node"], failed["exit_code"]) == (3, "n1", expected)
    if "ValueError" in code:
        assert failed["message"] == "ValueError: [/x] no"


def test_a_bundled_rank_that_exits_0_before_it_is_done_is_a_failure(launch):
    run = launch(bundled("idle", exit_at={1: 3}))
    failed = expect_failed(run, time.monotonic())
    assert (failed["rank"], failed["exit_code"]) == (1, 0)
    assert "before it was done" in failed["message"]


@pytest.mark.parametrize(
    ("how", "name"),
    [("import ctypes; ctypes.string_at(0)", "SIGSEGV"), ("import os; os.abort()", "SIGABRT")],
)
def test_a_crash_is_shown_by_the_signals_name_and_leaves_the_stack(launch, how, name):
    run = launch(bundled("ring", crash_at={2: 3}, crash=how))
    failed = expect_failed(run, time.monotonic())
    assert (failed["rank"], failed["signal"], failed["exit_code"]) == (2, name, None)
    assert b"Current thread" in run.log(2, "err") and b"fault_program.py" in run.log(2, "err")


def test_a_program_that_cannot_be_imported_fails_with_its_traceback(launch):
    run = launch(bundled("idle", preload=("nothing_of_that_name",)))
    failed = expect_failed(run, time.monotonic())
    assert "nothing_of_that_name" in failed["message"] and "Traceback" in failed["traceback"]


def test_orphans_are_reaped_while_the_run_goes_on(tmp_path):
    with running(tmp_path, bundled("idle", orphans=200)) as run:
        before = run.step()
        until(lambda: run.step() > before + 10, 10)
        agents = [run.agent_of(0), run.agent_of(1)]
        until(lambda: not [pid for pid in zombies() if parent_of(pid) in agents], 5)
        end(run)


def test_a_script_that_forks_without_end_is_ended(tmp_path, launch):
    code = """
import os, time
if os.environ["RANK"] == "1":
    for _ in range(3):
        if os.fork() == 0:
            while True:
                if os.fork(): os._exit(0)
                time.sleep(0.001)
time.sleep(600)
"""
    run = launch(script(tmp_path, code))
    pid = until(lambda: rank_pid(run, 0), 20)
    until(lambda: run.event("phase", 20), 20)
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert run.wait_until_gone(began) <= 2 * WORST_S
    assert expect_failed(run, began)["rank"] == 0


def test_stacks_of_every_rank_are_had_without_disturbing_the_run(tmp_path):
    with running(tmp_path, bundled("ring")) as run:
        connections = run.connections()
        (found,) = runs.list_runs(connections)[0]
        runs.request_stacks(found, connections)
        for rank in range(4):
            until(lambda rank=rank: b"fault_program.py" in run.log(rank, "err"), 5, f"rank {rank}")
        before = run.step()
        until(lambda: run.step() > before + 5, 10)
        end(run)


def test_term_to_an_agent_stops_the_whole_run_gracefully(tmp_path):
    def fault(dice: random.Random) -> float:
        with running(tmp_path, bundled("idle")) as run:
            node = dice.randrange(2)
            began = time.monotonic()
            os.kill(run.agent_of(node), signal.SIGTERM)
            took = run.wait_until_gone(began)
            run.wait_for_client(began)
            outcome = run.event("outcome", 1)
            assert outcome["state"] == "stopped" and f"SIGTERM to the agent on n{node}" in outcome["reason"]
            assert all(rank.is_done for i in (0, 1) for rank in run.record(i).ranks)
            return took

    repeat(fault, rounds=min(ROUNDS, 4))


def test_the_oom_killer_is_named(tmp_path):
    folder = memory_cgroup("gpuctl-test-oom")
    program = bundled("idle", eat_at={1: 5})
    enter = ["sh", "-c", f'echo $$ > {folder}/cgroup.procs; exec "$@"', "sh"]
    run = Run(make_plan(tmp_path, program), prefix=enter)
    try:
        failed = expect_failed(run, time.monotonic())
        assert failed["rank"] == 1 and failed["signal"] == "SIGKILL"
        assert "killed by the OOM killer (limit 400 MiB)" in failed["message"]
    finally:
        run.close()
        until(lambda: not (folder / "cgroup.procs").read_text(), 5)
        folder.rmdir()


def memory_cgroup(name: str) -> Path:
    """Make a memory cgroup of 400 MiB, or skip."""
    from gpuctl.agent import oom

    counter = oom._find_counter()
    if os.getuid() != 0 or counter is None or counter.name == "vmstat":
        pytest.skip("no memory cgroup here that may be written")
    folder = counter.parent / name
    try:
        folder.mkdir(exist_ok=True)
        limit = "memory.max" if counter.name == "memory.events" else "memory.limit_in_bytes"
        (folder / limit).write_text(str(400 << 20))
    except OSError as exc:
        pytest.skip(f"no memory cgroup can be made here: {exc}")
    return folder


def end(run: Run) -> None:
    """End a run from outside, so that nothing is left."""
    os.kill(run.client.pid, signal.SIGINT)
    run.wait_for_client(time.monotonic())
    run.wait_until_gone(time.monotonic())


def rank_pid(run: Run, rank: int) -> int | None:
    """Return the pid that the lead was told for ``rank``."""
    for event in list(run.events):
        for started in event.get("ranks") or () if event.get("phase") == "started" else ():
            if started["rank"] == rank:
                return int(started["pid"])
    return None


def zombies() -> list[int]:
    done = subprocess.run(["ps", "-e", "-o", "pid=,state="], capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines()]
    return [int(pid) for pid, state in rows if state == "Z"]


def parent_of(pid: int) -> int | None:
    stat = identity.read_stat(pid)
    return stat.ppid if stat is not None else None
