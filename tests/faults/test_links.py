"""Links that are cut, one-way, flapping or slow: both sides end in time, or nobody notices. Root only."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fault_lab import FAILURE, ROUNDS, Run, bundled, make_plan, until
from wires import Wires, wired

from gpuctl.core.plan import Program
from gpuctl.core.run import RunState

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("ip") is None, reason="links are made and cut by root"
)
#: Design, "What ends what": dead_s, and two seconds for the end itself.
BOUND_S = FAILURE.dead_s + 2.0


@pytest.fixture(scope="module")
def wires():
    try:
        with wired(2) as made:
            yield made
    except subprocess.CalledProcessError as exc:
        pytest.skip(f"no network namespaces here: {exc.stderr.decode().strip()}")


@pytest.fixture
def launch(tmp_path, wires):
    started: list[Run] = []

    def start(program: Program) -> Run:
        plan = make_plan(tmp_path, program)
        nodes = tuple(
            replace(node, address=wires.address(i), interface="eth0") for i, node in enumerate(plan.nodes)
        )
        run = Run(replace(plan, nodes=nodes), namespaces=wires.nodes)
        started.append(run)
        run.wait_until_stepping()
        return run

    yield start
    for run in started:
        run.close()
    for node in (0, 1):
        wires.heal(node)
        wires.straighten(node)


def processes_on(run: Run, wires: Wires, node: int) -> list[int]:
    """Return the run's processes in the namespace of ``node``."""
    wanted = Path(f"/run/netns/{wires.nodes[node]}").stat().st_ino

    def is_there(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/ns/net").stat().st_ino == wanted
        except OSError:
            return False

    return [pid for pid in run.processes() if is_there(pid)]


def ranks_on(run: Run, wires: Wires, node: int) -> list[int]:
    """Return the ranks that are left in the namespace of ``node``."""
    names = run.processes()
    return [pid for pid in processes_on(run, wires, node) if names.get(pid, "").startswith("gpuctl:r")]


@pytest.mark.parametrize("mode", ["ring", "idle"])
@pytest.mark.parametrize("node", [1, 0])
def test_a_cut_link_ends_both_sides_in_time(launch, wires, mode, node):
    for _ in range(max(1, ROUNDS // 5)):
        run = launch(bundled(mode))
        began = time.monotonic()
        wires.cut(node)
        until(lambda run=run: not ranks_on(run, wires, 1), BOUND_S, "the side without the lead")
        # fenced before the lead declares it dead: never two that believe in themselves
        assert not [event for event in run.events if event["event"] in ("failed", "node_lost")]
        assert run.wait_until_gone(began) <= BOUND_S
        assert run.wait_for_client(began) <= BOUND_S + 0.5
        assert run.client.returncode == 1
        (failed,) = [event for event in run.events if event["event"] == "failed"]
        assert failed["node"] == "n1" and "no heartbeat" in failed["message"]
        assert run.record(1).state is RunState.LOST and run.record(0).state is RunState.FAILED
        wires.heal(node)


@pytest.mark.parametrize("way", ["to_node", "from_node"])
def test_a_link_that_works_one_way_only_ends_both_sides_too(launch, wires, way):
    run = launch(bundled("idle"))
    began = time.monotonic()
    wires.mute(1, way)
    assert run.wait_until_gone(began, BOUND_S + 5) <= BOUND_S
    run.wait_for_client(began)
    assert run.client.returncode == 1
    assert len([event for event in run.events if event["event"] == "failed"]) == 1


def test_a_link_that_flaps_for_less_than_dead_s_is_no_failure(launch, wires):
    run = launch(bundled("ring"))
    for _ in range(3):
        wires.cut(1)
        pause(1.5)
        wires.heal(1)
        pause(1.5)
    before = run.step()
    until(lambda: run.step() > before + 20, 10, "it did not go on")
    assert not [event for event in run.events if event["event"] in ("failed", "node_lost")]
    end(run)


def test_a_slow_and_lossy_link_is_no_failure(launch, wires):
    try:
        wires.slow(1)
    except subprocess.CalledProcessError:
        pytest.skip("this kernel has no netem")
    run = launch(bundled("ring"))
    before = run.step()
    until(lambda: run.step() > before + 10, 30, "it did not go on")
    assert not [event for event in run.events if event["event"] in ("failed", "node_lost")]
    end(run)


def test_a_power_cut_is_noticed_without_a_word_from_the_node(launch, wires):
    run = launch(bundled("ring"))
    began = time.monotonic()
    wires.cut(1)
    for pid in processes_on(run, wires, 1):
        os.kill(pid, signal.SIGKILL)
    assert run.wait_until_gone(began) <= BOUND_S
    assert run.wait_for_client(began) <= BOUND_S + 0.5
    (failed,) = [event for event in run.events if event["event"] == "failed"]
    assert failed["node"] == "n1" and run.client.returncode == 1


def pause(seconds: float) -> None:
    """Let the fault last: its length is what is tested."""
    time.sleep(seconds)


def end(run: Run) -> None:
    """End a run from outside, so that nothing is left."""
    os.kill(run.client.pid, signal.SIGINT)
    run.wait_for_client(time.monotonic())
    run.wait_until_gone(time.monotonic())
