"""The benchmark that every rank runs: ``run(config, worker)`` of ``gpuctl bench``.

Rank 0 reports one ``setup`` event, a ``result`` event a row as soon as it is measured, and ends
with ``done``. It needs no agent::

    torchrun --nproc-per-node 2 -m gpuctl.collectives.bench '{"collectives": ["all_reduce"]}'

A row is: the same operation everywhere, warm-up, a barrier, the timed iterations, and then a fresh
run on known data whose every element is compared. Times of all ranks go into the row.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from gpuctl.agent.worker import Worker, run_program
from gpuctl.collectives import group, matrix, measure, models, naive
from gpuctl.collectives.bandwidth import (
    DTYPE_BYTES,
    Collective,
    bandwidth,
    collective,
    count_per_rank,
    reported_bytes,
)
from gpuctl.collectives.communicator import Communicator, Library, find_library
from gpuctl.collectives.config import BenchConfig
from gpuctl.collectives.direct import DirectEngine, share_unique_id
from gpuctl.collectives.engine import Engine, TorchEngine, all_gather_single
from gpuctl.collectives.operations import Case, allocate, buffer_bytes, count_wrong, fill, operation
from gpuctl.core.codec import from_json

RESERVED_BYTES = 1 << 30
"""Left free on the device for the library's own buffers (nccl-tests reserves the same)."""
HOSTNAME_BYTES = 64


def run(config: Mapping[str, Any], worker: Worker) -> None:
    """Measure what ``config`` (a BenchConfig as JSON) asks for and report it from rank 0."""
    settings = from_json(BenchConfig, dict(config))
    _check_world(settings, worker)
    place = group.join(worker, backend=settings.backend, timeout_s=settings.timeout_s)
    try:
        bench = _open(settings, worker, place)
        _report_setup(bench)
        num_rows, num_wrong = 0, 0
        for row in _rows(bench):
            num_rows, num_wrong = num_rows + 1, num_wrong + row["wrong"]
            if worker.env.rank == 0:
                worker.event("result", **row)
        bench.engine.close()
    except BaseException:
        # Without the barrier of leave(): the others may never come to it.
        dist.destroy_process_group()
        raise
    group.leave()
    worker.done(rows=num_rows, wrong=num_wrong)


@dataclass(frozen=True)
class Bench:
    """What a rank needs to measure: its engine over its group, and who else is there."""

    settings: BenchConfig
    worker: Worker
    engine: Engine
    groups: tuple[tuple[int, ...], ...]
    device: torch.device
    limit_bytes: int
    """What the buffers may take on the rank with the least free memory."""
    store: Store
    init_s: float
    """What it took to make the communicator of ``--engine direct``; torch's is made by its first call."""
    library: Library | None = None
    torch_engine: Engine | None = None
    """Torch's engine over the same ranks, to report the difference to ``--engine direct``."""

    @property
    def num_ranks(self) -> int:
        """Ranks of this rank's group."""
        return self.engine.size


def _check_world(settings: BenchConfig, worker: Worker) -> None:
    """Fail where a launcher that was not understood made N single-rank jobs (nccl-tests#109)."""
    if settings.expected_ranks not in (None, worker.env.world_size):
        raise ValueError(f"{worker.env.world_size} ranks came up, {settings.expected_ranks} were expected")


def _open(settings: BenchConfig, worker: Worker, place: group.Group) -> Bench:
    groups = settings.groups or (tuple(range(place.world_size)),)
    if sorted(r for members in groups for r in members) != list(range(place.world_size)):
        raise ValueError("every rank must be in one group")
    limit_bytes = _agree_on_memory(worker, place.device)
    handles = [dist.new_group(list(members)) for members in groups] if len(groups) > 1 else [None]
    mine = next(i for i, members in enumerate(groups) if place.rank in members)
    by_torch = TorchEngine(handles[mine], place.device)
    bench = Bench(settings, worker, by_torch, groups, place.device, limit_bytes, place.store, 0.0)
    return bench if settings.engine == "torch" else _go_direct(bench, mine)


def _go_direct(bench: Bench, index: int) -> Bench:
    """Return ``bench`` over our own communicator of group ``index``."""
    settings, worker, members = bench.settings, bench.worker, bench.groups[index]
    library = find_library(settings.library_path)
    dist.barrier()
    start = time.perf_counter()
    secret = share_unique_id(library, worker, members=members, key=index, timeout_s=settings.timeout_s)
    comm = Communicator(library, secret, len(members), members.index(worker.env.rank))
    init_s = time.perf_counter() - start
    engine = DirectEngine(comm, bench.device)
    return replace(bench, engine=engine, init_s=init_s, library=library, torch_engine=bench.engine)


