"""What a step reached: tokens per second, TFLOP/s by a named formula, MFU where the peak is known."""

from __future__ import annotations

import torch

from gpuctl.core.training import ModelConfig

#: Dense bf16 peak, TFLOP/s, from the vendors' datasheets, by a part of the device's name.
PEAK_TFLOPS = {
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "MI300X": 1307.0,
    "MI325X": 1307.0,
    "MI250X": 383.0,
}


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Return forward and backward FLOPs a token: 6N' + 6 L D S.

    N' counts matrix parameters without the input embedding (a lookup); the second term is causal
    attention (half of the square; Megatron-LM's formula, Narayanan et al. 2021, with the mask counted).
    """
    head_dim = model.dim // model.num_heads
    attention = model.dim * (model.num_heads + 2 * model.num_kv_heads) * head_dim + model.dim**2
    block = attention + 3 * model.dim * model.ffn_dim
    parameters = model.num_layers * block + model.vocab_size * model.dim
    return 6.0 * parameters + 6.0 * model.num_layers * model.dim * seq_len


def peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the device's dense 16-bit peak, None when it is not known or another dtype is used."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def memory_bytes(device: torch.device) -> int | None:
    """Return the peak of allocated device memory, or this process's peak resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/status") as file:
            line = next(line for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return None
    return int(line.split()[1]) * 1024
