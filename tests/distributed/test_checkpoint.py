"""The parts of a checkpoint make the logical tensors again; one rank's stop is every rank's stop."""

from __future__ import annotations

import hashlib
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gpuctl.trainer import checkpoint
from tests.distributed.ranks import run_ranks
from tests.distributed.test_gradients import CONFIG, make_trainer

STEPS = 2


def train_and_save(rank: int, world_size: int, seed: int, zero: int, folder: Path) -> dict[str, torch.Tensor]:
    trainer = make_trainer(rank, world_size, replace(CONFIG, seed=seed, dtype="fp32"), zero, True)
    for _ in range(STEPS):
        trainer.one_step()
    position = checkpoint.Position(STEPS, STEPS * CONFIG.global_batch, seed)
    checkpoint.save(trainer.engine, trainer.worker, folder, position, trainer.dims, f"zero{zero}")
    # in fp32 the weights are the masters
    named = [(m.name, m.parameter) for b in trainer.engine.buckets for m in b.members]
    return {name: parameter.detach().clone() for name, parameter in named}


def logical_tensors(folder: Path, record: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Put every tensor of ``record`` together; NaN stays where no slice was."""
    parts = {file["name"]: load_file(folder / file["name"]) for file in record["files"]}
    found = {}
    for entry in record["tensors"]:
        flat = torch.full((math.prod(entry["shape"]),), math.nan)
        for piece in entry["slices"]:
            values = parts[piece["file"]][entry["name"]]
            assert len(values) == piece["length"]
            flat[piece["start"] : piece["start"] + piece["length"]] = values
        found[entry["name"]] = flat.view(entry["shape"])
    return found


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_parts_make_the_logical_tensors_of_every_layout(zero: int, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    weights = run_ranks(3, train_and_save, seed, zero, tmp_path)[0]
    folder = tmp_path / f"step-{STEPS}"
    record = json.loads((folder / "commit.json").read_text())
    found = logical_tensors(folder, record)
    assert set(found) == {f"{name}/{state}" for name in weights for state in checkpoint.STATES}
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())
    for name, weight in weights.items():
        assert torch.equal(found[f"{name}/master"], weight), name
    assert record["data_position"] == {"next_sample": STEPS * CONFIG.global_batch, "seed": seed}


def test_the_record_has_the_hash_of_every_file_and_nothing_else_is_left(tmp_path: Path) -> None:
    run_ranks(2, train_and_save, 1, 2, tmp_path)
    folder = tmp_path / f"step-{STEPS}"
    record = json.loads((folder / "commit.json").read_text())
    for file in record["files"]:
        data = (folder / file["name"]).read_bytes()
        assert (file["bytes"], file["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    names = {"commit.json", *(file["name"] for file in record["files"])}
    assert {path.name for path in folder.iterdir()} == names
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def save_twice(rank: int, world_size: int, folder: Path) -> None:
    for seed in (1, 2):
        train_and_save(rank, world_size, seed, 2, folder)


def test_a_step_saved_again_replaces_the_earlier_one(tmp_path: Path) -> None:
    run_ranks(2, save_twice, tmp_path)
    record = json.loads((tmp_path / f"step-{STEPS}" / "commit.json").read_text())
    assert record["data_position"]["seed"] == 2


def stop_one(rank: int, world_size: int) -> tuple[int, bool]:
    trainer = make_trainer(rank, world_size, replace(CONFIG, steps=50, dtype="fp32"), 2, True)
    one_step = trainer.one_step

    def watched() -> Any:
        trainer.worker.stop_requested = rank == 1 and trainer.step == 2
        return one_step()

    trainer.one_step = watched  # type: ignore[method-assign]
    trainer.train()
    return trainer.step, trainer.is_stopped


def test_one_ranks_stop_ends_every_rank_after_the_same_step() -> None:
    assert run_ranks(3, stop_one) == [(3, True)] * 3