def _agree_on_memory(worker: Worker, device: torch.device) -> int:
    free = torch.tensor([_free_bytes(worker, device)], dtype=torch.int64, device=device)
    dist.all_reduce(free, dist.ReduceOp.MIN)
    return int(free)


def _free_bytes(worker: Worker, device: torch.device) -> int:
    if device.type == "cuda":
        return max(0, torch.cuda.mem_get_info(device)[0] - RESERVED_BYTES)
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return available // 2 // worker.env.local_world_size


def _report_setup(bench: Bench) -> None:
    hosts = _gather_hostnames(bench.device)
    if bench.worker.env.rank != 0:
        return
    settings = bench.settings
    bench.worker.event(
        "setup",
        num_ranks=bench.worker.env.world_size,
        num_nodes=len(set(hosts)),
        hosts=hosts,
        groups=[list(members) for members in bench.groups],
        backend=settings.backend,
        engine=settings.engine,
        device=torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else "cpu",
        torch_version=torch.__version__,
        library_version=bench.library.version() if bench.library else _library_version(bench.device),
        library_path=bench.library.path if bench.library else None,
        init_s=bench.init_s if bench.library else None,
        iters=settings.iters,
        warmup_iters=settings.warmup_iters,
    )


def _library_version(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


def _gather_hostnames(device: torch.device) -> list[str]:
    """One text a rank, as bytes in a tensor: nothing here unpickles what a peer wrote."""
    raw = socket.gethostname().encode()[:HOSTNAME_BYTES].ljust(HOSTNAME_BYTES, b"\0")
    rows = _gather(torch.tensor(list(raw), dtype=torch.uint8, device=device))
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]


def _gather(mine: Tensor) -> list[list[Any]]:
    """Return every rank's tensor as numbers."""
    everyone = mine.new_empty(dist.get_world_size() * mine.numel())
    all_gather_single(everyone, mine)
    rows: list[list[Any]] = everyone.cpu().view(-1, mine.numel()).tolist()
    return rows


