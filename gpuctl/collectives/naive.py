"""The naive way: rank 0 is a server that receives every buffer and sends every result.

It moves 2(N-1)*S over one link where the ring moves 2(N-1)/N*S over each: the reason that rings
exist. For few bytes it wins nevertheless, with two latencies instead of 2(N-1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from gpuctl.collectives.engine import Engine

SERVER = 0
SLICE_BYTES = 4 << 20
"""Bounds what the server stages: N-1 slices."""


def cost_s(
    num_ranks: int, size_bytes: int, *, alpha_s: float, bandwidth_b_s: float, add_s_per_byte: float = 0.0
) -> float:
    """Return T = 2*alpha + 2(N-1)*S/B + (N-1)*S*gamma of an all-reduce, at the server's link."""
    total = (num_ranks - 1) * size_bytes
    return 2 * alpha_s + 2 * total / bandwidth_b_s + total * add_s_per_byte


def crossing_bytes(num_ranks: int, *, alpha_s: float, bandwidth_b_s: float) -> float:
    """Return the size above which the ring's all-reduce is the faster one.

    2(N-1)a + 2(N-1)/N*S/B = 2a + 2(N-1)*S/B solved for S: N(N-2)/(N-1)^2 * a*B; 0 for two ranks.
    """
    if num_ranks < 2:
        return 0.0
    return num_ranks * (num_ranks - 2) / (num_ranks - 1) ** 2 * alpha_s * bandwidth_b_s


def all_reduce(engine: Engine, x: Tensor, op: str) -> None:
    """Reduce ``x`` in place: everybody sends, the server combines in rank order and answers."""
    for part in _slices(x):
        if engine.rank == SERVER:
            _combine_all(engine, part, op)
            _send_to_all(engine, [part] * engine.size)
        else:
            _send_to_server(engine, part)
            _receive_from_server(engine, part)


def all_gather(engine: Engine, out: Tensor, x: Tensor) -> None:
    """Gather every rank's ``x`` into ``out`` through the server."""
    if engine.rank == SERVER:
        parts = list(out.chunk(engine.size))
        parts[SERVER].copy_(x)
        _receive_from_all(engine, parts)
        _send_to_all(engine, [out] * engine.size)
    else:
        _send_to_server(engine, x)
        _receive_from_server(engine, out)


def reduce_scatter(engine: Engine, out: Tensor, x: Tensor, op: str) -> None:
    """Leave rank r's part of the reduction in ``out``; the server's ``x`` is used as scratch."""
    if engine.rank == SERVER:
        for part in _slices(x):
            _combine_all(engine, part, op)
        parts = list(x.chunk(engine.size))
        _send_to_all(engine, parts)
        out.copy_(parts[SERVER])
    else:
        for part in _slices(x):
            _send_to_server(engine, part)
        _receive_from_server(engine, out)


def _combine_all(engine: Engine, part: Tensor, op: str) -> None:
    from gpuctl.collectives.engine import combine

    staged = [part if rank == SERVER else part.new_empty(part.shape) for rank in range(engine.size)]
    _receive_from_all(engine, staged)
    for rank in range(engine.size):
        if rank != SERVER:
            combine(part, staged[rank], op)


def _receive_from_all(engine: Engine, parts: list[Tensor]) -> None:
    from gpuctl.collectives.engine import Message

    receives = [Message(part, rank) for rank, part in enumerate(parts) if rank != SERVER]
    engine.exchange([], receives).wait()


def _send_to_all(engine: Engine, parts: list[Tensor]) -> None:
    from gpuctl.collectives.engine import Message

    engine.exchange([Message(part, rank) for rank, part in enumerate(parts) if rank != SERVER], []).wait()


def _send_to_server(engine: Engine, x: Tensor) -> None:
    from gpuctl.collectives.engine import Message

    engine.exchange([Message(x, SERVER)], []).wait()


def _receive_from_server(engine: Engine, x: Tensor) -> None:
    from gpuctl.collectives.engine import Message

    engine.exchange([], [Message(x, SERVER)]).wait()


def _slices(x: Tensor) -> list[Tensor]:
    step = max(1, SLICE_BYTES // x.element_size())
    return [x[start : start + step] for start in range(0, x.numel(), step)]
