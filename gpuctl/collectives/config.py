"""What a bench run is asked to do: written by the client, read by every rank. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Engine = Literal["torch", "direct"]
Algorithm = Literal["library", "ring", "naive"]
Op = Literal["sum", "prod", "min", "max", "avg"]


@dataclass(frozen=True)
class BenchConfig:
    """One ``gpuctl bench``: it travels as JSON in ``plan.program.config``."""

    collectives: tuple[str, ...] = ("all_reduce",)
    sizes_bytes: tuple[int, ...] = (1 << 10, 1 << 20)
    """Wanted sizes; the collectives whose buffer is split over ranks round them down."""
    iters: int = 20
    warmup_iters: int = 5
    """nccl-tests ran 5 before 2.17 and runs 1 now: it is part of every result for that reason."""
    dtype: str = "float32"
    op: Op = "sum"
    root: int = 0
    backend: Literal["gloo", "nccl"] = "gloo"
    engine: Engine = "torch"
    algo: Algorithm = "library"
    groups: tuple[tuple[int, ...], ...] = ()
    """Disjoint sets of ranks, measured side by side; empty: one group of all."""
    check: bool = True
    expected_ranks: int | None = None
    """A bench that came up with another number of ranks measures something else: it fails."""
    library_path: str | None = None
    """``--engine direct``: the library to load; None: the copy torch has mapped."""
    timeout_s: float = 300.0
    """How long the ranks wait for each other, at init and in a collective."""
