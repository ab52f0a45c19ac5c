"""The formulas and size rules against what nccl-tests itself printed.

Rows (collective, ranks, size, count, time_us, algbw, busbw) are figures of recorded runs on float:
microsoft/superbenchmark tests/data/nccl_*.log (8 x A100-SXM4-40GB, NCCL 2.8, out of place),
kvcache-ai/Mooncake#3484 (8 ranks, all_reduce), NVIDIA/nccl-tests#128 (sizes on 8 ranks).
"""

from __future__ import annotations

import pytest

from gpuctl.collectives.bandwidth import bandwidth, collective, count_per_rank, reported_bytes

RECORDED = (
    ("all_reduce", 8, 1048576, 262144, 74.78, 14.02, 24.54),
    ("all_reduce", 8, 67108864, 16777216, 584.5, 114.81, 200.91),
    ("all_reduce", 8, 8589934592, 2147483648, 63896, 134.44, 235.26),
    ("all_reduce", 8, 33554432, 8388608, 195.40, 171.72, 300.51),
    ("all_gather", 8, 4194304, 131072, 100.7, 41.64, 36.43),
    ("all_gather", 8, 8589934592, 268435456, 33646, 255.31, 223.39),
    ("reduce_scatter", 8, 1048576, 32768, 72.37, 14.49, 12.68),
    ("reduce_scatter", 8, 4294967296, 134217728, 16400, 261.89, 229.15),
    ("all_to_all", 8, 16777216, 524288, 160.4, 104.62, 91.55),
    ("all_to_all", 8, 8589934592, 268435456, 33508, 256.36, 224.31),
    ("reduce", 8, 4194304, 1048576, 81.47, 51.48, 51.48),
    ("broadcast", 8, 1073741824, 268435456, 4769.2, 225.14, 225.14),
)


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: f"{row[0]}-{row[2]}")
def test_a_recorded_row_comes_out_again(row: tuple[str, int, int, int, float, float, float]) -> None:
    name, num_ranks, size_bytes, count, time_us, algbw, busbw = row
    kind = collective(name)
    assert count_per_rank(kind, size_bytes, element_bytes=4, num_ranks=num_ranks) == count
    assert reported_bytes(kind, count, element_bytes=4, num_ranks=num_ranks) == size_bytes
    found = bandwidth(kind, size_bytes, time_s=time_us / 1e6, num_ranks=num_ranks)
    # Printed times have four digits, and the bandwidth was made of more.
    assert found.algbw_gb_s == pytest.approx(algbw, rel=1e-3)
    assert found.busbw_gb_s == pytest.approx(busbw, rel=1e-3)


@pytest.mark.parametrize(
    ("wanted", "count", "size"), [(4, 0, 0), (64, 0, 0), (128, 4, 128), (200, 4, 128), (256, 8, 256)]
)
def test_a_split_buffer_is_rounded_down_to_sixteen_bytes_a_rank(wanted: int, count: int, size: int) -> None:
    kind = collective("reduce_scatter")
    assert count_per_rank(kind, wanted, element_bytes=4, num_ranks=8) == count
    assert reported_bytes(kind, count, element_bytes=4, num_ranks=8) == size


@pytest.mark.parametrize(("element_bytes", "count"), [(1, 112), (2, 56), (4, 28), (8, 14)])
def test_the_rounding_is_in_bytes_whatever_the_type(element_bytes: int, count: int) -> None:
    kind = collective("all_gather")
    assert count_per_rank(kind, 3 * 127, element_bytes=element_bytes, num_ranks=3) == count


def test_a_whole_buffer_is_only_rounded_to_elements() -> None:
    assert count_per_rank(collective("all_reduce"), 4099, element_bytes=4, num_ranks=3) == 1024


def test_one_rank_has_no_bus() -> None:
    found = bandwidth(collective("all_reduce"), 1 << 20, time_s=1e-3, num_ranks=1)
    assert found.algbw_gb_s > 0
    assert found.busbw_gb_s == 0
