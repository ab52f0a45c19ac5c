"""The main job over real sshd nodes: every strategy gives the losses of one plain process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gpuctl.core.training import DataConfig, TrainingConfig
from gpuctl.trainer.data import open_dataset
from tests.distributed.reference import Trace, train_plainly
from tests.lab import Lab
from tests.lab.lab import tagged_processes

STEPS = 20


@pytest.fixture(scope="module")
def reference(lab: Lab) -> Trace:
    """Return the plain loop's run on the very text that the client made and pushed."""
    lab.gpuctl("launch", "-f", str(lab.cluster_yaml(1, gpus=1)), "--steps", "1").check_returncode()
    text = next((lab.folder / "client/.cache/gpuctl/data").glob("*.txt"))
    config = TrainingConfig(steps=STEPS, data=DataConfig(path=str(text)))
    data = open_dataset(
        config.data, seq_len=config.seq_len, vocab_size=config.model.vocab_size, seed=config.seed
    )
    return train_plainly(config, data, torch.float32, STEPS)


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("num_nodes", [2, 4])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_losses_and_norms_are_those_of_one_process(
    lab: Lab, reference: Trace, strategy: str, num_nodes: int
) -> None:
    done = lab.gpuctl(
        "launch", "-f", str(lab.cluster_yaml(num_nodes)), "-s", strategy, "--steps", str(STEPS), "--json"
    )
    assert done.returncode == 0, done.stderr
    events = events_of(done.stdout)
    steps = [event for event in events if event["event"] == "step"]
    assert [event["loss"] for event in steps] == pytest.approx(reference.losses, rel=1e-5)
    assert [event["grad_norm"] for event in steps] == pytest.approx(reference.norms, rel=1e-5)
    started = next(event for event in events if event["event"] == "started")
    assert started["world_size"] == 2 * num_nodes and started["schema_version"] == 1
    assert events[-1]["event"] == "done"
    assert tagged_processes(started["run"]) == []


def test_a_checkpoint_names_every_part_of_every_tensor(lab: Lab) -> None:
    done = lab.gpuctl("launch", "-f", str(lab.cluster_yaml(2)), "-s", "zero2", "--steps", "2", "--json")
    event = next(e for e in events_of(done.stdout) if e["event"] == "checkpoint")
    path = Path(event["path"])
    if lab.is_namespaced:
        path = lab.nodes[0].folder / "vartmp" / path.relative_to("/var/tmp")
    record = json.loads((path / "commit.json").read_text())
    assert record["step"] == 2 and record["layout"]["zero"] == 2 and len(record["files"]) == 4
    for tensor in record["tensors"]:
        size = 1
        for length in tensor["shape"]:
            size *= length
        pieces = sorted((s["start"], s["length"]) for s in tensor["slices"])
        assert pieces[0][0] == 0 and sum(length for _, length in pieces) == size, tensor["name"]
        ends = [start + length for start, length in pieces]
        assert ends[:-1] == [start for start, _ in pieces[1:]]


def test_bench_on_four_nodes_has_no_wrong_element(lab: Lab) -> None:
    flags = ["--minbytes", "4K", "--maxbytes", "16M", "--factor", "16", "--iters", "3", "--warmup-iters", "1"]
    cluster = str(lab.cluster_yaml(4))
    done = lab.gpuctl("bench", "all_reduce", "-f", cluster, *flags, "--json", timeout_s=120)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1 and document["collective"] == "all_reduce"
    assert document["wrong"] == 0 and all(row["checked"] for row in document["results"])
    assert max(row["size_bytes"] for row in document["results"]) >= 8 << 20
    row = document["results"][-1]
    # 8 ranks: busbw is algbw times 2 (n-1)/n (nccl-tests, PERFORMANCE.md)
    assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] * 2 * 7 / 8)
