"""The ring, written out: reduce-scatter, then all-gather, over send and receive.

N ranks, the buffer cut into N chunks at floor(i*S/N). In step s of the reduce-scatter rank r sends
chunk (r-s) to r+1 and adds chunk (r-s-1) that comes from r-1; after N-1 steps it owns the whole
chunk r+1. The all-gather goes on the same way, overwriting. Every rank sends 2(N-1)/N of the
buffer, whatever N is: that is where busbw's factor comes from (Patarasuk and Yuan, 2009).

A chunk travels in slices, and slice j is added while slice j+1 is under way: without that the
link idles during every addition. Chunks may be empty (fewer elements than ranks).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from gpuctl.collectives.engine import Engine, Pending

    Take = Callable[[Tensor, Tensor], None]

SLICE_BYTES = 1 << 20
"""A slice at most: fills a 100 Gb/s link past its latency, small enough to hide the addition."""
MIN_SLICE_BYTES = 64 << 10
SLICES_PER_CHUNK = 4
"""Smaller chunks are still cut while slices stay above the minimum: with one slice a chunk the link idles
between steps (measured at 100 Mbit/s, 256 KiB chunks, four ranks: 31 % over the model)."""


def cost_s(
    num_ranks: int, size_bytes: int, *, alpha_s: float, bandwidth_b_s: float, add_s_per_byte: float = 0.0
) -> float:
    """Return T = 2(N-1)*alpha + 2(N-1)/N*S/B + (N-1)/N*S*gamma of an all-reduce."""
    share = (num_ranks - 1) / num_ranks * size_bytes
    return 2 * (num_ranks - 1) * alpha_s + 2 * share / bandwidth_b_s + share * add_s_per_byte


def half_cost_s(num_ranks: int, size_bytes: int, *, alpha_s: float, bandwidth_b_s: float) -> float:
    """Return T = (N-1)*alpha + (N-1)/N*S/B of an all-gather or a reduce-scatter (S: the whole)."""
    return (num_ranks - 1) * (alpha_s + size_bytes / num_ranks / bandwidth_b_s)


def all_reduce(engine: Engine, x: Tensor, op: str) -> None:
    """Reduce ``x`` in place over the group; bitwise the same result on every rank."""
    chunks = _chunks(x, engine.size)
    _reduce_scatter(engine, chunks, op, shift=0)
    _all_gather(engine, chunks, shift=1)


def all_gather(engine: Engine, out: Tensor, x: Tensor) -> None:
    """Gather every rank's ``x`` into ``out``."""
    chunks = _chunks(out, engine.size)
    chunks[engine.rank].copy_(x)
    _all_gather(engine, chunks, shift=0)


def reduce_scatter(engine: Engine, out: Tensor, x: Tensor, op: str) -> None:
    """Leave rank r's part of the reduction in ``out``; ``x`` is used as scratch."""
    chunks = _chunks(x, engine.size)
    _reduce_scatter(engine, chunks, op, shift=-1)
    out.copy_(chunks[engine.rank])


@dataclass(frozen=True)
class _Slice:
    """One message each way in one step: the tensors are views of the chunks."""

    send: Tensor
    receive: Tensor


@dataclass(frozen=True)
class _UnderWay:
    """A slice whose messages have been started; ``staging`` is where the incoming one lands."""

    pending: Pending
    item: _Slice
    staging: Tensor

    def finish(self, take: Take | None) -> None:
        self.pending.wait()
        if take is not None and self.staging.numel():
            take(self.item.receive, self.staging)


def _reduce_scatter(engine: Engine, chunks: list[Tensor], op: str, *, shift: int) -> None:
    """After this, rank r owns chunk r+1+shift."""
    from gpuctl.collectives.engine import combine

    _pipeline(engine, chunks, lambda mine, received: combine(mine, received, op), shift)


def _all_gather(engine: Engine, chunks: list[Tensor], *, shift: int) -> None:
    """Rank r starts with chunk r+shift and ends with all."""
    _pipeline(engine, chunks, None, shift)


def _pipeline(engine: Engine, chunks: list[Tensor], take: Take | None, shift: int) -> None:
    """Run N-1 steps slice by slice, at most two slices under way.

    A slice is sent one step after it was taken, so that with two slices or more a chunk the
    addition of the one before never stands in its way; with a single slice it must be awaited.
    """
    num_slices = _num_slices(chunks)
    ahead = 1 if num_slices > 1 else 0
    staging = [chunks[0].new_empty(_slice_elements(chunks)) for _ in range(2)] if take else []
    under_way: deque[_UnderWay] = deque()
    for j, item in enumerate(_slices(engine, chunks, num_slices, shift)):
        into = staging[j % 2][: item.receive.numel()] if take else item.receive
        under_way.append(_UnderWay(_start(engine, item.send, into), item, into))
        while len(under_way) > ahead:
            under_way.popleft().finish(take)
    while under_way:
        under_way.popleft().finish(take)


def _start(engine: Engine, send: Tensor, into: Tensor) -> Pending:
    """Start both messages of a slice; an empty one is left out on both sides alike."""
    from gpuctl.collectives.engine import Message

    to_next = [Message(send, (engine.rank + 1) % engine.size)] if send.numel() else []
    from_previous = [Message(into, (engine.rank - 1) % engine.size)] if into.numel() else []
    return engine.exchange(to_next, from_previous)


def _slices(engine: Engine, chunks: list[Tensor], num_slices: int, shift: int) -> Iterator[_Slice]:
    num_ranks = engine.size
    for step in range(num_ranks - 1):
        send = _split(chunks[(engine.rank - step + shift) % num_ranks], num_slices)
        receive = _split(chunks[(engine.rank - step - 1 + shift) % num_ranks], num_slices)
        for k in range(num_slices):
            yield _Slice(send[k], receive[k])


def _chunks(x: Tensor, num_ranks: int) -> list[Tensor]:
    return _split(x, num_ranks)


def _split(x: Tensor, parts: int) -> list[Tensor]:
    """Cut at floor(i*S/parts): sizes differ by one at most, and may be 0."""
    bounds = [i * x.numel() // parts for i in range(parts + 1)]
    return [x[a:b] for a, b in itertools.pairwise(bounds)]


def _num_slices(chunks: list[Tensor]) -> int:
    largest = max(chunk.numel() for chunk in chunks) * chunks[0].element_size()
    return max(1, min(SLICES_PER_CHUNK, largest // MIN_SLICE_BYTES), -(-largest // SLICE_BYTES))


def _slice_elements(chunks: list[Tensor]) -> int:
    largest = max(chunk.numel() for chunk in chunks)
    return -(-largest // _num_slices(chunks)) + 1
