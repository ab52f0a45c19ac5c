"""Detached runs, seen and ended from elsewhere; the user's own scripts; newcomers' mistakes."""

from __future__ import annotations

import json
import shutil
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab
from tests.lab.lab import tagged_processes


@pytest.fixture
def other_home(lab: Lab) -> Iterator[Path]:
    """Return a second HOME of the same user: the same keys, none of gpuctl's files."""
    home = lab.folder / "other"
    shutil.copytree(lab.folder / "client/.ssh", home / ".ssh")
    yield home
    shutil.rmtree(home)


@pytest.fixture
def project(lab: Lab) -> Iterator[Path]:
    """Return a folder for a user's own scripts."""
    folder = lab.folder / f"project-{time.monotonic_ns()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def wait_for(what: Any, timeout_s: float, why: str) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = what()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout_s} s: {why}")


def test_a_detached_run_is_seen_followed_and_stopped_from_another_home(lab: Lab, other_home: Path) -> None:
    cluster = str(lab.cluster_yaml(2))
    left = lab.gpuctl("launch", "-f", cluster, "-s", "zero1", "--steps", "100000", "-d", "--name", "long")
    assert left.returncode == 0, left.stderr
    run_id = left.stdout.strip()

    def running() -> Any:
        shown = lab.gpuctl("status", "long", "-f", cluster, "--json", home=other_home)
        record = json.loads(shown.stdout)["run"]
        return record if record["step"] else None

    record = wait_for(running, 60, "the run has no step")
    assert record["run_id"] == run_id and record["state"] == "running" and len(record["ranks"]) == 4
    follower = lab.client("logs", "-f", "long", "--file", cluster, home=other_home)
    stopped = lab.gpuctl("stop", "long", "-f", cluster, home=other_home)
    assert stopped.returncode == 0, stopped.stderr
    _, err = follower.communicate(timeout=20)
    assert follower.returncode == 0, err
    assert tagged_processes(run_id) == []
    again = lab.gpuctl("stop", "long", "-f", cluster, home=other_home)
    assert again.returncode == 0 and "had ended already" in again.stdout
    shown = json.loads(lab.gpuctl("status", run_id, "-f", cluster, "--json").stdout)["run"]
    assert shown["state"] == "stopped" and "stopped by" in shown["reason"]


DDP = """
    import os, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    torch.manual_seed(dist.get_rank())
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    total = torch.ones(1)
    dist.all_reduce(total)
    print("world", int(total), "local", os.environ["LOCAL_RANK"], flush=True)
    dist.destroy_process_group()
"""
ACCELERATE = """
    import torch
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    loss = model(torch.randn(8, 4)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    print("world", accelerator.num_processes, "index", accelerator.process_index, flush=True)
    accelerator.end_training()
"""
LIGHTNING = """
    import os, torch, lightning
    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
        def training_step(self, batch, index):
            return self.layer(batch[0]).square().mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 4)), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", devices=2, num_nodes=2, max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Model(), data)
    print("world", trainer.world_size, "rank", trainer.global_rank, flush=True)
"""


@pytest.mark.parametrize("text", [DDP, ACCELERATE, LIGHTNING], ids=["torchrun", "accelerate", "lightning"])
def test_scripts_for_other_launchers_run_unchanged(lab: Lab, project: Path, text: str) -> None:
    (project / "train.py").write_text(textwrap.dedent(text))
    cluster = lab.cluster_yaml(2, workdir=str(project))
    done = lab.gpuctl("launch", "-f", str(cluster), "train.py", timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert "world 4" in done.stdout


def test_sync_carries_the_folder_and_its_arguments(lab: Lab, project: Path) -> None:
    (project / "helper.py").write_text("VALUE = 'carried'\n")
    (project / "train.py").write_text("import sys, helper\nprint(helper.VALUE, sys.argv[1:], flush=True)\n")
    (project / ".env").write_text("SECRET=1\n")
    cluster = str(lab.cluster_yaml(2))
    done = lab.gpuctl("launch", "-f", cluster, "--sync", str(project), "train.py", "--", "a b", "$x")
    assert done.returncode == 0, done.stderr
    assert "carried ['a b', '$x']" in done.stdout
    assert "leaves out .env" in done.stderr


def test_a_script_that_is_missing_is_said_of_every_node_at_once(lab: Lab) -> None:
    done = lab.gpuctl("launch", "-f", str(lab.cluster_yaml(2)), "nowhere.py")
    assert done.returncode == 1
    assert "2 of 2 nodes cannot start; nothing was started" in done.stderr
    assert "nowhere.py is missing" in done.stderr and "--sync" in done.stderr


def test_an_interpreter_that_is_missing_is_named_with_its_node(lab: Lab) -> None:
    done = lab.gpuctl("launch", "-f", str(lab.cluster_yaml(2, python="/nowhere/python3")), "--steps", "1")
    assert done.returncode in (1, 3)
    assert "/nowhere/python3" in done.stderr and "hint:" in done.stderr


def test_an_unknown_host_key_is_refused_before_anything_runs(lab: Lab, other_home: Path) -> None:
    config = (lab.folder / "client/.ssh/config").read_text()
    strange = config.replace(f"{lab.folder}/client/.ssh/known_hosts", f"{other_home}/.ssh/empty")
    (other_home / ".ssh/config").write_text(strange)
    (other_home / ".ssh/config").chmod(0o600)
    process = lab.client(
        "exec", "-f", str(lab.cluster_yaml(2)), "--", "true",
        env={"GPUCTL_SSH_CONFIG": str(other_home / ".ssh/config")},
    )  # fmt: skip
    _, err = process.communicate(timeout=30)
    assert process.returncode == 3
    assert "the host key is unknown" in err and "SHA256:" in err


def test_exec_folds_identical_answers(lab: Lab) -> None:
    done = lab.gpuctl("exec", "-f", str(lab.cluster_yaml(4)), "--", "echo", "a  b", "[/x]")
    assert done.returncode == 0, done.stderr
    assert "a  b [/x]" in done.stdout and done.stdout.count("a  b") == 1


def test_clean_removes_finished_runs_everywhere(lab: Lab) -> None:
    cluster = str(lab.cluster_yaml(2))
    lab.gpuctl("launch", "-f", cluster, "--", "true").check_returncode()
    done = lab.gpuctl("clean", "-f", cluster, "-y", "--json")
    assert done.returncode == 0, done.stderr
    assert all(node["removed"] for node in json.loads(done.stdout)["nodes"].values())
    shown = json.loads(lab.gpuctl("status", "-f", cluster, "-a", "--json").stdout)
    assert shown["runs"] == []


def test_a_node_behind_a_jump_host_is_entered_through_it(lab: Lab, other_home: Path) -> None:
    config = (lab.folder / "client/.ssh/config").read_text()
    last = lab.nodes[1]
    host = last.name if lab.is_namespaced else last.address
    behind = f"Host {host}\n  ProxyJump {lab.nodes[0].name}\n"
    (other_home / ".ssh/config").write_text(behind + config)
    (other_home / ".ssh/config").chmod(0o600)
    process = lab.client(
        "exec", "-f", str(lab.cluster_yaml(2)), "--nodelist", host, "--json",
        "--", "sh", "-c", "echo $SSH_CONNECTION",
        env={"GPUCTL_SSH_CONFIG": str(other_home / ".ssh/config")},
    )  # fmt: skip
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    came_from = json.loads(out)["nodes"][0]["stdout"].split()[0]
    if lab.is_namespaced:
        assert came_from == lab.nodes[0].address
