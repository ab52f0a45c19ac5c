"""Timing: how long one operation takes on this rank, and what many such times amount to.

On a GPU the iterations are queued back to back and events stand between batches of them, so that
neither the host nor a synchronisation is measured. On a CPU calls block and each is timed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

NUM_BATCHES = 5
"""Batches of queued iterations on a GPU: enough for a median and a spread, few enough that an
event a batch costs nothing."""


@dataclass(frozen=True)
class TimeStats:
    """Microseconds an operation, over ranks and repeats."""

    mean: float
    min: float
    median: float
    p95: float
    max: float
    slowest_rank: int


@dataclass(frozen=True)
class Timing:
    """One rank's timing: seconds an operation, a value a batch (GPU) or a call (CPU)."""

    times_s: list[float]
    host_s: float
    """What one call held the host up: on a GPU the cost of queueing it."""


def time_calls(call: Callable[[], None], *, iters: int, device: torch.device) -> Timing:
    """Time ``iters`` calls on this rank."""
    if device.type == "cuda":
        return _time_on_stream(call, iters, device)
    times = []
    for _ in range(iters):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return Timing(times, statistics.fmean(times))


def summarise(times_s: Sequence[Sequence[float]]) -> TimeStats:
    """Return the statistics of ``times_s[rank][repeat]``.

    The mean is over everything (nccl-tests ``-a 1``): it is what the bandwidths are made of. The
    other figures are over the same values, so that a straggler shows.
    """
    values = sorted(t * 1e6 for rank in times_s for t in rank)
    means = [statistics.fmean(rank) for rank in times_s]
    return TimeStats(
        mean=statistics.fmean(values),
        min=values[0],
        median=statistics.median(values),
        p95=percentile(values, 95),
        max=values[-1],
        slowest_rank=means.index(max(means)),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile of sorted ``values``."""
    return values[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def variation(times_s: Sequence[Sequence[float]]) -> float:
    """Return the coefficient of variation over repeats, each repeat taken as its slowest rank."""
    repeats = [max(column) for column in zip(*times_s, strict=True)]
    if len(repeats) < 2:
        return 0.0
    return float(statistics.stdev(repeats) / statistics.fmean(repeats))


def _time_on_stream(call: Callable[[], None], iters: int, device: torch.device) -> Timing:
    batches = _batches(iters)
    with torch.cuda.device(device):
        marks = [_event() for _ in range(len(batches) + 1)]
        start = time.perf_counter()
        marks[0].record()
        for size, mark in zip(batches, marks[1:], strict=True):
            for _ in range(size):
                call()
            mark.record()
        host_s = (time.perf_counter() - start) / iters
        marks[-1].synchronize()
    spans = zip(marks, marks[1:], batches, strict=False)
    return Timing([begin.elapsed_time(end) / 1e3 / size for begin, end, size in spans], host_s)


def _batches(iters: int) -> list[int]:
    count = min(NUM_BATCHES, iters)
    return [iters * (i + 1) // count - iters * i // count for i in range(count)]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
