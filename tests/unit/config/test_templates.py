"""Every template loads with the real loader, and the example is one of them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gpuctl.config.cluster import load_cluster
from gpuctl.config.training import load_training
from gpuctl.core.hardware import Vendor
from gpuctl.services.init import read_template, template_names

ROOT = Path(__file__).parents[3]
TEMPLATES = ROOT / "templates"


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("clusters/*")), ids=lambda path: path.name)
def test_cluster_templates_load(path: Path) -> None:
    assert load_cluster(path, environ={}).nodes


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("clusters/*")), ids=lambda path: path.name)
def test_nodes_stand_last_so_that_init_can_replace_them(path: Path) -> None:
    _, _, nodes = path.read_text().partition("\nnodes:\n")
    assert nodes
    assert all(line.startswith((" ", "#")) for line in nodes.splitlines() if line)


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("training/*")), ids=lambda path: path.name)
def test_training_templates_load(path: Path) -> None:
    assert load_training(path).steps > 0


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("schedulers/*.sbatch")), ids=lambda path: path.name)
def test_scheduler_scripts_are_shell(path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run([bash, "-n", path], check=True, timeout=10)


def test_the_package_finds_the_templates_of_the_repository() -> None:
    assert template_names() == sorted(path.stem for path in TEMPLATES.glob("clusters/*"))
    assert read_template("clusters/local.yaml") == (TEMPLATES / "clusters/local.yaml").read_text()


def test_the_example_is_two_cpu_workers_on_this_machine() -> None:
    example = ROOT / "cluster.example.yaml"
    assert example.read_text() == read_template("clusters/local.yaml")
    (node,) = load_cluster(example, environ={}).nodes
    assert (node.transport, node.vendor, node.gpus) == ("local", Vendor.CPU, 2)
