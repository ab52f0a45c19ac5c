"""bf16 weights follow fp32 masters from the first step on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpuctl.trainer.model import Decoder
from tests.distributed.ranks import run_ranks
from tests.distributed.test_gradients import CONFIG, make_trainer


def masters_and_weights(rank: int, world_size: int, zero: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    trainer = make_trainer(rank, world_size, replace(CONFIG, dtype="bf16", seed=5), zero, True)
    buckets = trainer.engine.buckets
    return [(b.master.clone(), b.weight[b.owned].clone()) for b in buckets]


@pytest.mark.parametrize("zero", [0, 2])
def test_masters_are_the_unrounded_start_and_weights_are_theirs_rounded(zero: int) -> None:
    plain = Decoder(CONFIG.model)
    plain.initialise(5)
    wanted = plain.embedding.weight.detach().flatten()
    pairs = run_ranks(2, masters_and_weights, zero)
    for rank in pairs:
        for master, weight in rank:
            assert master.dtype == torch.float32 and weight.dtype == torch.bfloat16
            assert torch.equal(master.to(torch.bfloat16), weight)
    found = torch.cat([rank[0][0] for rank in pairs]) if zero else pairs[0][0][0]
    assert torch.equal(found[: wanted.numel()], wanted)
