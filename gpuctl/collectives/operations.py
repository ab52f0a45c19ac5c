"""The collectives as rows: what each rank holds, the call, and what must be there afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpuctl.collectives import naive, ring
from gpuctl.collectives.bandwidth import DTYPE_BYTES
from gpuctl.collectives.config import Algorithm
from gpuctl.collectives.engine import Engine, Message
from gpuctl.collectives.patterns import reduced, tagged, terms

CHECK_CHUNK = 1 << 22
"""Elements checked at a time: the expected values are int64, they must not double the memory."""


@dataclass(frozen=True)
class Case:
    """One rank's view of one measurement. ``count`` is c: its part, or its whole buffer."""

    rank: int
    num_ranks: int
    count: int
    op: str
    root: int
    dtype: str


Values = Callable[[Case, Tensor], Tensor]


@dataclass(frozen=True)
class Operation:
    """A collective. ``send`` and ``receive`` are buffer sizes in parts of ``count`` elements.

    ``send`` 0 means in place: the receive buffer is filled and called on.
    """

    name: str
    call: Callable[[Engine, Case, Tensor, Tensor], None]
    initial: Values
    expected: Values
    send: Callable[[int], int] = lambda _num_ranks: 0
    receive: Callable[[int], int] = lambda _num_ranks: 1
    root_only: bool = False


def _whole(num_ranks: int) -> int:
    return num_ranks


def _part(_num_ranks: int) -> int:
    return 1


