"""From words to the ranks' config, and from their events to a report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuctl.collectives.config import BenchConfig
from gpuctl.core.codec import from_json
from gpuctl.core.hardware import Nic, NodeFacts, RdmaDevice, Vendor
from gpuctl.core.parallel import ParallelDims
from gpuctl.core.plan import NodePlan, Plan, PlannedGpu
from gpuctl.errors import CheckFailed, ConfigError, UsageError
from gpuctl.services import bench
from gpuctl.services.bench import BenchCollector, BenchOptions


def plan(*ranks: tuple[int, ...], backend: Any = "gloo") -> Plan:
    nodes = tuple(
        NodePlan(
            node_rank=i,
            host=f"n{i}",
            address=f"10.0.0.{i + 1}",
            interface="eth0",
            transport="ssh",
            vendor=Vendor.CPU if backend == "gloo" else Vendor.NVIDIA,
            gpus=tuple(PlannedGpu(k, name="NVIDIA H200") for k in range(len(mine))),
            ranks=mine,
            python="python3",
        )
        for i, mine in enumerate(ranks)
    )
    return Plan("b-1", "b", "lab", bench.PROGRAM, ParallelDims(dp=sum(map(len, ranks))), nodes, backend)


TWO_BY_TWO = plan((0, 1), (2, 3))


def config(on: Plan = TWO_BY_TWO, **options: Any) -> BenchConfig:
    made = bench.with_bench(on, BenchOptions(**{"collectives": ("allreduce",), **options}))
    return from_json(BenchConfig, made.program.config)


def test_the_plan_carries_everything_the_ranks_need() -> None:
    made = config(max_bytes=8192, factor=4.0)
    assert made.collectives == ("all_reduce",)
    assert made.sizes_bytes == (1024, 4096)
    assert (made.expected_ranks, made.backend) == (4, "gloo")


def test_the_largest_size_depends_on_what_the_ranks_are() -> None:
    assert config().sizes_bytes[-1] == 16 << 20
    assert config(plan((0, 1), backend="nccl")).sizes_bytes[-1] == 1 << 30


def test_groups_are_the_inside_of_nodes_or_the_rails_between_them() -> None:
    uneven = plan((0, 1, 2), (3, 4))
    assert config(uneven, per="node").groups == ((0, 1, 2), (3, 4))
    assert config(uneven, per="rail").groups == ((0, 3), (1, 4), (2,))
    assert config(uneven).groups == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collectives": ("all_redcue",)}, "'all_redcue' is no collective"),
        ({"dtype": "float8"}, "'float8' is no dtype"),
        ({"min_bytes": 2}, "2 bytes hold no float32"),
        ({"min_bytes": 4096, "max_bytes": 1024}, "sizes from 4096 to 1024 bytes"),
        ({"factor": 1.0}, "a factor of 1.0 never reaches 16777216"),
        ({"op": "avg"}, "--op avg is not there for float32 on gloo"),
        (
            {"algo": "ring", "collectives": ("broadcast",)},
            "--algo ring is written out for all_reduce, all_gather, reduce_scatter, not for broadcast",
        ),
        ({"engine": "direct"}, "--engine direct needs NCCL or RCCL, these are CPU ranks"),
        ({"collectives": ("p2p",), "per": "node"}, "p2p measures every pair, groups are not for it"),
        ({"root": 4}, "--root 4: there are 4 ranks"),
        ({"root": 2, "per": "node"}, "--root 2: there are 2 ranks"),
        ({"iters": 0}, "--iters must be 1 or more, --warmup-iters 0 or more"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_contacted(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as raised:
        config(**options)
    assert raised.value.message == message


def row(**fields: Any) -> dict[str, Any]:
    times = {"mean": 100.0, "min": 90.0, "median": 100.0, "p95": 120.0, "max": 130.0}
    known = {"collective": "all_reduce", "size_bytes": 1024, "algo": "library", "cv": 0.01, "busbw_gb_s": 1.0}
    return {**known, "time_us": times, "wrong": 0, "checked": True, **fields}


def collect(*events: dict[str, Any], baseline: Any = None) -> bench.BenchReport:
    collector = BenchCollector()
    for event in events:
        collector.on_event({"run": "b-1", "generation": 1, "time": 0.0, **event})
    made = bench.with_bench(TWO_BY_TWO, BenchOptions(("allreduce",)))
    return collector.report(made, baseline=baseline)


def test_rows_are_taken_as_they_come_and_the_rest_of_the_run_is_not_theirs() -> None:
    seen: list[int] = []
    collector = BenchCollector(lambda found: seen.append(found["size_bytes"]))
    collector.on_event({"event": "started", "schema_version": 1})
    collector.on_event({"event": "result", "run": "b-1", "node": "n0", **row()})
    assert seen == [1024]
    report = collect({"event": "setup", "num_ranks": 4}, {"event": "result", **row()})
    assert report.setup == {"num_ranks": 4}
    assert report.results == (row(),)
    assert bench.document(report)["collective"] == "all_reduce"


def test_a_wrong_element_fails_the_command() -> None:
    report = collect({"event": "result", **row(wrong=3)})
    with pytest.raises(CheckFailed, match="3 wrong elements in all_reduce"):
        bench.raise_if_bad(report)
    bench.raise_if_bad(collect({"event": "result", **row()}))


def test_a_saved_run_comes_back_and_slower_than_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    bench.save_baseline("monday", collect({"event": "result", **row()}))
    slow = row(time_us={**row()["time_us"], "median": 150.0})
    report = collect({"event": "result", **slow}, baseline=bench.load_baseline("monday"))
    with pytest.raises(CheckFailed, match=r"the worst is all_reduce of 1024 bytes, \+50%"):
        bench.raise_if_bad(report)
    bench.raise_if_bad(collect({"event": "result", **row()}, baseline=bench.load_baseline("monday")))


def test_a_name_that_nothing_is_saved_under_says_what_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    bench.save_baseline("monday", collect())
    with pytest.raises(UsageError, match="nothing is saved as 'tuesday'") as raised:
        bench.load_baseline("tuesday")
    assert raised.value.cause == "saved: monday"
    with pytest.raises(UsageError, match="is no name"):
        bench.load_baseline("../monday")
    (bench.baselines_dir() / "broken.json").write_text("[1]")
    with pytest.raises(ConfigError, match="not a saved bench"):
        bench.load_baseline("broken")


def test_the_links_limit_is_the_slowest_nodes() -> None:
    fast = RdmaDevice("mlx5_0", 1, state="4: ACTIVE", rate_gbps=400.0)
    down = replace(fast, name="mlx5_1", state="1: DOWN")
    facts = (
        NodeFacts("n0", rdma=(fast, replace(fast, name="mlx5_2"), down)),
        NodeFacts("n1", nics=(Nic("eth0", speed_mbps=100_000), Nic("eth1", speed_mbps=10))),
    )
    assert bench.hardware_of(TWO_BY_TWO, facts).limit_gb_s == pytest.approx(12.0)
    assert bench.hardware_of(TWO_BY_TWO, facts[:1]).limit_gb_s is None
    assert bench.hardware_of(plan((0, 1)), facts).limit_gb_s is None


def test_a_slow_link_is_named_by_its_node() -> None:
    cells = [[None if i == j else 1.0 if 2 in (i, j) else 10.0 for j in range(4)] for i in range(4)]
    matrix = {"collective": "p2p", "size_bytes": 1, "bandwidth_gb_s": cells, "wrong": 0, "algo": "library"}
    (link,) = collect({"event": "result", **matrix}).slow_links
    assert (link.ranks, link.host) == ((2,), "n1")
