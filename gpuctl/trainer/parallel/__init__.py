"""The recipe: how a model becomes a data-parallel one, in the order in which it happens.

1. Every stage of the model becomes a flat bucket; parameters become views of it (``buckets.py``).
2. In the backward pass a hook moves each gradient into its bucket's flat buffer. When the last one of a
   bucket has landed, its reduction starts: all-reduce (``data.py``) or reduce-scatter (``zero.py``),
   while the backward pass goes on with the stages below.
3. Buckets are reduced from the last stage to the first, on every rank in the same order; a rank that has
   no (more) micro-batches joins with zeros.
4. The optimizer steps on the owned part of each bucket; ZeRO then gathers the weights, bucket by bucket
   in forward order, and the next forward pass of a stage waits for its own bucket only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from gpuctl.core.training import OptimConfig
from gpuctl.trainer.model import Decoder
from gpuctl.trainer.optim import updates
from gpuctl.trainer.parallel.buckets import Bucket, Member, make_buckets
from gpuctl.trainer.parallel.data import AllReduce
from gpuctl.trainer.parallel.zero import ReduceScatter, gather_weights

#: Flat gradient buffers that ZeRO-2 rents: one is filled while another one is reduced.
RENTED_BUFFERS = 3


@dataclass
class _InFlight:
    """A reduction that was started and not waited for."""

    bucket: Bucket
    grad: torch.Tensor
    work: dist.Work | None


@dataclass
class ExposedTime:
    """Time in which the computation waited for communication, in this step."""

    seconds: float = 0.0
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def milliseconds(self) -> float:
        """Return the sum; on a GPU this waits for the last event."""
        return float(1e3 * self.seconds + sum(a.elapsed_time(b) for a, b in self.events))


class DataParallel:
    """A decoder whose gradients, optimizer state and weights live in flat buckets over dp ranks."""

    def __init__(
        self,
        model: Decoder,
        *,
        dp: int,
        dp_rank: int,
        zero: int,
        backend: str,
        optim: OptimConfig,
        compute_dtype: torch.dtype,
        master_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        is_compiled: bool = False,
    ) -> None:
        self.model = model
        self.dp, self.dp_rank, self.zero = dp, dp_rank, zero
        self.config = optim
        self.step_count = 0
        self.exposed = ExposedTime()
        self.grad_dtype = grad_dtype
        is_sharded = zero > 0
        self.buckets = make_buckets(
            model.stages(),
            dp=dp,
            dp_rank=dp_rank,
            is_sharded=is_sharded,
            compute_dtype=compute_dtype,
            master_dtype=master_dtype,
        )
        self._reducer = ReduceScatter(dp, backend) if is_sharded else AllReduce()
        # alone, there is nobody to share gradients with: renting would only cost a copy
        self._reduces_every_micro_batch = zero >= 2 and dp > 1
        self._device = self.buckets[0].weight.device
        self._update, self._update_with_copy = updates(is_compiled)
        self._grads: dict[int, torch.Tensor] = {}
        self._pool: list[torch.Tensor] = []
        self._owned_grads: dict[int, torch.Tensor] = {}
        self._in_flight: list[_InFlight] = []
        self._gathers: dict[int, dist.Work | None] = {}
        self._landed: dict[int, set[str]] = {}
        self._has_content: set[int] = set()
        self._next_to_reduce = len(self.buckets) - 1
        self._is_reducing = False
        self._register_hooks()
        model.enter = self._await_weights

    # -- a step, as the loop calls it

    def begin_step(self) -> None:
        """Forget the last step's gradients and times."""
        self.exposed = ExposedTime()
        self._owned_grads.clear()
        self._has_content.clear()

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Say whether the coming backward pass reduces: always in ZeRO-2, else only the last one."""
        self._is_reducing = is_last or self._reduces_every_micro_batch
        self._landed = {b.index: set() for b in self.buckets}
        self._next_to_reduce = len(self.buckets) - 1

    def end_micro_batch(self) -> None:
        """Reduce what no gradient has landed in (a rank without samples joins every collective)."""
        if not self._is_reducing:
            return
        while self._next_to_reduce >= 0:
            self._reduce(self.buckets[self._next_to_reduce])
        if self._reduces_every_micro_batch:
            self._finish_all()

    def finish_gradients(self) -> None:
        """Wait for every reduction: after this :meth:`owned_grad` has the sum over all ranks."""
        self._finish_all()

    def owned_grad(self, bucket: Bucket) -> torch.Tensor:
        """Return the summed gradient of the owned part of ``bucket``."""
        return self._owned_grads[bucket.index]

    def squared_norm(self) -> torch.Tensor:
        """Return the squared 2-norm of the summed gradients over all logical parameters, on the device."""
        # a CPU adds a flat bucket up in few lanes: fp32 loses five digits there; a GPU adds in a tree
        wide = torch.float64 if self._device.type == "cpu" else torch.float32
        total = torch.zeros((), dtype=wide, device=self._device)
        for bucket in self.buckets:
            grad = self.owned_grad(bucket)
            total += torch.linalg.vector_norm(grad, dtype=wide).square()
        if self._reducer.is_sharded and self.dp > 1:
            dist.all_reduce(total)
        return total

    def step(self, scale: torch.Tensor, lr: float) -> None:
        """Update the owned part of every bucket with ``scale`` times its gradient; start the gathers."""
        self.step_count += 1
        c, t = self.config, self.step_count
        wide = self.buckets[0].master.dtype
        scalars = [
            scale.to(wide),
            self._scalar(lr, wide),
            self._scalar(1.0 - c.beta1**t, wide),
            self._scalar((1.0 - c.beta2**t) ** 0.5, wide),
        ]
        for bucket in self.buckets:
            self._step_bucket(bucket, scalars)
            if self._reducer.is_sharded:
                self._gathers[bucket.index] = gather_weights(bucket)

    def wait_for_weights(self) -> None:
        """Wait for every gather (before a checkpoint, or the end)."""
        for bucket in self.buckets:
            self._wait_gather(bucket.index)

    # -- gradients

    def _register_hooks(self) -> None:
        for bucket in self.buckets:
            for member in bucket.members:
                member.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._hook(bucket, member)
                )

    def _hook(self, bucket: Bucket, member: Member) -> Callable[[torch.nn.Parameter], None]:
        def landed(parameter: torch.nn.Parameter) -> None:
            assert parameter.grad is not None
            target = self._flat_grad(bucket)[member.offset : member.end].view(parameter.shape)
            if bucket.index in self._has_content:
                target.add_(parameter.grad)
            else:
                target.copy_(parameter.grad)
            parameter.grad = None
            arrived = self._landed[bucket.index]
            arrived.add(member.name)
            if len(arrived) == len(bucket.members):
                self._has_content.add(bucket.index)
                self._reduce_what_is_ready()

        return landed

    def _flat_grad(self, bucket: Bucket) -> torch.Tensor:
        """Return the buffer this micro-batch's gradients of ``bucket`` go to."""
        if bucket.index not in self._grads:
            self._grads[bucket.index] = (
                self._rent(bucket) if self._reduces_every_micro_batch else self._new(bucket)
            )
        return self._grads[bucket.index]

    def _new(self, bucket: Bucket) -> torch.Tensor:
        # zeros: the padding is summed and must stay zero
        return torch.zeros(bucket.size, dtype=self.grad_dtype, device=self._device)

    def _rent(self, bucket: Bucket) -> torch.Tensor:
        """Take a buffer from the pool; when all are out, wait for the oldest reduction."""
        if not self._pool and len(self._in_flight) >= RENTED_BUFFERS:
            self._finish(self._in_flight.pop(0))
        largest = max(b.size for b in self.buckets)
        if self._pool:
            buffer = self._pool.pop()
        else:
            buffer = torch.empty(largest, dtype=self.grad_dtype, device=self._device)
        view = buffer[: bucket.size]
        view[bucket.numel :].zero_()
        return view

    def _reduce_what_is_ready(self) -> None:
        """Start reductions from the last bucket down, as far as every gradient has landed."""
        while self._is_reducing and self._next_to_reduce >= 0:
            bucket = self.buckets[self._next_to_reduce]
            if len(self._landed[bucket.index]) < len(bucket.members):
                return
            self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        grad = self._flat_grad(bucket)
        if bucket.index not in self._has_content:
            grad.zero_()
        self._in_flight.append(_InFlight(bucket, grad, self._reducer.start(bucket, grad)))
        self._next_to_reduce -= 1
        if self._reduces_every_micro_batch:
            self._grads.pop(bucket.index)
            self._has_content.discard(bucket.index)

    def _finish_all(self) -> None:
        while self._in_flight:
            self._finish(self._in_flight.pop(0))

    def _finish(self, flight: _InFlight) -> None:
        self._wait(flight.work)
        part = self._reducer.finish(flight.bucket, flight.grad)
        index = flight.bucket.index
        if not self._reduces_every_micro_batch:
            self._owned_grads[index] = part
            return
        wide = self.buckets[0].master.dtype
        if index in self._owned_grads:
            self._owned_grads[index].add_(part)
        else:
            # a copy: the rented buffer goes back; the sum over micro-batches is kept in the masters' dtype
            self._owned_grads[index] = part.to(wide, copy=True)
        base = flight.grad._base
        self._pool.append(base if base is not None else flight.grad)

    # -- weights

    def _step_bucket(self, bucket: Bucket, scalars: list[torch.Tensor]) -> None:
        grad, split, c = self.owned_grad(bucket), bucket.decay_split(), self.config
        weight = bucket.weight[bucket.owned]
        is_alias = bucket.master.data_ptr() == weight.data_ptr()
        for part, decay in ((slice(0, split), c.weight_decay), (slice(split, bucket.owned_size), 0.0)):
            if part.start == part.stop:
                continue
            state = [t[part] for t in (bucket.master, bucket.exp_avg, bucket.exp_avg_sq, grad)]
            fixed = (c.beta1, c.beta2, c.eps, decay)
            if is_alias:
                self._update(*state, *scalars, *fixed)
            else:
                self._update_with_copy(weight[part], *state, *scalars, *fixed)

    def _scalar(self, value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((), value, dtype=dtype, device=self._device)

    def _await_weights(self, stage: int) -> None:
        """Called by the model before stage ``stage`` runs."""
        self._wait_gather(stage)

    def _wait_gather(self, index: int) -> None:
        if index in self._gathers:
            self._wait(self._gathers.pop(index))

    # -- waiting

    def _wait(self, work: dist.Work | None) -> None:
        """Let the computation wait for ``work``, and account for the time it stands still."""
        if work is None:
            return
        if self._device.type != "cuda":
            began = time.perf_counter()
            work.wait()
            self.exposed.seconds += time.perf_counter() - began
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        work.wait()
        after.record()
        self.exposed.events.append((before, after))
