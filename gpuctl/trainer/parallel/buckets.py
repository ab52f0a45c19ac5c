"""Flat buckets: one a stage of the model, its parameters are views into one storage.

DP and ZeRO-1/2 are one engine on these buckets; they differ in how a bucket's gradient is reduced and in
which part of it a rank keeps state for (``data.py``, ``zero.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

#: Slices start at multiples of this many elements: 256 bytes of bf16, a whole vector load everywhere.
ALIGN = 128


@dataclass(frozen=True)
class Member:
    """A parameter's place in its bucket."""

    name: str
    parameter: nn.Parameter
    offset: int
    decays: bool
    """Matrices decay, norms do not."""

    @property
    def numel(self) -> int:
        return self.parameter.numel()

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass
class Bucket:
    """The parameters of one stage. ``size`` is padded so that it divides over the dp ranks."""

    index: int
    name: str
    members: list[Member]
    size: int
    weight: torch.Tensor
    """(size,), the compute dtype: every parameter of the stage is a view of it."""
    owned: slice
    """The part whose optimizer state this rank holds; under DP all of it."""
    master: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """(owned,), fp32 or fp64; aliases ``weight`` where the dtypes are the same."""
    exp_avg: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    exp_avg_sq: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def numel(self) -> int:
        """Elements without padding."""
        return self.members[-1].end if self.members else 0

    @property
    def owned_size(self) -> int:
        return int(self.owned.stop - self.owned.start)

    def decay_split(self) -> int:
        """Return where, inside the owned part, the parameters that do not decay begin."""
        boundary = next((m.offset for m in self.members if not m.decays), self.size)
        return int(min(max(boundary - self.owned.start, 0), self.owned_size))

    def owned_pieces(self) -> Iterator[tuple[Member, int, slice]]:
        """Yield (member, first element of it that is owned, place in the owned part)."""
        for member in self.members:
            start, stop = max(member.offset, self.owned.start), min(member.end, self.owned.stop)
            if start < stop:
                place = slice(start - self.owned.start, stop - self.owned.start)
                yield member, start - member.offset, place


def make_buckets(
    stages: Sequence[tuple[str, list[tuple[str, nn.Parameter]]]],
    *,
    dp: int,
    dp_rank: int,
    is_sharded: bool,
    compute_dtype: torch.dtype,
    master_dtype: torch.dtype,
) -> list[Bucket]:
    """Move every parameter into its stage's flat storage and make the optimizer state of this rank.

    The masters are made from the parameters as they are, the weights by rounding those. The other way
    round every master would sit on a bf16 value, and no weight would move before an update as large as half
    the distance to the next one: 1.1 B parameters lagged a plain loop by 4 % of loss for that.
    """
    buckets = []
    for index, (name, parameters) in enumerate(stages):
        if parameters:
            bucket, values = _make_bucket(index, name, parameters, dp, dp_rank, is_sharded, compute_dtype)
            _make_state(bucket, values, master_dtype)
            buckets.append(bucket)
    return buckets


def _make_bucket(
    index: int,
    name: str,
    parameters: Sequence[tuple[str, nn.Parameter]],
    dp: int,
    dp_rank: int,
    is_sharded: bool,
    compute_dtype: torch.dtype,
) -> tuple[Bucket, torch.Tensor]:
    """Return the bucket and its parameters' values before they were rounded, flat."""
    # what decays first: an owned part then has one border between the two kinds at most
    ordered = sorted(parameters, key=lambda item: item[1].dim() < 2)
    members, offset = [], 0
    for parameter_name, parameter in ordered:
        members.append(Member(parameter_name, parameter, offset, parameter.dim() >= 2))
        offset += parameter.numel()
    step = dp * ALIGN
    size = -(-offset // step) * step
    first = parameters[0][1]
    values = torch.zeros(size, dtype=first.dtype, device=first.device)
    for member in members:
        values[member.offset : member.end].view(member.parameter.shape).copy_(member.parameter.data)
    weight = values.to(compute_dtype)
    for member in members:
        member.parameter.data = weight[member.offset : member.end].view(member.parameter.shape)
    part = size // dp
    owned = slice(dp_rank * part, (dp_rank + 1) * part) if is_sharded else slice(0, size)
    return Bucket(index, name, members, size, weight, owned), values


def _make_state(bucket: Bucket, values: torch.Tensor, master_dtype: torch.dtype) -> None:
    own = bucket.weight[bucket.owned]
    bucket.master = own if own.dtype == master_dtype else values[bucket.owned].to(master_dtype, copy=True)
    bucket.exp_avg = torch.zeros_like(bucket.master, memory_format=torch.contiguous_format)
    bucket.exp_avg_sq = torch.zeros_like(bucket.exp_avg)
