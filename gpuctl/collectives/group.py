"""Join the run's process group: the store on the agent's own socket, then the backend.

Used by every bundled program. Rank 0 hosts torch's TCPStore on the listening socket its agent bound to
the chosen private address: given only an address, TCPStore would listen on every interface.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, Work  # type: ignore[attr-defined]

from gpuctl.agent.worker import RankEnv, Worker


@dataclass(frozen=True)
class Group:
    """Where this rank stands in the default process group, and the device it computes on."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    store: Store


def join(worker: Worker, *, backend: str, timeout_s: float) -> Group:
    """Join the default process group and return this rank's place.

    ``backend`` is ``gloo`` (CPU tensors) or ``nccl`` (NCCL or RCCL; device LOCAL_RANK of the
    visible ones). The phases ``store`` and ``init`` are reported while they last. Raises
    torch.distributed.DistStoreError or DistBackendError when a peer does not come in time.
    """
    env = worker.env
    device = _device(env, backend)
    timeout = datetime.timedelta(seconds=timeout_s)
    worker.phase("store")
    store = _store(worker, timeout)
    worker.phase("init")
    # a prefix for each generation: a late rank of a dying one can never join the next
    prefixed = PrefixStore(f"{env.run_id}/{env.restart_count}", store)
    dist.init_process_group(
        backend,
        store=prefixed,
        rank=env.rank,
        world_size=env.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    return Group(env.rank, env.world_size, env.local_rank, device, backend, prefixed)


def all_gather(output: torch.Tensor, part: torch.Tensor, *, async_op: bool = False) -> Work | None:
    """Gather every rank's ``part`` (n,) into ``output`` (world n,); torch 2.13 renamed the function."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: Work | None = gather(output, part, async_op=async_op)
    return work


def reduce_scatter(output: torch.Tensor, full: torch.Tensor, *, async_op: bool = False) -> Work | None:
    """Sum ``full`` (world n,) over ranks and leave this rank its part ``output`` (n,)."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: Work | None = scatter(output, full, async_op=async_op)
    return work


def leave() -> None:
    """Leave the process group; rank 0 stays until every rank has come here: it hosts the store."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _device(env: RankEnv, backend: str) -> torch.device:
    if backend != "nccl":
        return torch.device("cpu")
    # the agent gives a node's ranks one mask of its devices: LOCAL_RANK picks from it
    device = torch.device("cuda", env.local_rank % max(1, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def _store(worker: Worker, timeout: datetime.timedelta) -> TCPStore:
    env = worker.env
    listener = worker.listener_fd
    if listener is not None:
        os.set_inheritable(listener, False)
    return TCPStore(
        env.master_addr,
        env.master_port,
        env.world_size,
        is_master=env.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
        use_libuv=True,
    )
