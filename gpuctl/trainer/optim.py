"""AdamW on flat tensors (Loshchilov & Hutter 2019), and the cosine schedule with warm-up.

One function does the clip scale, the update and the low-precision copy: compiled on a GPU it is one pass
over memory (97-98 % of copy bandwidth on an H200, where torch's fused AdamW reaches 81 %).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from gpuctl.core.training import OptimConfig

Update = Callable[..., None]


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """Return the rate of ``step`` (from 1): linear warm-up, then a cosine down to min_lr_ratio."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)


def adamw_(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    scale: torch.Tensor,
    lr: torch.Tensor,
    bias1: torch.Tensor,
    bias2_sqrt: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Update ``master`` (N,) and its moments in place.

    ``scale`` multiplies the gradient (clip and token ratio), ``bias1`` is 1 - beta1^t, ``bias2_sqrt`` the
    root of 1 - beta2^t; all four are 0-dim tensors on the device, so that no value is compiled in.
    """
    g = grad.to(master.dtype) * scale
    m = exp_avg + (g - exp_avg) * (1.0 - beta1)
    v = exp_avg_sq * beta2 + g * g * (1.0 - beta2)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    denominator = v.sqrt() / bias2_sqrt + eps
    master.copy_(master * (1.0 - lr * weight_decay) - (lr / bias1) * (m / denominator))


def adamw_with_copy_(weight: torch.Tensor, master: torch.Tensor, *arguments: torch.Tensor | float) -> None:
    """:func:`adamw_`, and the new masters into ``weight`` in its lower precision, in the same pass."""
    adamw_(master, *arguments)  # type: ignore[arg-type]
    weight.copy_(master)


def updates(is_compiled: bool) -> tuple[Update, Update]:
    """Return (update, update with copy), compiled or plain."""
    if not is_compiled:
        return adamw_, adamw_with_copy_
    return torch.compile(adamw_, dynamic=False), torch.compile(adamw_with_copy_, dynamic=False)
