"""The table that grows, the matrix, CSV and the bars."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from gpuctl.cli.bench_text import (
    Table,
    csv_text,
    link_line,
    matrix_lines,
    plot_lines,
    rate_text,
    slow_link_line,
)
from gpuctl.collectives.verdict import SlowLink


def row(**fields: Any) -> dict[str, Any]:
    times = {"mean": 101.0, "min": 90.0, "median": 100.04, "p95": 120.0, "max": 130.0}
    known = {"collective": "all_reduce", "size_bytes": 1 << 20, "count": 1 << 18, "wrong": 0, "checked": True}
    rates = {"algbw_gb_s": 10.382, "busbw_gb_s": 15.573, "model_us": None, "torch_us": None, "group": None}
    return {**known, **rates, "time_us": times, **fields}


def test_a_row_stands_under_the_names_of_its_columns() -> None:
    table = Table(has_groups=False, has_model=False, has_torch=False)
    assert table.head().split("  ")[-1].strip() == "wrong"
    assert table.line(row()).split() == [
        "all_reduce",
        "1.0",
        "MiB",
        "262144",
        "100.0",
        "120.0",
        "10.382",
        "15.573",
        "0",
    ]
    assert len(table.head()) == len(table.line(row()))


def test_groups_models_and_the_other_engine_add_columns() -> None:
    table = Table(has_groups=True, has_model=True, has_torch=True)
    assert table.head().endswith(" group     model us     torch us")
    assert table.line(row(group=1, model_us=90.0)).split()[-3:] == ["1", "90.0", "-"]


def test_not_checked_is_not_zero_wrong() -> None:
    table = Table(has_groups=False, has_model=False, has_torch=False)
    assert table.line(row(checked=False)).split()[-1] == "n/a"


@pytest.mark.parametrize(
    ("gb_s", "text"),
    [(None, "-"), (0.0, "0.000"), (0.00011234, "0.000112"), (0.25, "0.250"), (478.4, "478.400")],
)
def test_small_rates_keep_their_digits(gb_s: float | None, text: str) -> None:
    assert rate_text(gb_s) == text


def test_a_matrix_reads_from_row_to_column() -> None:
    matrix = {
        "collective": "p2p",
        "size_bytes": 4096,
        "bandwidth_gb_s": [[None, 1.5], [2.25, None]],
        "wrong": 0,
    }
    assert list(matrix_lines(matrix)) == [
        "p2p, 4.0 KiB messages, GB/s from row to column; 0 wrong",
        "              0        1",
        "     0        -    1.500",
        "     1    2.250        -",
    ]


def test_csv_has_one_line_a_row_and_leaves_matrices_out() -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text([row(), {"collective": "p2p"}]))))
    assert len(rows) == 1
    assert (rows[0]["median_us"], rows[0]["busbw_gb_s"], rows[0]["model_us"]) == ("100.04", "15.573", "")


def test_the_longest_bar_is_the_sweeps_best() -> None:
    lines = list(plot_lines([row(busbw_gb_s=5.0), row(busbw_gb_s=10.0), row(busbw_gb_s=None)]))
    assert [line.count("#") for line in lines] == [0, 0, 20, 40]
    assert [line.count("#") for line in plot_lines([row(busbw_gb_s=0.0)])] == [0, 0, 0]


def test_two_ranks_cross_nowhere() -> None:
    link = {"alpha_us": 50.0, "bandwidth_gb_s": 1.25, "crossing_bytes": 0.0}
    assert link_line(link) == "link: 50 us, 1.250 GB/s"
    assert link_line({**link, "crossing_bytes": 2048.0}).endswith(
        "; by the models the ring wins from 2.0 KiB"
    )


def test_a_slow_rank_and_a_slow_pair_read_differently() -> None:
    rank, pair = SlowLink((2,), 1.0, 10.0, "n1"), SlowLink((0, 3), 1.0, 10.0, "n0 -> n1")
    assert slow_link_line(rank) == "the links of rank 2 (n1): 1.000 GB/s, the median link 10.000"
    assert slow_link_line(pair) == "rank 0 -> rank 3 (n0 -> n1): 1.000 GB/s, the median link 10.000"
