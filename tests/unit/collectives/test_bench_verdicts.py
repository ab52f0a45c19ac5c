"""What is called good, what is called slower, and who is blamed for a slow link."""

from __future__ import annotations

from typing import Any

import pytest

from gpuctl.collectives.reference import FIGURES
from gpuctl.collectives.verdict import Hardware, compare, judge, slow_links

H200 = Hardware("NVIDIA H200", num_nodes=1, gpus_per_node=8)


def row(**fields: Any) -> dict[str, Any]:
    times = {"mean": 100.0, "min": 90.0, "median": 100.0, "p95": 120.0, "max": 130.0}
    plain = {"collective": "all_reduce", "size_bytes": 1 << 30, "dtype": "float32", "op": "sum"}
    more = {"num_ranks": 8, "group": None, "algo": "library", "engine": "torch", "cv": 0.01}
    return {**plain, **more, "time_us": times, "busbw_gb_s": 478.0, **fields}


@pytest.mark.parametrize(
    ("busbw", "level"), [(478.0, "good"), (430.2, "good"), (430.0, "fair"), (358.5, "fair"), (358.0, "bad")]
)
def test_the_bands_are_at_90_and_75_percent(busbw: float, level: str) -> None:
    (verdict,) = judge([row(busbw_gb_s=busbw)], H200, "nccl")
    assert (verdict.level, verdict.reference) == (level, 478)
    assert verdict.source is not None


def test_hardware_nobody_published_gets_no_verdict_but_its_links_limit() -> None:
    unknown = Hardware("Some GPU", num_nodes=4, gpus_per_node=8, limit_gb_s=24.0)
    (verdict,) = judge([row(busbw_gb_s=18.0)], unknown, "nccl")
    assert verdict.level == "unknown"
    assert verdict.note == (
        "no published figure for this hardware; 75% of what the slowest link allows (24.0 GB/s)"
    )


def test_another_layout_of_known_hardware_is_unknown() -> None:
    (verdict,) = judge([row()], Hardware("NVIDIA H200", num_nodes=1, gpus_per_node=2), "nccl")
    assert verdict.level == "unknown"


def test_small_and_large_sizes_are_judged_apart() -> None:
    rows = [row(size_bytes=8, busbw_gb_s=0.001), row(size_bytes=1 << 24), row()]
    small, large = sorted(judge(rows, H200, "nccl"), key=lambda v: v.size_bytes)
    assert (small.regime, small.unit, small.measured) == ("small", "us", 100.0)
    assert (large.regime, large.level) == ("large", "good")


def test_a_millisecond_for_few_bytes_on_gpus_is_bad() -> None:
    slow = row(size_bytes=8, time_us={"median": 1500.0})
    assert [v.level for v in judge([slow], H200, "nccl")] == ["bad"]
    assert [v.level for v in judge([slow], H200, "gloo")] == ["unknown"]


def test_an_algorithm_written_by_hand_is_not_held_against_the_library() -> None:
    assert judge([row(algo="ring")], H200, "nccl") == ()


@pytest.mark.parametrize("device", ["NVIDIA H100 80GB HBM3", "NVIDIA H100 NVL", "NVIDIA H100 PCIe"])
def test_the_three_h100s_are_told_apart(device: str) -> None:
    matching = {figure.busbw_gb_s for figure in FIGURES if figure.matches(device) and figure.num_nodes == 1}
    assert (
        matching
        == {
            "NVIDIA H100 80GB HBM3": {480, 363},
            "NVIDIA H100 NVL": {208},
            "NVIDIA H100 PCIe": {40},
        }[device]
    )


def test_every_figure_has_a_source() -> None:
    assert all(figure.source for figure in FIGURES)


@pytest.mark.parametrize(
    ("now_us", "cv", "is_regression"),
    [
        (104.0, 0.001, False),
        (106.0, 0.001, True),
        (106.0, 0.03, False),
        (120.0, 0.03, True),
        (80.0, 0.0, False),
    ],
)
def test_slower_counts_beyond_five_percent_and_beyond_noise(
    now_us: float, cv: float, is_regression: bool
) -> None:
    (found,) = compare([row(time_us={"median": now_us}, cv=cv)], [row()])
    assert found.is_regression is is_regression


def test_only_the_same_measurement_is_compared() -> None:
    others = [row(dtype="bfloat16"), row(num_ranks=4), row(algo="ring"), row(engine="direct"), row(group=0)]
    assert compare([row()], others) == ()


def matrix(num_ranks: int, **slow: float) -> list[list[float | None]]:
    cells: list[list[float | None]] = [
        [None if i == j else 10.0 for j in range(num_ranks)] for i in range(num_ranks)
    ]
    for key, value in slow.items():
        i, j = int(key[1]), int(key[2])
        cells[i][j] = value
    return cells


def test_one_slow_pair_is_named_as_a_pair() -> None:
    (found,) = slow_links(matrix(4, p13=3.0))
    assert (found.ranks, found.bandwidth_gb_s, found.median_gb_s) == ((1, 3), 3.0, 10.0)


def test_a_rank_whose_links_are_all_slow_is_named_alone() -> None:
    slow = {f"p2{j}": 3.0 for j in (0, 1, 3)} | {f"p{i}2": 3.0 for i in (0, 1, 3)}
    (found,) = slow_links(matrix(4, **slow))
    assert found.ranks == (2,)


def test_even_links_blame_nobody() -> None:
    assert slow_links(matrix(4, p01=8.0)) == ()
    assert slow_links([[None, 0.1], [10.0, None]]) == ()
