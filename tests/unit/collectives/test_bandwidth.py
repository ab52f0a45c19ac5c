"""nccl-tests' definitions (PERFORMANCE.md and the GetBw of each src/*.cu), collective by collective."""

from __future__ import annotations

import pytest

from gpuctl.collectives.bandwidth import bandwidth, collective, parse_size, sweep
from gpuctl.errors import UsageError

N = 8
FACTORS = {
    "all_reduce": 2 * (N - 1) / N,
    "all_gather": (N - 1) / N,
    "reduce_scatter": (N - 1) / N,
    "broadcast": 1.0,
    "reduce": 1.0,
    "all_to_all": (N - 1) / N,
    "gather": (N - 1) / N,
    "scatter": (N - 1) / N,
    "send_recv": 1.0,
}


@pytest.mark.parametrize("name", FACTORS)
def test_busbw_is_algbw_times_the_collectives_factor(name: str) -> None:
    found = bandwidth(collective(name), 10_000_000, time_s=1e-3, num_ranks=N)
    assert found.algbw_gb_s == pytest.approx(10.0)
    assert found.busbw_gb_s == pytest.approx(10.0 * FACTORS[name])


def test_both_spellings_are_one_word() -> None:
    assert collective("allreduce") is collective("all_reduce")
    with pytest.raises(UsageError):
        collective("all_redcue")


def test_sizes_are_powers_of_1024_and_sweeps_end_at_the_largest() -> None:
    assert (parse_size("1K"), parse_size("16M"), parse_size("4096")) == (1024, 16 << 20, 4096)
    assert sweep(1024, 8192, 2.0) == (1024, 2048, 4096, 8192)
    with pytest.raises(UsageError):
        parse_size("16MB")
