"""Layouts: the strategies, their degrees, and which rank sits at which coordinate.

Ranks are numbered with tp innermost, then dp, pp outermost: tp peers are neighbours (one node,
the fastest links), pipeline stages are far apart (they exchange the least).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of the mesh axes and the ZeRO stage on the dp axis."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    zero: int = 0

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp


@dataclass(frozen=True)
class Coordinate:
    """Where a rank stands on each axis."""

    pp: int
    dp: int
    tp: int


def coordinate_of(rank: int, dims: ParallelDims) -> Coordinate:
    """Return the coordinate of ``rank`` (0 <= rank < dims.world_size)."""
    assert 0 <= rank < dims.world_size
    return Coordinate(pp=rank // (dims.dp * dims.tp), dp=rank // dims.tp % dims.dp, tp=rank % dims.tp)


def rank_of(at: Coordinate, dims: ParallelDims) -> int:
    """Return the rank at ``at``; the inverse of :func:`coordinate_of`."""
    return (at.pp * dims.dp + at.dp) * dims.tp + at.tp
