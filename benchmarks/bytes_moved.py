"""Bytes each strategy moves a step, by the interface's counters, beside the formulas of docs/training.md.

Run in a network namespace of its own, where nothing else moves:
``unshare -n sh -c 'ip link set lo up; exec python -m benchmarks.bytes_moved'`` (root; Linux). Gloo, fp32.
"""

from __future__ import annotations

from pathlib import Path

from gpuctl.agent.worker import RankEnv, Worker
from gpuctl.core.parallel import STRATEGIES, ParallelDims
from gpuctl.core.training import DataConfig, TrainingConfig
from tests.distributed.ranks import run_ranks

STEPS = 10
GLOBAL_BATCH = 12


def main() -> None:
    """Print one row a strategy, number of ranks and accumulation."""
    print("n  strategy  micro-batches  measured   formula    (bytes sent by a rank a step / 4 P)")
    for world_size in (2, 3):
        for name, row in STRATEGIES.items():
            for micro_batch in (GLOBAL_BATCH // world_size, 2):
                results = run_ranks(world_size, measure, row.zero, micro_batch)
                sent, num_parameters, num_micro = results[0]
                passes = 1 + (num_micro if row.zero == 2 else 1)
                formula = passes * (world_size - 1) / world_size
                measured = sent / world_size / num_parameters / 4
                print(f"{world_size}  {name:8}  {num_micro:13}  {measured:8.3f}  {formula:8.3f}", flush=True)


def measure(rank: int, world_size: int, zero: int, micro_batch: int) -> tuple[float, int, int]:
    """Return (bytes all ranks sent a step, parameters, micro-batches a step)."""
    import torch
    import torch.distributed as dist

    from gpuctl.trainer.loop import Trainer

    config = TrainingConfig(
        data=DataConfig(kind="random"),
        dtype="fp32",
        seq_len=16,
        global_batch=GLOBAL_BATCH,
        micro_batch=micro_batch,
    )
    env = RankEnv(rank, rank, world_size, world_size, 0, "127.0.0.1", 0, 0, "bytes")
    dims = ParallelDims(dp=world_size, zero=zero)
    trainer = Trainer(config, dims, Worker(env, None, None), torch.device("cpu"), "gloo")
    trainer.one_step()  # connections are made here
    trainer.engine.wait_for_weights()
    dist.barrier()
    before = sent_bytes()
    dist.barrier()
    for _ in range(STEPS):
        trainer.one_step()
    trainer.engine.wait_for_weights()
    dist.barrier()
    sent = (sent_bytes() - before) / STEPS
    return sent, sum(bucket.numel for bucket in trainer.engine.buckets), trainer.num_micro


def sent_bytes() -> int:
    """Return what the loopback interface of this namespace has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    loopback = next(line for line in lines if line.strip().startswith("lo:"))
    return int(loopback.split()[9])


if __name__ == "__main__":
    main()
