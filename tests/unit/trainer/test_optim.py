"""AdamW is torch's, the schedule is a warm-up and half a cosine, FLOPs are what a count by hand gives."""

from __future__ import annotations

import random

import pytest
import torch

from gpuctl.core.training import PRESETS, OptimConfig
from gpuctl.trainer.metrics import flops_per_token, peak_tflops
from gpuctl.trainer.model import Decoder
from gpuctl.trainer.optim import adamw_, adamw_with_copy_, learning_rate


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_update_is_that_of_torch(decay: float) -> None:
    torch.manual_seed(random.randrange(1 << 30))
    wanted = torch.nn.Parameter(torch.randn(301, dtype=torch.float64))
    c = OptimConfig(lr=0.01)
    torch_adamw = torch.optim.AdamW([wanted], c.lr, (c.beta1, c.beta2), c.eps, decay)
    master = wanted.detach().clone()
    weight, exp_avg, exp_avg_sq = master.bfloat16(), torch.zeros_like(master), torch.zeros_like(master)
    for step in range(1, 5):
        grad = torch.randn_like(master)
        wanted.grad = grad * 0.3
        torch_adamw.step()
        scalars = (0.3, c.lr, 1 - c.beta1**step, (1 - c.beta2**step) ** 0.5)
        tensors = [torch.tensor(value, dtype=torch.float64) for value in scalars]
        fixed = (c.beta1, c.beta2, c.eps, decay)
        adamw_with_copy_(weight, master, exp_avg, exp_avg_sq, grad, *tensors, *fixed)
    torch.testing.assert_close(master, wanted.detach(), rtol=1e-13, atol=1e-14)
    assert torch.equal(weight, master.bfloat16())


def test_a_zero_gradient_only_decays() -> None:
    master = torch.ones(4, dtype=torch.float64)
    exp_avg, exp_avg_sq, grad = (torch.zeros_like(master) for _ in range(3))
    one = torch.ones((), dtype=torch.float64)
    adamw_(master, exp_avg, exp_avg_sq, grad, one, 0.5 * one, one, one, 0.9, 0.95, 1e-8, 0.1)
    assert master.tolist() == pytest.approx([0.95] * 4)


def test_the_rate_warms_up_and_ends_at_its_minimum() -> None:
    config = OptimConfig(lr=1.0, min_lr_ratio=0.1, warmup_steps=4)
    rates = [learning_rate(config, step, 20) for step in range(1, 21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[11] == pytest.approx(0.55) and rates[-1] == pytest.approx(0.1)
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert learning_rate(OptimConfig(lr=1.0, warmup_steps=0), 1, 1) == pytest.approx(0.1)


def test_flops_count_every_matrix_once_and_attention_causally() -> None:
    config = PRESETS["small"]
    model = Decoder(config)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() >= 2) - model.embedding.weight.numel()
    attention = 6.0 * config.num_layers * config.dim * 128
    assert flops_per_token(config, 128) == 6.0 * matrices + attention


def test_a_cpu_has_no_known_peak() -> None:
    assert peak_tflops(torch.device("cpu"), torch.bfloat16) is None
