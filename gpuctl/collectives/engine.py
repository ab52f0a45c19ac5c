"""The seam under every benchmark: collectives on tensors, done by torch or by our own communicator.

Calls are in stream order on a GPU (they return when queued) and complete on return on a CPU.
Ranks here are positions in the group, not global ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}

# torch 2.13 renamed both and warns about the old names.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


@dataclass(frozen=True)
class Message:
    """A tensor to send to, or to receive from, the rank ``peer`` of the group."""

    tensor: Tensor
    peer: int


class Pending(Protocol):
    """Messages under way."""

    def wait(self) -> None:
        """Return when they are there (CPU), or make the current stream wait for them (GPU)."""


class Engine(Protocol):
    """What a benchmark needs from a library of collectives."""

    name: str
    rank: int
    size: int
    device: torch.device

    def all_reduce(self, x: Tensor, op: str) -> None: ...
    def all_gather(self, out: Tensor, x: Tensor) -> None: ...
    def reduce_scatter(self, out: Tensor, x: Tensor, op: str) -> None: ...
    def broadcast(self, x: Tensor, root: int) -> None: ...
    def reduce(self, x: Tensor, root: int, op: str) -> None: ...
    def all_to_all(self, out: Tensor, x: Tensor) -> None: ...
    def gather(self, out: Tensor, x: Tensor, root: int) -> None: ...
    def scatter(self, out: Tensor, x: Tensor, root: int) -> None: ...
    def barrier(self) -> None: ...

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start messages both ways as one group, so that no order of the ranks can deadlock."""

    def close(self) -> None: ...


def combine(into: Tensor, other: Tensor, op: str) -> None:
    """``into = into op other``, elementwise."""
    _COMBINE[op](into, other, out=into)


class _Works:
    """Torch's handles of one batch."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class TorchEngine:
    """``torch.distributed``: Gloo on CPU, NCCL or RCCL on GPUs."""

    name = "torch"

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, x: Tensor, op: str) -> None:
        dist.all_reduce(x, _TORCH_OPS[op], group=self.group)

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        all_gather_single(out, x, group=self.group)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str) -> None:
        reduce_scatter_single(out, x, _TORCH_OPS[op], group=self.group)

    def broadcast(self, x: Tensor, root: int) -> None:
        dist.broadcast(x, group=self.group, group_src=root)

    def reduce(self, x: Tensor, root: int, op: str) -> None:
        dist.reduce(x, op=_TORCH_OPS[op], group=self.group, group_dst=root)

    def all_to_all(self, out: Tensor, x: Tensor) -> None:
        dist.all_to_all_single(out, x, group=self.group)

    def gather(self, out: Tensor, x: Tensor, root: int) -> None:
        parts = list(out.chunk(self.size)) if self.rank == root else None
        dist.gather(x, parts, group=self.group, group_dst=root)

    def scatter(self, out: Tensor, x: Tensor, root: int) -> None:
        parts = list(x.chunk(self.size)) if self.rank == root else None
        dist.scatter(out, parts, group=self.group, group_src=root)

    def barrier(self) -> None:
        if self.device.type == "cuda":
            dist.barrier(group=self.group, device_ids=[self.device.index])
        else:
            dist.barrier(group=self.group)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        batch = [dist.P2POp(dist.isend, m.tensor, group=self.group, group_peer=m.peer) for m in sends]
        batch += [dist.P2POp(dist.irecv, m.tensor, group=self.group, group_peer=m.peer) for m in receives]
        return _Works(dist.batch_isend_irecv(batch) if batch else ())

    def close(self) -> None:
        """The process group belongs to whoever made it."""
