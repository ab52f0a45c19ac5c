"""ZeRO (Rajbhandari et al. 2020): each rank keeps the optimizer state of 1/n of every bucket.

Gradients are reduce-scattered into that part, the optimizer updates it, the weights are all-gathered and
awaited by the next forward of their stage. Reduce-scatter and all-gather together move what an all-reduce
moves: stages 1 and 2 save memory, not traffic, and stage 2 with accumulation moves more.

On Gloo a reduce-scatter is an all-to-all and a local sum: torch's own moves an all-reduce's bytes in 2.6
times its time.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from gpuctl.collectives.group import all_gather, reduce_scatter
from gpuctl.trainer.parallel.buckets import Bucket


class ReduceScatter:
    """Sums a bucket's flat gradient over all ranks and leaves this rank its own part."""

    is_sharded = True

    def __init__(self, dp: int, backend: str) -> None:
        self._dp = dp
        self._has_reduce_scatter = backend != "gloo"
        self._received: dict[int, torch.Tensor] = {}

    def start(self, bucket: Bucket, grad: torch.Tensor) -> dist.Work | None:
        """Begin the reduction of ``grad`` (bucket.size,)."""
        if self._dp == 1:
            return None
        if self._has_reduce_scatter:
            part = torch.empty(bucket.size // self._dp, dtype=grad.dtype, device=grad.device)
            self._received[bucket.index] = part
            return reduce_scatter(part, grad, async_op=True)
        parts = torch.empty_like(grad)
        self._received[bucket.index] = parts
        work: dist.Work | None = dist.all_to_all_single(parts, grad, async_op=True)
        return work

    def finish(self, bucket: Bucket, grad: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum (bucket.size / n,), once the work was waited for."""
        if self._dp == 1:
            return grad
        received = self._received.pop(bucket.index)
        if self._has_reduce_scatter:
            return received
        # rank 0's part first, always: the order of a sum is part of its result
        return received.view(self._dp, -1).sum(dim=0)


def gather_weights(bucket: Bucket) -> dist.Work | None:
    """Begin to bring every rank's updated part into ``bucket.weight``."""
    if dist.get_world_size() == 1:
        return None
    # a copy: the output's storage must not be the input's for every backend
    own = bucket.weight[bucket.owned].clone()
    return all_gather(bucket.weight, own, async_op=True)
