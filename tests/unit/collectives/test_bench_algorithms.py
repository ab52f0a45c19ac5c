"""The cost models, where ring and server cross, and the rounds of the p2p matrix."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("torch")

from gpuctl.collectives import matrix, measure, models, naive, ring

LINK = {"alpha_s": 50e-6, "bandwidth_b_s": 12.5e6}
"""100 Mbit/s."""


def test_the_ring_moves_the_same_for_any_number_of_ranks() -> None:
    free = {"alpha_s": 0.0, "bandwidth_b_s": 1e9}
    assert ring.cost_s(2, 10**9, **free) == pytest.approx(1.0)
    assert ring.cost_s(1000, 10**9, **free) == pytest.approx(1.998)
    assert naive.cost_s(1000, 10**9, **free) == pytest.approx(1998.0)


def test_reduce_scatter_and_all_gather_are_half_an_all_reduce() -> None:
    assert 2 * ring.half_cost_s(4, 1 << 20, **LINK) == pytest.approx(ring.cost_s(4, 1 << 20, **LINK))


@pytest.mark.parametrize("num_ranks", [3, 4, 8, 64])
def test_the_models_are_equal_where_they_are_said_to_cross(num_ranks: int) -> None:
    size = naive.crossing_bytes(num_ranks, **LINK)
    assert naive.cost_s(num_ranks, size, **LINK) == pytest.approx(ring.cost_s(num_ranks, size, **LINK))
    assert naive.cost_s(num_ranks, size / 2, **LINK) < ring.cost_s(num_ranks, size / 2, **LINK)
    assert naive.cost_s(num_ranks, size * 2, **LINK) > ring.cost_s(num_ranks, size * 2, **LINK)


def test_two_ranks_cross_nowhere() -> None:
    assert naive.crossing_bytes(2, **LINK) == 0


def test_a_link_comes_back_from_the_times_it_gives() -> None:
    alpha_s, bandwidth_b_s = 30e-6, 2e9
    small, large = (alpha_s + size / bandwidth_b_s for size in (models.SMALL_BYTES, models.LARGE_BYTES))
    link = models.fit(small, large)
    assert link.alpha_s == pytest.approx(alpha_s)
    assert link.bandwidth_b_s == pytest.approx(bandwidth_b_s)


def test_there_is_no_model_for_what_a_library_does() -> None:
    link = models.Link(1e-6, 1e9)
    assert models.predict_us("library", "all_reduce", 1024, 4, link) is None
    assert models.predict_us("ring", "all_reduce", 1024, 4, link) is not None


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7, 8, 32])
def test_every_pair_is_measured_once_and_no_rank_twice_a_round(num_ranks: int) -> None:
    rounds = matrix.rounds(num_ranks)
    for pairs in rounds:
        busy = [rank for pair in pairs for rank in pair]
        assert len(busy) == len(set(busy))
    assert sorted(pair for pairs in rounds for pair in pairs) == list(
        itertools.combinations(range(num_ranks), 2)
    )
    assert len(rounds) == num_ranks - 1 + num_ranks % 2


@pytest.mark.parametrize("num_ranks", [33, 64, 257])
def test_beyond_32_ranks_ring_and_shifts_touch_every_rank(num_ranks: int) -> None:
    rounds = matrix.rounds(num_ranks)
    pairs = [pair for group in rounds for pair in group]
    assert len(pairs) == len(set(pairs)) < num_ranks * (num_ranks.bit_length())
    assert {rank for pair in pairs for rank in pair} == set(range(num_ranks))
    assert {(r, r + 1) for r in range(num_ranks - 1)} <= set(pairs)
    for group in rounds:
        busy = [rank for pair in group for rank in pair]
        assert len(busy) == len(set(busy))


def test_a_straggler_shows_in_the_statistics() -> None:
    stats = measure.summarise([[1e-6] * 10, [5e-6] * 10])
    assert (stats.min, stats.median, stats.max) == pytest.approx((1.0, 3.0, 5.0))
    assert (stats.mean, stats.slowest_rank) == (pytest.approx(3.0), 1)
    assert measure.variation([[1e-6] * 10, [5e-6] * 10]) == pytest.approx(0.0)
    assert measure.percentile(list(range(1, 101)), 95) == 95
