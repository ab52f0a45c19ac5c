"""``--engine direct``: the benchmark's collectives over our own communicator instead of torch's.

The unique id is a bearer secret. It goes rank 0 -> agent -> lead -> agents -> ranks in ``comm_id``
frames: never through argv, a log, a file or torch's TCPStore, which asks nobody who they are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from gpuctl.agent.frames import Frame
from gpuctl.agent.worker import Worker
from gpuctl.collectives.communicator import Communicator, Library
from gpuctl.collectives.engine import Message, Pending
from gpuctl.errors import AgentError


def share_unique_id(
    library: Library, worker: Worker, *, members: Sequence[int], key: int, timeout_s: float
) -> bytes:
    """Return the id of the communicator of ``members`` (global ranks); the first of them makes it.

    ``key`` tells communicators made at the same time apart. Raises AgentError when it does not come.
    """
    is_first = worker.env.rank == members[0]
    made = library.unique_id() if is_first else b""
    if len(members) == 1:
        return made
    if is_first:
        worker.send(Frame("comm_id", {"key": key}, made))
        return made
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            frame = worker.receive("comm_id", max(0.0, deadline - time.monotonic()))
        except TimeoutError as exc:
            raise AgentError(
                f"rank {members[0]}'s communicator id did not come",
                cause=str(exc),
                hint="--engine direct needs gpuctl's agents; --engine torch runs without",
            ) from exc
        if frame.get("key") == key:
            return frame.payload


class DirectEngine:
    """The engine over :class:`Communicator`. Ranks are positions in its group."""

    name = "direct"

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self.comm = comm
        self.device = device
        self.rank = comm.rank()
        self.size = comm.num_ranks()
        self._side = _new_stream(device) if device.type == "cuda" else None

    def all_reduce(self, x: Tensor, op: str) -> None:
        self.comm.all_reduce(x.data_ptr(), x.data_ptr(), x.numel(), _dtype(x), op, self._stream())

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        self.comm.all_gather(x.data_ptr(), out.data_ptr(), x.numel(), _dtype(x), self._stream())

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str) -> None:
        self.comm.reduce_scatter(x.data_ptr(), out.data_ptr(), out.numel(), _dtype(x), op, self._stream())

    def broadcast(self, x: Tensor, root: int) -> None:
        self.comm.broadcast(x.data_ptr(), x.data_ptr(), x.numel(), _dtype(x), root, self._stream())

    def reduce(self, x: Tensor, root: int, op: str) -> None:
        self.comm.reduce(x.data_ptr(), x.data_ptr(), x.numel(), _dtype(x), op, root, self._stream())

    def all_to_all(self, out: Tensor, x: Tensor) -> None:
        incoming, outgoing = out.chunk(self.size), x.chunk(self.size)
        incoming[self.rank].copy_(outgoing[self.rank])
        self._grouped(self._others(outgoing), self._others(incoming), self._stream())

    def gather(self, out: Tensor, x: Tensor, root: int) -> None:
        if self.rank != root:
            self._grouped([Message(x, root)], [], self._stream())
            return
        parts = out.chunk(self.size)
        parts[root].copy_(x)
        self._grouped([], self._others(parts), self._stream())

    def scatter(self, out: Tensor, x: Tensor, root: int) -> None:
        if self.rank != root:
            self._grouped([], [Message(out, root)], self._stream())
            return
        parts = x.chunk(self.size)
        out.copy_(parts[root])
        self._grouped(self._others(parts), [], self._stream())

    def barrier(self) -> None:
        """Neither library has a barrier: the smallest all-reduce, awaited."""
        self.all_reduce(torch.zeros(1, device=self.device), "sum")
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start on a stream of its own, so that the caller's work goes on beside it."""
        if self._side is None:
            self._grouped(sends, receives, 0)
            return _Done()
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        self._grouped(sends, receives, self._side.cuda_stream)
        return _OnStream(self._side.record_event(), self.device)

    def close(self) -> None:
        self.comm.check()
        self.comm.close()

    def _others(self, parts: Sequence[Tensor]) -> list[Message]:
        return [Message(part, peer) for peer, part in enumerate(parts) if peer != self.rank]

    def _grouped(self, sends: Sequence[Message], receives: Sequence[Message], stream: int) -> None:
        with self.comm.group():
            for m in sends:
                self.comm.send(m.tensor.data_ptr(), m.tensor.numel(), _dtype(m.tensor), m.peer, stream)
            for m in receives:
                self.comm.receive(m.tensor.data_ptr(), m.tensor.numel(), _dtype(m.tensor), m.peer, stream)

    def _stream(self) -> int:
        if self.device.type != "cuda":
            return 0
        return int(torch.cuda.current_stream(self.device).cuda_stream)


class _Done:
    def wait(self) -> None:
        """What ran on the CPU is over."""


class _OnStream:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
