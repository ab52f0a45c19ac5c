"""The plain loop that the trainer is measured beside: one process, no engine of ours.

fp32 weights under bf16 autocast, every block compiled, torch's fused AdamW and clip_grad_norm_, the same
model definition, data, order of samples and schedule. ``--fsdp2``: the weights under ``fully_shard`` without
resharding instead of autocast. Run by ``train_one_gpu.py``; prints JSON lines.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from gpuctl.config.training import load_training
from gpuctl.core.training import TrainingConfig
from gpuctl.trainer.data import open_dataset
from gpuctl.trainer.loop import CHUNK_ABOVE, CHUNK_TOKENS
from gpuctl.trainer.model import Decoder
from gpuctl.trainer.optim import learning_rate


def main() -> None:
    """Train and print a line a step: step, loss, tokens_per_s, memory_bytes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--run-steps", type=int, required=True, help="steps of the schedule that are run")
    parser.add_argument("--fsdp2", action="store_true")
    parser.add_argument("settings", nargs="*")
    arguments = parser.parse_args()
    config = load_training(settings=[*arguments.settings, f"data.path={arguments.data}"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train(config, arguments.run_steps, device, is_fsdp=arguments.fsdp2)
    if arguments.fsdp2:
        dist.destroy_process_group()


def shard(model: Decoder, device: torch.device) -> None:
    """Put every block, then the rest, under FSDP2: fp32 parameters, bf16 computation on a GPU."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if device.type == "cuda" else None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    register_fsdp_forward_method(model, "loss_sum")


def train(config: TrainingConfig, run_steps: int, device: torch.device, *, is_fsdp: bool = False) -> None:
    with torch.device(device):
        model = Decoder(config.model)
    model.initialise(config.seed)
    if device.type == "cuda":
        for block in model.blocks:
            block.compile()
    if is_fsdp:
        shard(model, device)
    has_autocast = device.type == "cuda" and not is_fsdp
    o = config.optim
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": o.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, fused=device.type == "cuda"
    )
    data = open_dataset(
        config.data, seq_len=config.seq_len, vocab_size=config.model.vocab_size, seed=config.seed
    )
    logits = config.micro_batch * config.seq_len * config.model.vocab_size
    chunk = CHUNK_TOKENS if logits >= CHUNK_ABOVE else None
    tokens_a_step = config.global_batch * config.seq_len
    late: torch.Tensor | None = None
    began = time.perf_counter()
    for step in range(run_steps):
        total = torch.zeros((), device=device)
        for first in range(0, config.global_batch, config.micro_batch):
            drawn = [data.sample(step * config.global_batch + first + i) for i in range(config.micro_batch)]
            stacked = np.stack([[s.tokens for s in drawn], [s.targets for s in drawn]])
            both = torch.from_numpy(stacked).to(device, non_blocking=True)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=has_autocast):
                loss = model.loss_sum(both[0], both[1], chunk) / tokens_a_step
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(o, step + 1, config.steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if late is not None:
            began = report(step, late, tokens_a_step, began)
        late = total
    assert late is not None
    report(run_steps, late, tokens_a_step, began)


def report(step: int, loss: torch.Tensor, tokens: int, began: float) -> float:
    """Print a step's line, a step late like the trainer; return when it was read."""
    value = loss.item()
    now = time.perf_counter()
    memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    line = {"step": step, "loss": value, "tokens_per_s": tokens / (now - began), "memory_bytes": memory}
    print(json.dumps(line), flush=True)
    return now


if __name__ == "__main__":
    main()
