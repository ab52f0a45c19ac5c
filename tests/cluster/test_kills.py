"""What ends what, over sshd: a rank, an agent, the client, Ctrl-C. The full rounds stand in tests/faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_runs import wait_for
from tests.lab import Lab
from tests.lab.lab import tagged_processes

WORST_S = 2.0


class Live:
    """An attached launch of the trainer that has reached its third step."""

    def __init__(self, lab: Lab) -> None:
        self.cluster = str(lab.cluster_yaml(2))
        self.process: subprocess.Popen[str] = lab.client(
            "launch", "-f", self.cluster, "-s", "zero2", "--steps", "100000", "--json"
        )
        assert self.process.stdout is not None
        self.events: list[dict[str, Any]] = []
        while not any(event["event"] == "step" and event["step"] >= 3 for event in self.events):
            line = self.process.stdout.readline()
            assert line, self.process.communicate()[1]
            self.events.append(json.loads(line))
        self.run_id: str = self.events[0]["run"]

    def named(self, name: str) -> list[int]:
        """Return the run's processes of a name (gpuctl:r3, gpuctl:agent), over all nodes."""
        return [pid for pid in tagged_processes(self.run_id) if _comm(pid) == name]

    def ended(self, timeout_s: float = 20.0) -> int:
        out, _ = self.process.communicate(timeout=timeout_s)
        self.events += [json.loads(line) for line in out.splitlines()]
        return self.process.returncode

    def failure(self) -> dict[str, Any]:
        return next(event for event in self.events if event["event"] == "failed")


def _comm(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None


@pytest.fixture
def live(lab: Lab) -> Iterator[Live]:
    run = Live(lab)
    yield run
    if run.process.poll() is None:
        os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()
    for pid in tagged_processes(run.run_id):
        os.kill(pid, signal.SIGKILL)


def nothing_left(run: Live, began: float, limit_s: float = WORST_S) -> None:
    wait_for(lambda: not tagged_processes(run.run_id), limit_s + 5, "processes are left")
    assert time.monotonic() - began <= limit_s


def test_a_killed_rank_ends_all_and_is_named(live: Live) -> None:
    (rank,) = live.named("gpuctl:r3")
    began = time.monotonic()
    os.kill(rank, signal.SIGKILL)
    nothing_left(live, began)
    assert live.ended() == 1
    assert (live.failure()["rank"], live.failure()["signal"]) == (3, "SIGKILL")


def test_a_killed_agent_takes_its_ranks_along_and_the_lead_ends_the_rest(live: Live) -> None:
    (last,) = {_parent(_parent(pid)) for pid in live.named("gpuctl:r3")}
    began = time.monotonic()
    os.kill(last, signal.SIGKILL)
    nothing_left(live, began)
    assert live.ended() == 1
    assert "died" in live.failure()["message"] and live.failure()["rank"] is None


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_killed_client_leaves_the_run_to_itself(live: Live, lab: Lab) -> None:
    os.killpg(live.process.pid, signal.SIGKILL)
    live.process.wait()
    shown = json.loads(lab.gpuctl("status", live.run_id, "-f", live.cluster, "--json").stdout)["run"]
    assert shown["state"] == "running"
    stopped = lab.gpuctl("stop", "--force", live.run_id, "-f", live.cluster)
    assert stopped.returncode == 0, stopped.stderr
    assert tagged_processes(live.run_id) == []


def test_ctrl_c_saves_and_leaves(live: Live) -> None:
    live.process.send_signal(signal.SIGINT)
    assert live.ended() == 130
    names = [event["event"] for event in live.events]
    assert "checkpoint" in names and "stopped" in names and "failed" not in names
    assert tagged_processes(live.run_id) == []


def test_ctrl_c_twice_ends_it_now(live: Live) -> None:
    began = time.monotonic()
    live.process.send_signal(signal.SIGINT)
    time.sleep(0.15)  # two presses of a person; one at once would be one signal
    live.process.send_signal(signal.SIGINT)
    nothing_left(live, began, WORST_S + 0.15)
    assert live.ended() == 130
