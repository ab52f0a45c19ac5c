"""Data parallelism: each bucket's gradient is all-reduced as soon as its last gradient has landed.

What moves a step: 2 (n-1)/n times the bytes of the gradients, once, with the last micro-batch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from gpuctl.trainer.parallel.buckets import Bucket


class AllReduce:
    """Sums a bucket's flat gradient over all ranks, in place."""

    is_sharded = False

    def start(self, bucket: Bucket, grad: torch.Tensor) -> dist.Work | None:
        """Begin the reduction of ``grad`` (bucket.size,)."""
        return dist.all_reduce(grad, async_op=True) if dist.get_world_size() > 1 else None

    def finish(self, bucket: Bucket, grad: torch.Tensor) -> torch.Tensor:
        """Return the owned part of the sum, once the work was waited for."""
        return grad
