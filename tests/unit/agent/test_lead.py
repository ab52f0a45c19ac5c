"""The lead's decisions, with real frames and no processes: what it tells whom, and what it concludes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuctl.agent.exits import RankExit
from gpuctl.agent.frames import Frame
from gpuctl.agent.lead import Lead
from gpuctl.agent.loop import Loop
from gpuctl.agent.paths import RunDir
from gpuctl.agent.recorder import Recorder
from gpuctl.core.codec import to_json
from gpuctl.core.hardware import Vendor
from gpuctl.core.parallel import ParallelDims
from gpuctl.core.plan import NodePlan, Plan, Program
from gpuctl.core.run import RunState


def make_plan(**changes: object) -> Plan:
    nodes = tuple(
        NodePlan(i, f"n{i}", "127.0.0.1", "lo", "local", Vendor.CPU, (), (2 * i, 2 * i + 1), "python3")
        for i in range(2)
    )
    fields: dict[str, object] = {
        "run_id": "t-20260101-000000-abcd",
        "name": "t",
        "cluster": "c",
        "program": Program("script", ("a.py",)),
        "dims": ParallelDims(dp=4),
        "nodes": nodes,
        "backend": "gloo",
    }
    return Plan(**{**fields, **changes})  # type: ignore[arg-type]


class Harness:
    """A lead whose two members only note what they are sent."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.loop = Loop()
        self.sent: dict[int, list[Frame]] = {0: [], 1: []}
        self.ended: list[Frame] = []
        self.folder = folder
        self.recorder = Recorder(RunDir(folder))
        self.lead = Lead(self.loop, plan, self.recorder, self.ended.append)

    def arm(self) -> None:
        for rank in (0, 1):
            self.lead.join(rank, self.sent[rank].append, None)

    def start(self) -> None:
        self.arm()
        self.lead.start()

    def exits(self, node: int, rank: int, **fields: object) -> None:
        report = RankExit(rank, f"n{node}", **fields)  # type: ignore[arg-type]
        self.lead.hear(node, Frame("exit", to_json(report), b"", self.lead.generation))

    def swept(self, *nodes: int) -> None:
        for node in nodes:
            self.lead.hear(node, Frame("swept", {"leftovers": []}, b"", self.lead.generation))

    def types(self, node: int) -> list[str]:
        return [frame.type for frame in self.sent[node]]

    def events(self) -> list[str]:
        self.recorder.close(5)
        return [json.loads(line)["event"] for line in (self.folder / "events.jsonl").read_text().splitlines()]


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    yield Harness(tmp_path, make_plan())


def test_a_failed_rank_ends_every_node_and_is_named_once(harness: Harness) -> None:
    harness.start()
    harness.exits(1, 3, signal="SIGKILL", message="killed by SIGKILL")
    assert harness.types(0)[-1] == harness.types(1)[-1] == "kill"
    harness.exits(0, 0, exit_code=1, message="RuntimeError: Connection closed by peer")
    harness.swept(0)
    assert not harness.ended
    harness.swept(1)
    assert harness.ended[0].fields["state"] == "failed"
    failure = harness.ended[0].fields["failure"]
    assert (failure["node"], failure["rank"], failure["signal"], failure["exit_code"]) == (
        "n1",
        3,
        "SIGKILL",
        None,
    )
    assert harness.events() == ["started", "failed"]


def test_a_run_is_done_when_every_rank_is(harness: Harness) -> None:
    harness.start()
    for rank in range(4):
        harness.exits(rank // 2, rank, exit_code=0, is_done=True)
    harness.swept(0, 1)
    assert harness.ended[0].fields["state"] == "done"
    assert "kill" not in harness.types(1)


def test_a_rank_of_a_script_that_is_done_leaves_the_others_alone(harness: Harness) -> None:
    harness.start()
    harness.exits(0, 0, exit_code=0, is_done=True)
    assert harness.types(1) == ["start"] and not harness.ended


def test_frames_of_an_older_generation_are_void(tmp_path: Path) -> None:
    harness = Harness(tmp_path, make_plan(max_restarts=1))
    harness.start()
    harness.exits(0, 1, exit_code=7, message="exited with code 7")
    harness.swept(0, 1)
    assert harness.lead.generation == 1 and harness.lead.state is RunState.RESTARTING
    late = to_json(RankExit(2, "n1", exit_code=1, message="late"))
    harness.lead.hear(1, Frame("exit", late, b"", 0))
    assert "kill" not in [f.type for f in harness.sent[1] if f.generation == 1]


def test_a_restart_starts_the_next_generation_on_another_port(tmp_path: Path) -> None:
    harness = Harness(tmp_path, make_plan(max_restarts=1))
    harness.start()
    harness.exits(0, 1, exit_code=7, message="exited with code 7")
    harness.swept(0, 1)
    harness.lead._restart()
    first, second = (f for f in harness.sent[1] if f.type == "start")
    assert (first.generation, second.generation, second.fields["restart_count"]) == (0, 1, 1)
    harness.exits(0, 1, exit_code=7, message="exited with code 7")
    harness.swept(0, 1)
    assert harness.ended[0].fields["state"] == "failed"


def test_a_stop_ends_stopped_whatever_the_ranks_exit_with(harness: Harness) -> None:
    harness.start()
    harness.lead.stop(5.0, "tester")
    assert harness.sent[1][-1].type == "stop" and harness.sent[1][-1].fields["grace_s"] == 5.0
    for rank in range(4):
        harness.exits(rank // 2, rank, signal="SIGTERM", message="killed by SIGTERM")
    harness.swept(0, 1)
    assert harness.ended[0].fields["state"] == "stopped"
    assert harness.ended[0].fields["reason"] == "stopped by tester"


def test_a_lost_node_ends_the_run_and_is_the_cause(harness: Harness) -> None:
    harness.start()
    harness.lead.lost(1, "no heartbeat for 6 s")
    assert harness.types(0)[-1] == "kill"
    harness.swept(0)
    failure = harness.ended[0].fields["failure"]
    assert failure["node"] == "n1" and "no heartbeat for 6 s" in failure["message"]
    assert harness.events() == ["started", "node_lost", "failed"]


def test_exit_grace_names_the_rank_that_did_not_leave(tmp_path: Path) -> None:
    harness = Harness(tmp_path, make_plan(exit_grace_s=0.01))
    harness.start()
    harness.exits(0, 0, exit_code=0, is_done=True)
    harness.loop.run_once()
    while "kill" not in harness.types(1):
        harness.loop.run_once()
    harness.swept(0, 1)
    assert (
        "rank 1 still ran 0.01 s after rank 0 had exited with 0"
        in harness.ended[0].fields["failure"]["message"]
    )
