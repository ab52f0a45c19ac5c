"""Real Gloo ranks for tests: processes forked from a server that has imported torch, met over a file."""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

DEADLINE_S = 120.0


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` in one process a rank; return their results by rank.

    Raises AssertionError with the traceback of the first rank that raised; every process is ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "gpuctl.trainer.loop"])
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_enter, args=(rank, world_size, f"{folder}/store", queue, fn, args), daemon=True
            )
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            results = dict(_take(queue) for _ in range(world_size))
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
    return [results[rank] for rank in range(world_size)]


def _take(queue: Any) -> tuple[int, Any]:
    rank, problem, value = queue.get(timeout=DEADLINE_S)
    assert problem is None, f"rank {rank}:\n{problem}"
    import torch

    return rank, torch.load(io.BytesIO(value), weights_only=False)


def _enter(rank: int, world_size: int, store: str, queue: Any, fn: Callable[..., Any], args: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        value = fn(rank, world_size, *args)
        dist.barrier()
        dist.destroy_process_group()
        # bytes: tensors in a queue are file descriptors, gone with the process that made them
        buffer = io.BytesIO()
        torch.save(value, buffer)
        queue.put((rank, None, buffer.getvalue()))
    except BaseException:
        queue.put((rank, traceback.format_exc(), None))
