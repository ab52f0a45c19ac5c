"""The reference: one process, plain torch. No bucket, no hook, no code of the engine under test.

It shares the model's definition and the data with the trainer, nothing else: torch's AdamW, torch's
clip_grad_norm_, a mean over valid tokens, a learning rate written out by hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from gpuctl.core.training import TrainingConfig
from gpuctl.trainer.data import Dataset, Sample
from gpuctl.trainer.model import IGNORED, Decoder


@dataclass
class Trace:
    """What a run did, step by step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


class MaskedRandom:
    """Random tokens with an uneven number of valid targets in each sample."""

    def __init__(self, seq_len: int, vocab_size: int, seed: int, *, masked: bool) -> None:
        self.seq_len, self.vocab_size, self.seed, self.masked = seq_len, vocab_size, seed, masked

    def sample(self, index: int) -> Sample:
        generator = np.random.default_rng([self.seed, index])
        window = generator.integers(0, self.vocab_size, self.seq_len + 1, dtype=np.int64)
        targets = window[1:].copy()
        if self.masked:
            targets[: generator.integers(0, self.seq_len)] = IGNORED
        return Sample(window[:-1], targets)


def train_plainly(config: TrainingConfig, data: Dataset, dtype: torch.dtype, steps: int) -> Trace:
    """Run ``steps`` steps of the whole global batch at once and return what happened."""
    model = Decoder(config.model)
    model.initialise(config.seed)
    model.to(dtype)
    o = config.optim
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": o.weight_decay},
            {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=o.lr,
        betas=(o.beta1, o.beta2),
        eps=o.eps,
    )
    trace = Trace()
    for step in range(steps):
        samples = [data.sample(step * config.global_batch + i) for i in range(config.global_batch)]
        tokens = torch.from_numpy(np.stack([s.tokens for s in samples]))
        targets = torch.from_numpy(np.stack([s.targets for s in samples]))
        logits = model.head(model.hidden(tokens)).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        trace.gradients.append({n: p.grad.clone() for n, p in named.items() if p.grad is not None})
        limit = math.inf if o.clip_norm is None else o.clip_norm
        trace.norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), limit)))
        trace.losses.append(float(loss.detach()))
        for group in optimizer.param_groups:
            group["lr"] = rate(config, step + 1)
        optimizer.step()
    trace.parameters = {n: p.detach().clone() for n, p in named.items()}
    return trace


def rate(config: TrainingConfig, step: int) -> float:
    """Warm up linearly, then half a cosine from lr to lr * min_lr_ratio."""
    o = config.optim
    if step <= o.warmup_steps:
        return o.lr * step / o.warmup_steps
    x = (step - o.warmup_steps) / (config.steps - o.warmup_steps)
    low = o.lr * o.min_lr_ratio
    return low + (o.lr - low) * (1 + math.cos(math.pi * x)) / 2


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return |a - b| / |b| in the 2-norm, computed in fp64."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp_min(1e-300))
