"""What an algorithm should take on a link: the alpha-beta model, fitted from this cluster's own link.

Two parameters cannot fit a library that changes its protocol and algorithm with the size; for the
two algorithms written out here they are a fair account (expect some 10-20 %, as ASTRA-sim's
published validation does).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from gpuctl.collectives import measure, naive, ring
from gpuctl.collectives.engine import Engine, Message

SMALL_BYTES = 8
LARGE_BYTES = 4 << 20
ITERS = 10


@dataclass(frozen=True)
class Link:
    """One direction of the slowest link of the ring r -> r+1."""

    alpha_s: float
    bandwidth_b_s: float


_MODELS: dict[tuple[str, str], Callable[..., float]] = {
    ("ring", "all_reduce"): ring.cost_s,
    ("ring", "all_gather"): ring.half_cost_s,
    ("ring", "reduce_scatter"): ring.half_cost_s,
    ("naive", "all_reduce"): naive.cost_s,
}


def predict_us(
    algo: str, collective: str, size_bytes: int, num_ranks: int, link: Link | None
) -> float | None:
    """Return the model's time in microseconds, None where there is no model."""
    model = _MODELS.get((algo, collective))
    if model is None or link is None or num_ranks < 2:
        return None
    return model(num_ranks, size_bytes, alpha_s=link.alpha_s, bandwidth_b_s=link.bandwidth_b_s) * 1e6


def fit(small_s: float, large_s: float) -> Link:
    """Return alpha and B from the times of SMALL_BYTES and LARGE_BYTES."""
    per_byte = max(large_s - small_s, 1e-12) / (LARGE_BYTES - SMALL_BYTES)
    return Link(max(0.0, small_s - SMALL_BYTES * per_byte), 1 / per_byte)


def measure_link(engine: Engine) -> Link | None:
    """Measure one message around the ring, all ranks at once, and take the slowest rank's link."""
    if engine.size < 2:
        return None
    times = [_message_time_s(engine, size_bytes) for size_bytes in (SMALL_BYTES, LARGE_BYTES)]
    slowest = torch.tensor(times, dtype=torch.float64, device=engine.device)
    engine.all_reduce(slowest, "max")
    small_s, large_s = slowest.tolist()
    return fit(small_s, large_s)


def _message_time_s(engine: Engine, size_bytes: int) -> float:
    send = torch.zeros(size_bytes, dtype=torch.uint8, device=engine.device)
    receive = torch.empty_like(send)
    after, before = (engine.rank + 1) % engine.size, (engine.rank - 1) % engine.size

    def call() -> None:
        engine.exchange([Message(send, after)], [Message(receive, before)]).wait()

    call()
    engine.barrier()
    return median(measure.time_calls(call, iters=ITERS, device=engine.device).times_s)