def _tagged(tag: Callable[[Case, Tensor], Tensor | int]) -> Values:
    """Values that name the sender and slot; ``tag`` maps the part number of an element to it."""

    def values(case: Case, idx: Tensor) -> Tensor:
        return tagged(tag(case, idx // case.count), idx % case.count, case.dtype)

    return values


def _terms(case: Case, idx: Tensor) -> Tensor:
    return terms(case.rank, case.num_ranks, idx, op=case.op, dtype=case.dtype)


def _sum(case: Case, idx: Tensor) -> Tensor:
    return reduced(case.num_ranks, idx, op=case.op, dtype=case.dtype)


def _part_of_sum(case: Case, idx: Tensor) -> Tensor:
    return _sum(case, idx + case.rank * case.count)


def _send_recv(engine: Engine, case: Case, send: Tensor, receive: Tensor) -> None:
    after, before = (case.rank + 1) % case.num_ranks, (case.rank - 1) % case.num_ranks
    if case.num_ranks == 1:
        receive.copy_(send)
        return
    engine.exchange([Message(send, after)], [Message(receive, before)]).wait()


_own: Values = _tagged(lambda case, _part: case.rank)
_from_root: Values = _tagged(lambda case, _part: case.root)
_from_each: Values = _tagged(lambda _case, part: part)

LIBRARY: dict[str, Operation] = {
    row.name: row
    for row in (
        Operation("all_reduce", lambda e, c, s, r: e.all_reduce(r, c.op), _terms, _sum),
        Operation("reduce", lambda e, c, s, r: e.reduce(r, c.root, c.op), _terms, _sum, root_only=True),
        Operation("broadcast", lambda e, c, s, r: e.broadcast(r, c.root), _own, _from_root),
        Operation("all_gather", lambda e, c, s, r: e.all_gather(r, s), _own, _from_each, _part, _whole),
        Operation(
            "reduce_scatter",
            lambda e, c, s, r: e.reduce_scatter(r, s, c.op),
            _terms,
            _part_of_sum,
            _whole,
            _part,
        ),
        Operation(
            "all_to_all",
            lambda e, c, s, r: e.all_to_all(r, s),
            _tagged(lambda case, part: case.rank * case.num_ranks + part),
            _tagged(lambda case, part: part * case.num_ranks + case.rank),
            _whole,
            _whole,
        ),
        Operation(
            "send_recv",
            _send_recv,
            _own,
            _tagged(lambda case, _part: (case.rank - 1) % case.num_ranks),
            _part,
        ),
        Operation(
            "gather",
            lambda e, c, s, r: e.gather(r, s, c.root),
            _own,
            _from_each,
            _part,
            _whole,
            root_only=True,
        ),
        Operation(
            "scatter",
            lambda e, c, s, r: e.scatter(r, s, c.root),
            _tagged(lambda case, part: case.rank * case.num_ranks + part),
            _tagged(lambda case, _part: case.root * case.num_ranks + case.rank),
            _whole,
            _part,
        ),
    )
}

_BY_HAND: dict[Algorithm, dict[str, Callable[[Engine, Case, Tensor, Tensor], None]]] = {
    "ring": {
        "all_reduce": lambda e, c, s, r: ring.all_reduce(e, r, c.op),
        "all_gather": lambda e, c, s, r: ring.all_gather(e, r, s),
        "reduce_scatter": lambda e, c, s, r: ring.reduce_scatter(e, r, s, c.op),
    },
    "naive": {
        "all_reduce": lambda e, c, s, r: naive.all_reduce(e, r, c.op),
        "all_gather": lambda e, c, s, r: naive.all_gather(e, r, s),
        "reduce_scatter": lambda e, c, s, r: naive.reduce_scatter(e, r, s, c.op),
    },
}


def operation(name: str, algo: Algorithm = "library") -> Operation:
    """Return the row for ``name`` done by ``algo``; raises KeyError where there is none."""
    row = LIBRARY[name]
    if algo == "library":
        return row
    return Operation(
        row.name, _BY_HAND[algo][name], row.initial, row.expected, row.send, row.receive, row.root_only
    )


@dataclass(frozen=True)
class Buffers:
    """A rank's tensors for one size; ``send`` is empty for what works in place."""

    send: Tensor
    receive: Tensor


def allocate(row: Operation, case: Case, device: torch.device) -> Buffers:
    """Return the buffers of ``row``, uninitialised."""
    dtype = getattr(torch, case.dtype)
    send, receive = (
        torch.empty(parts(case.num_ranks) * case.count, dtype=dtype, device=device)
        for parts in (row.send, row.receive)
    )
    return Buffers(send, receive)


def buffer_bytes(row: Operation, case: Case) -> int:
    """Return what :func:`allocate` takes."""
    parts = row.send(case.num_ranks) + row.receive(case.num_ranks)
    return parts * case.count * DTYPE_BYTES[case.dtype]


def fill(row: Operation, case: Case, buffers: Buffers) -> None:
    """Write the initial values, and something wrong into what is to be received."""
    in_place = buffers.send.numel() == 0
    target = buffers.receive if in_place else buffers.send
    for start in range(0, target.numel(), CHECK_CHUNK):
        part = target[start : start + CHECK_CHUNK]
        idx = torch.arange(start, start + part.numel(), device=target.device)
        part.copy_(row.initial(case, idx))
    if not in_place:
        buffers.receive.fill_(101)


def count_wrong(row: Operation, case: Case, buffers: Buffers) -> int:
    """Return how many received elements differ from the one right answer.

    Exact for every type and op but a floating average, which may be off by 2 ulp (nccl-tests).
    """
    if row.root_only and case.rank != case.root:
        return 0
    wrong = torch.zeros((), dtype=torch.int64, device=buffers.receive.device)
    for start in range(0, buffers.receive.numel(), CHECK_CHUNK):
        part = buffers.receive[start : start + CHECK_CHUNK]
        idx = torch.arange(start, start + part.numel(), device=part.device)
        wrong += _differs(part, row.expected(case, idx)).sum()
    return int(wrong)


def _differs(part: Tensor, expected: Tensor) -> Tensor:
    if not expected.is_floating_point():
        return part != expected.to(part.dtype)
    return (part.double() - expected).abs() > 2 * torch.finfo(part.dtype).eps * expected.abs()