def _rows(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield the rows as they are measured, the same number on every rank."""
    bench.worker.phase("first_step")
    link = models.measure_link(bench.engine) if bench.settings.algo != "library" else None
    if link is not None and bench.worker.env.rank == 0:
        _report_link(bench, link)
    index = 0
    for word in bench.settings.collectives:
        row = collective(word)
        for size_bytes in bench.settings.sizes_bytes if row.moves_data else (0,):
            bench.worker.phase("step", index)
            for result in _measure(bench, row, size_bytes, link):
                yield result
                index += 1
            if _should_stop(bench):
                return


def _report_link(bench: Bench, link: models.Link) -> None:
    bench.worker.event(
        "link",
        alpha_us=link.alpha_s * 1e6,
        bandwidth_gb_s=link.bandwidth_b_s / 1e9,
        crossing_bytes=naive.crossing_bytes(
            bench.num_ranks, alpha_s=link.alpha_s, bandwidth_b_s=link.bandwidth_b_s
        ),
    )


def _should_stop(bench: Bench) -> bool:
    """All ranks leave at the same row, whichever of them heard SIGTERM first."""
    flag = torch.tensor([int(bench.worker.stop_requested)], device=bench.device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def _measure(
    bench: Bench, row: Collective, size_bytes: int, link: models.Link | None
) -> Iterator[dict[str, Any]]:
    if row.name == "p2p":
        yield from matrix.measure(bench.engine, size_bytes, bench.settings)
        return
    if row.name == "barrier":
        yield from _results(bench, row, 0, _measure_barrier(bench), link)
        return
    settings = bench.settings
    element_bytes = DTYPE_BYTES[settings.dtype]
    count = count_per_rank(row, size_bytes, element_bytes=element_bytes, num_ranks=bench.num_ranks)
    case = Case(bench.engine.rank, bench.num_ranks, count, settings.op, settings.root, settings.dtype)
    if count == 0 or buffer_bytes(operation(row.name), case) > bench.limit_bytes:
        _warn_skipped(bench, row, size_bytes, count)
        return
    actual_bytes = reported_bytes(row, count, element_bytes=element_bytes, num_ranks=bench.num_ranks)
    yield from _results(bench, row, actual_bytes, _measure_case(bench, row, case), link)


def _warn_skipped(bench: Bench, row: Collective, size_bytes: int, count: int) -> None:
    if bench.worker.env.rank != 0:
        return
    why = "more memory than is free" if count else f"too small to be split over {bench.num_ranks} ranks"
    bench.worker.event("warning", message=f"{row.name} of {size_bytes} bytes is left out: {why}")


@dataclass(frozen=True)
class Measured:
    """What this rank found for one row."""

    times_s: list[float]
    host_s: float = 0.0
    """Host time of one call: what it costs to queue it on a GPU."""
    wrong: int = 0
    torch_s: float = 0.0
    """The same by torch, measured only beside ``--engine direct``."""


def _measure_case(bench: Bench, row: Collective, case: Case) -> Measured:
    """Warm up, time, and check on fresh data."""
    settings, engine = bench.settings, bench.engine
    op = operation(row.name, settings.algo)
    buffers = allocate(op, case, bench.device)
    fill(op, case, buffers)

    def call_on(engine: Engine) -> measure.Timing:
        def call() -> None:
            op.call(engine, case, buffers.send, buffers.receive)

        for _ in range(settings.warmup_iters):
            call()
        engine.barrier()
        return measure.time_calls(call, iters=settings.iters, device=bench.device)

    timing = call_on(engine)
    beside = call_on(bench.torch_engine) if bench.torch_engine is not None else None
    torch_s = statistics.fmean(beside.times_s) if beside is not None else 0.0
    if not settings.check:
        return Measured(timing.times_s, timing.host_s, 0, torch_s)
    # Filled again: what was reduced in place many times over has left the exact values long ago.
    fill(op, case, buffers)
    engine.barrier()
    op.call(engine, case, buffers.send, buffers.receive)
    return Measured(timing.times_s, timing.host_s, count_wrong(op, case, buffers), torch_s)


def _measure_barrier(bench: Bench) -> Measured:
    """Time the barrier, then see that nobody left it before the last one came.

    The store counts arrivals: a rank that leaves must find all of its group counted.
    """
    for _ in range(bench.settings.warmup_iters):
        bench.engine.barrier()
    timing = measure.time_calls(bench.engine.barrier, iters=bench.settings.iters, device=bench.device)
    key = f"gpuctl/bench/barrier/{min(_my_group(bench))}"
    bench.store.add(key, 1)
    bench.engine.barrier()
    if bench.device.type == "cuda":
        torch.cuda.synchronize(bench.device)
    arrived = int(bench.store.add(key, 0))
    return Measured(timing.times_s, timing.host_s, max(0, bench.num_ranks - arrived))


def _my_group(bench: Bench) -> tuple[int, ...]:
    return next(members for members in bench.groups if bench.worker.env.rank in members)


def _results(
    bench: Bench, row: Collective, size_bytes: int, mine: Measured, link: models.Link | None
) -> Iterator[dict[str, Any]]:
    """Bring every rank's figures together and yield one row a group."""
    values = [mine.host_s, mine.torch_s, float(mine.wrong), *mine.times_s]
    by_rank = _gather(torch.tensor(values, dtype=torch.float64, device=bench.device))
    for index, members in enumerate(bench.groups):
        yield _row(bench, row, size_bytes, index, [by_rank[rank] for rank in members], link)


def _row(
    bench: Bench,
    row: Collective,
    size_bytes: int,
    index: int,
    figures: list[list[float]],
    link: models.Link | None,
) -> dict[str, Any]:
    settings, members = bench.settings, bench.groups[index]
    times_s = [rank[3:] for rank in figures]
    host_s, torch_s, wrong = (sum(rank[i] for rank in figures) for i in range(3))
    stats = asdict(measure.summarise(times_s))
    slowest = members[stats.pop("slowest_rank")]
    rates = bandwidth(row, size_bytes, time_s=stats["mean"] / 1e6, num_ranks=len(members))
    return {
        "collective": row.name,
        "size_bytes": size_bytes,
        "count": size_bytes // DTYPE_BYTES[settings.dtype],
        "dtype": settings.dtype,
        "op": settings.op if row.is_reduction else None,
        "root": settings.root if row.has_root else None,
        "num_ranks": len(members),
        "group": index if settings.groups else None,
        "algo": settings.algo,
        "engine": bench.engine.name,
        "time_us": stats,
        "host_us": host_s / len(members) * 1e6,
        "torch_us": torch_s / len(members) * 1e6 if torch_s else None,
        "model_us": models.predict_us(settings.algo, row.name, size_bytes, len(members), link),
        "cv": measure.variation(times_s),
        "slowest_rank": slowest,
        "algbw_gb_s": rates.algbw_gb_s if row.moves_data else None,
        "busbw_gb_s": rates.busbw_gb_s if row.moves_data else None,
        "wrong": int(wrong),
        "checked": settings.check or not row.moves_data,
        "iters": settings.iters,
        "warmup_iters": settings.warmup_iters,
    }


def main() -> int:
    """Run by hand: the config as JSON in the only argument, the ranks from torchrun's environment."""
    config = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    return run_program(run, config)


if __name__ == "__main__":
    sys.exit(main())
