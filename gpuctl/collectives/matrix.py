"""The p2p matrix: every pair of ranks on its own, both directions, so that one bad link shows.

Pairs of one round are disjoint (the circle method of a round robin), so a round measures n/2 links
at once and no rank's link is shared; above MAX_ALL_PAIRS ranks the ring and shifts by powers of
two are measured instead of n^2 pairs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gpuctl.collectives.bandwidth import DTYPE_BYTES
from gpuctl.collectives.config import BenchConfig
from gpuctl.collectives.engine import Engine, Message
from gpuctl.collectives.patterns import tagged

MAX_ALL_PAIRS = 32
LATENCY_ELEMENTS = 1

Pair = tuple[int, int]


def rounds(num_ranks: int) -> tuple[tuple[Pair, ...], ...]:
    """Return the rounds of disjoint pairs (low, high): all of them, or ring and shifts."""
    if num_ranks <= MAX_ALL_PAIRS:
        return _round_robin(num_ranks)
    shifts = [1 << k for k in range(num_ranks.bit_length()) if 1 << k <= num_ranks // 2]
    return tuple(part for shift in shifts for part in _shift_rounds(num_ranks, shift))


def measure(engine: Engine, size_bytes: int, settings: BenchConfig) -> Iterator[dict[str, Any]]:
    """Yield one row with the matrix of bandwidths and latencies for ``size_bytes``; null: not measured."""
    n = engine.size
    count = max(1, size_bytes // DTYPE_BYTES[settings.dtype])
    cells = torch.zeros(3, n, n, dtype=torch.float64, device=engine.device)
    for pairs in rounds(n):
        pair = next((p for p in pairs if engine.rank in p), None)
        if pair is not None:
            _measure_pair(engine, pair, count, settings, cells)
        engine.barrier()
    engine.all_reduce(cells, "sum")
    rate, latency, wrong = cells.cpu().tolist()
    yield {
        "collective": "p2p",
        "size_bytes": count * DTYPE_BYTES[settings.dtype],
        "dtype": settings.dtype,
        "num_ranks": n,
        "algo": "library",
        "engine": engine.name,
        "bandwidth_gb_s": _known(rate),
        "latency_us": _known(latency),
        "wrong": int(sum(map(sum, wrong))),
        "checked": settings.check,
        "iters": settings.iters,
        "warmup_iters": settings.warmup_iters,
    }


def _known(cells: list[list[float]]) -> list[list[float | None]]:
    return [[value if value > 0 else None for value in row] for row in cells]


def _measure_pair(engine: Engine, pair: Pair, count: int, settings: BenchConfig, cells: Tensor) -> None:
    """Fill cells[what][from][to]: each sender its own bandwidth, the lower rank the latency."""
    peer = pair[1] if engine.rank == pair[0] else pair[0]
    buffer = torch.empty(count, dtype=getattr(torch, settings.dtype), device=engine.device)
    token = torch.zeros(LATENCY_ELEMENTS, dtype=torch.float32, device=engine.device)
    round_trip_s = _ping_pong(engine, pair, peer, token, settings.iters)
    cells[1, engine.rank, peer] = round_trip_s / 2 * 1e6
    for sender in pair:
        if engine.rank == sender:
            _fill(buffer, sender * engine.size + peer, settings.dtype)
        elapsed_s = _one_way(engine, sender, peer, buffer, token, settings)
        if engine.rank == sender:
            payload = count * buffer.element_size() * settings.iters
            cells[0, sender, peer] = payload / 1e9 / max(elapsed_s - round_trip_s / 2, 1e-9)
        elif settings.check:
            cells[2, sender, engine.rank] = _wrong(buffer, sender * engine.size + engine.rank, settings.dtype)


def _ping_pong(engine: Engine, pair: Pair, peer: int, token: Tensor, iters: int) -> float:
    """Return the seconds of one round trip of a few bytes."""
    first, then = (_send, _receive) if engine.rank == pair[0] else (_receive, _send)
    first(engine, token, peer)
    then(engine, token, peer)
    _synchronize(engine)
    start = time.perf_counter()
    for _ in range(iters):
        first(engine, token, peer)
        then(engine, token, peer)
    _synchronize(engine)
    return (time.perf_counter() - start) / iters


def _one_way(
    engine: Engine, sender: int, peer: int, buffer: Tensor, token: Tensor, settings: BenchConfig
) -> float:
    """Return the seconds from the first byte sent to the receiver's answer after the last."""
    move, answer = (_send, _receive) if engine.rank == sender else (_receive, _send)
    for _ in range(max(1, settings.warmup_iters)):
        move(engine, buffer, peer)
    answer(engine, token, peer)
    _synchronize(engine)
    start = time.perf_counter()
    for _ in range(settings.iters):
        move(engine, buffer, peer)
    answer(engine, token, peer)
    _synchronize(engine)
    return time.perf_counter() - start


def _send(engine: Engine, x: Tensor, peer: int) -> None:
    engine.exchange([Message(x, peer)], []).wait()


def _receive(engine: Engine, x: Tensor, peer: int) -> None:
    engine.exchange([], [Message(x, peer)]).wait()


def _synchronize(engine: Engine) -> None:
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)


def _fill(buffer: Tensor, tag: int, dtype: str) -> None:
    buffer.copy_(tagged(tag, torch.arange(buffer.numel(), device=buffer.device), dtype))


def _wrong(buffer: Tensor, tag: int, dtype: str) -> int:
    idx = torch.arange(buffer.numel(), device=buffer.device)
    return int((buffer != tagged(tag, idx, dtype).to(buffer.dtype)).sum())


def _round_robin(num_ranks: int) -> tuple[tuple[Pair, ...], ...]:
    """The circle method: n-1 rounds (n when odd: one rank sits out each) of disjoint pairs."""
    seats: list[int | None] = [*range(num_ranks), *([None] if num_ranks % 2 else [])]
    table = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        table.append(tuple(_ordered(a, b) for a, b in facing if a is not None and b is not None))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(table)


def _ordered(a: int, b: int) -> Pair:
    return (a, b) if a < b else (b, a)


def _shift_rounds(num_ranks: int, shift: int) -> list[tuple[Pair, ...]]:
    """The pairs (r, r+shift), dealt into as few rounds of disjoint pairs as going in order gives."""
    pairs = sorted({_ordered(r, (r + shift) % num_ranks) for r in range(num_ranks)})
    table: list[tuple[Pair, ...]] = []
    while pairs:
        busy: set[int] = set()
        taken = []
        for pair in pairs:
            if busy.isdisjoint(pair):
                busy.update(pair)
                taken.append(pair)
        table.append(tuple(taken))
        pairs = [pair for pair in pairs if pair not in set(taken)]
    return table
