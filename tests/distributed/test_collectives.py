"""Every collective on real Gloo ranks, checked to the element; the ring and the server too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.bench_ranks import run_bench

ALL = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "send_recv",
    "gather",
    "scatter",
)
ODD_SIZES = (4, 12, 60, 68, 4124, 3_000_044)
"""Fewer elements than ranks, and sizes that no number of ranks, slices or chunks divides."""


def test_every_collective_of_the_library_is_right(tmp_path: Path) -> None:
    config = {"collectives": [*ALL, "barrier", "p2p"], "sizes_bytes": ODD_SIZES[2:], "iters": 2, "root": 2}
    run = run_bench(4, {**config, "warmup_iters": 1}, tmp_path)
    assert run.codes == [0] * 4, run.stderr
    assert {row["collective"] for row in run.rows} == {*ALL, "barrier", "p2p"}
    assert all(row["wrong"] == 0 and row["checked"] for row in run.rows)
    assert run.first("rank_done")["rows"] == len(run.rows)


@pytest.mark.parametrize("algo", ["ring", "naive"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_an_algorithm_by_hand_is_right_at_any_size(tmp_path: Path, algo: str, num_ranks: int) -> None:
    names = ["all_reduce", "all_gather", "reduce_scatter"]
    config = {"collectives": names, "sizes_bytes": ODD_SIZES, "iters": 2, "warmup_iters": 1, "algo": algo}
    run = run_bench(num_ranks, config, tmp_path)
    assert run.codes == [0] * num_ranks, run.stderr
    assert {row["collective"] for row in run.rows} == set(names)
    assert [row["size_bytes"] for row in run.rows if row["collective"] == "all_reduce"] == list(ODD_SIZES)
    assert all(row["wrong"] == 0 for row in run.rows)
    assert run.first("link")["bandwidth_gb_s"] > 0
    assert all(row["model_us"] > 0 for row in run.rows if row["collective"] == "all_reduce")


@pytest.mark.parametrize(("op", "dtype"), [("prod", "bfloat16"), ("max", "int8"), ("min", "float16")])
def test_every_op_has_an_exact_answer(tmp_path: Path, op: str, dtype: str) -> None:
    config = {"sizes_bytes": [4098], "iters": 1, "warmup_iters": 1, "op": op, "dtype": dtype}
    run = run_bench(3, config, tmp_path)
    assert [row["wrong"] for row in run.rows] == [0], run.stderr


def test_groups_are_measured_side_by_side(tmp_path: Path) -> None:
    config = {"collectives": ["all_reduce", "all_gather", "barrier"], "sizes_bytes": [4096], "iters": 2}
    run = run_bench(4, {**config, "groups": [[0, 2], [1, 3]]}, tmp_path)
    assert run.codes == [0] * 4, run.stderr
    assert [(row["group"], row["num_ranks"]) for row in run.rows] == [(0, 2), (1, 2)] * 3
    assert all(row["slowest_rank"] in ((0, 2), (1, 3))[row["group"]] for row in run.rows)
    assert all(row["wrong"] == 0 for row in run.rows)


def test_an_unchecked_run_never_reads_as_a_checked_one(tmp_path: Path) -> None:
    run = run_bench(1, {"sizes_bytes": [64], "iters": 1, "check": False}, tmp_path)
    assert [row["checked"] for row in run.rows] == [False], run.stderr
    assert run.rows[0]["busbw_gb_s"] == 0


def test_another_number_of_ranks_than_planned_is_an_error(tmp_path: Path) -> None:
    run = run_bench(1, {"sizes_bytes": [64], "expected_ranks": 4}, tmp_path)
    assert run.codes == [1]
    assert "1 ranks came up, 4 were expected" in run.stderr
