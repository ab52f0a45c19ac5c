"""Layouts: the strategies, their degrees, and which rank sits at which coordinate.

Ranks are numbered with tp innermost, then dp, pp outermost: tp peers are neighbours (one node,
the fastest links), pipeline stages are far apart (they exchange the least).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from gpuctl.core.training import ModelConfig
from gpuctl.errors import DoesNotFit, UsageError


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


@dataclass(frozen=True)
class Strategy:
    """One row of the table of strategies: what ``--strategy`` names."""

    name: str
    zero: int
    summary: str


STRATEGIES: dict[str, Strategy] = {
    "ddp": Strategy("ddp", 0, "every rank holds everything; gradients are all-reduced"),
    "zero1": Strategy("zero1", 1, "optimizer state sharded; gradients reduce-scattered once a step"),
    "zero2": Strategy("zero2", 2, "gradients sharded too; reduce-scattered every micro-batch"),
}


def resolve_dims(
    strategy: str, world_size: int, *, tp: int | None, pp: int | None, zero: int | None, model: ModelConfig
) -> ParallelDims:
    """Return the degrees of ``strategy`` on ``world_size`` ranks.

    Raises UsageError for an unknown strategy or degrees that contradict it, DoesNotFit for a layout
    that this model or number of ranks cannot have.
    """
    plain = strategy.replace("-", "").replace("_", "").lower()
    row = STRATEGIES.get(plain)
    if row is None:
        near = difflib.get_close_matches(plain, STRATEGIES, n=1)
        raise UsageError(
            f"no strategy {strategy}",
            cause="; ".join(f"{r.name}: {r.summary}" for r in STRATEGIES.values()),
            hint=f"did you mean `-s {near[0]}`?" if near else "`-s zero2`",
        )
    if (tp or 1) > 1 or (pp or 1) > 1:
        raise UsageError("tensor and pipeline parallelism are not there yet", hint="leave --tp and --pp out")
    if zero is not None and zero != row.zero:
        wanted = next((r.name for r in STRATEGIES.values() if r.zero == zero), None)
        raise UsageError(
            f"--zero {zero} contradicts -s {row.name}, which is stage {row.zero}",
            hint=f"`-s {wanted}`" if wanted else None,
        )
    if model.dim % (2 * model.num_heads):
        raise DoesNotFit(f"dim {model.dim} does not divide over {model.num_heads} heads of even size")
    if model.num_heads % model.num_kv_heads:
        raise DoesNotFit(f"{model.num_heads} heads cannot share {model.num_kv_heads} key/value heads evenly")
    return ParallelDims(dp=world_size, zero=row.zero)
