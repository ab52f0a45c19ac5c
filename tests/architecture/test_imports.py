"""Import rules: who may import what, and how little ``gpuctl`` loads before a verb is called."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def loaded_by(module: str) -> set[str]:
    """Return the top-level modules that importing ``module`` brings into a fresh interpreter."""
    code = f"import sys, json, {module}; print(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_the_command_line_starts_without_the_heavy_libraries() -> None:
    heavy = {"torch", "numpy", "paramiko", "cryptography", "pydantic", "yaml", "rich"}
    assert loaded_by("gpuctl.cli.app") & heavy == set()


@pytest.mark.parametrize("module", ["bridge", "guardian", "supervisor", "lead", "forkserver", "worker"])
def test_the_agent_loads_nothing_but_the_standard_library(module: str) -> None:
    """A site's ``.pth`` files may load more; what an empty interpreter has is subtracted."""
    theirs = loaded_by(f"gpuctl.agent.{module}") - loaded_by("json") - set(sys.stdlib_module_names)
    assert theirs == {"gpuctl"}


@pytest.mark.parametrize("module", ["gpuctl.trainer.loop", "gpuctl.collectives.bench"])
def test_the_node_side_loads_nothing_of_the_clients(module: str) -> None:
    assert loaded_by(module) & {"typer", "rich", "pydantic", "yaml", "paramiko"} == set()


def test_the_layers_hold() -> None:
    linter = shutil.which("lint-imports", path=str(Path(sys.executable).parent)) or shutil.which(
        "lint-imports"
    )
    assert linter is not None, "import-linter is part of gpuctl[dev]"
    done = subprocess.run(
        [linter, "--no-cache", "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
