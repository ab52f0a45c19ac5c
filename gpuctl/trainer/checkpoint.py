"""Checkpoints: logical tensors in safetensors parts, committed by one record (contract 11).

Every rank writes its part of every tensor; the parts are hashed and fsynced in a temporary directory that
each node renames; the commit record is written last, and a step without one does not exist.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from gpuctl.agent.worker import Worker
from gpuctl.collectives.group import all_gather
from gpuctl.core.parallel import ParallelDims
from gpuctl.trainer.parallel import DataParallel

VERSION = 1
STATES = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Position:
    """Where training stands: what resume needs besides the tensors."""

    step: int
    next_sample: int
    seed: int


def save(
    engine: DataParallel,
    worker: Worker,
    directory: Path,
    position: Position,
    dims: ParallelDims,
    strategy: str,
) -> Path:
    """Write the checkpoint of a step and return its directory; every rank must call it.

    Raises OSError when this rank's part cannot be written (the step then has no commit record).
    """
    began = time.monotonic()
    engine.wait_for_weights()
    env = worker.env
    final = directory / f"step-{position.step}"
    scratch = directory / f"step-{position.step}.attempt-{env.restart_count}.tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    name = f"rank-{env.rank}.safetensors"
    pieces = _pieces(engine)
    save_file({key: tensor for key, (tensor, _) in pieces.items()}, scratch / name)
    mine = _file_record(scratch / name)
    slices = {key: where for key, (_, where) in pieces.items()}
    reports = _gather_json({"file": mine, "slices": slices})  # also the barrier: every part is on its disk
    if env.local_rank == 0:
        _rename(scratch, final)
    _gather_json({})  # every node has renamed
    if env.rank == 0:
        record = _commit_record(engine, reports, position, dims, strategy, env.restart_count)
        _write_durably(final / "commit.json", json.dumps(record, indent=1).encode())
        size = sum(report["file"]["bytes"] for report in reports)
        worker.event(
            "checkpoint", step=position.step, path=str(final), bytes=size, seconds=time.monotonic() - began
        )
    return final


def _pieces(engine: DataParallel) -> dict[str, tuple[torch.Tensor, dict[str, Any]]]:
    """Return this rank's share of every state tensor, as 1-d pieces of the logical tensors.

    Under DP every rank has everything: each writes 1/n of each bucket, so that no disk writes it all.
    """
    pieces = {}
    for bucket in engine.buckets:
        share = bucket.size // engine.dp
        offset = 0 if engine.zero else engine.dp_rank * share
        for member, start, place in bucket.owned_pieces():
            first, last = max(place.start, offset), min(place.stop, offset + share)
            if first >= last:
                continue
            begin = start + (first - place.start)
            where = {"name": member.name, "start": begin, "length": last - first}
            for state in STATES:
                tensor = getattr(bucket, state)[first:last].detach().to("cpu", copy=True)
                pieces[f"{member.name}/{state}"] = (tensor, where)
    return pieces


def _file_record(path: Path) -> dict[str, Any]:
    """Hash and fsync a part; the node is named by its host name."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
        os.fsync(file.fileno())
    return {
        "name": path.name,
        "bytes": path.stat().st_size,
        "sha256": digest.hexdigest(),
        "node": socket.gethostname(),
    }


def _gather_json(value: dict[str, Any]) -> list[dict[str, Any]]:
    """Bring every rank's JSON to every rank; tensors, not pickles."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
    raw = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    world = dist.get_world_size()
    sizes = torch.zeros(world, dtype=torch.int64, device=device)
    all_gather(sizes, torch.tensor([raw.numel()], dtype=torch.int64, device=device))
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: raw.numel()] = raw
    everything = torch.zeros(world * longest, dtype=torch.uint8, device=device)
    all_gather(everything, padded)
    rows = everything.view(world, longest).cpu()
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes.tolist(), strict=True)]


def _rename(scratch: Path, final: Path) -> None:
    """Put the node's parts in place, instead of an earlier attempt's at the same step.

    On a shared disk another node may have done it already.
    """
    if not scratch.exists() and final.is_dir():
        return
    replaced = scratch.with_suffix(".replaced")
    if final.exists():
        final.rename(replaced)
    scratch.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)
    _fsync_directory(final.parent)


def _commit_record(
    engine: DataParallel,
    reports: list[dict[str, Any]],
    position: Position,
    dims: ParallelDims,
    strategy: str,
    generation: int,
) -> dict[str, Any]:
    shapes = {m.name: list(m.parameter.shape) for b in engine.buckets for m in b.members}
    dtype = str(engine.buckets[0].master.dtype).removeprefix("torch.")
    tensors: dict[str, dict[str, Any]] = {}
    for report in reports:
        for key, where in report["slices"].items():
            entry = tensors.setdefault(
                key, {"name": key, "shape": shapes[where["name"]], "dtype": dtype, "slices": []}
            )
            piece = {"file": report["file"]["name"], "start": where["start"], "length": where["length"]}
            entry["slices"].append(piece)
    return {
        "version": VERSION,
        "step": position.step,
        "generation": generation,
        "layout": {"pp": dims.pp, "dp": dims.dp, "tp": dims.tp, "zero": dims.zero, "strategy": strategy},
        "files": [report["file"] for report in reports],
        "tensors": list(tensors.values()),
        "data_position": {"next_sample": position.next_sample, "seed": position.seed},
        "rng": None,
        "versions": {"torch": torch.__version__},
        "previous": None,
    }


def _write_durably(path: Path, data: bytes) -> None:
    scratch = path.with_suffix(".tmp")
    with scratch.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    _fsync_directory(path.parent)


def _fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
