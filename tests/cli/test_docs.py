"""Every command of README and docs that needs no GPU runs: blocks after ``<!-- test: run -->``, in order.

A page's blocks run in one folder with the local cluster file. Of a console block the ``$ `` lines are run;
what they print on a given machine (ids, times, speeds) is not compared, their exit code is.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.runner import Shell, local_cluster

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.relative_to(ROOT) for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"<!-- test: run -->\n```(\w+)\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def commands(page: Path) -> list[str]:
    """Return the page's runnable commands."""
    found = []
    for kind, body in BLOCK.findall((ROOT / page).read_text()):
        lines = body.splitlines()
        found += [line[2:] for line in lines if line.startswith("$ ")] if kind == "console" else lines
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=str)
def test_the_commands_of_a_page_run(page: Path, shell: Shell) -> None:
    bin_dir = shell.folder / "bin"
    bin_dir.mkdir()
    (bin_dir / "gpuctl").write_text(f'#!/bin/sh\nexec {sys.executable} -m gpuctl "$@"\n')
    (bin_dir / "gpuctl").chmod(0o755)
    env = {**shell.env, "PATH": f"{bin_dir}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    if page.name != "README.md":  # the README writes its own
        local_cluster(shell.folder)
    for command in commands(page):
        done = subprocess.run(
            ["sh", "-c", command], cwd=shell.folder, env=env, capture_output=True, text=True, timeout=120,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        if page.name == "README.md" and command.startswith("gpuctl init"):
            keep_to_folder(shell.folder)


def keep_to_folder(folder: Path) -> None:
    """Add the test's own state_dir and interpreter to the file that ``init`` wrote."""
    file = folder / "cluster.yaml"
    defaults = f"defaults: {{state_dir: {folder}, python: {sys.executable}}}\n"
    file.write_text(file.read_text().replace("nodes:\n", f"{defaults}nodes:\n", 1))


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    folder = (ROOT / page).parent
    assert [link for link in LINK.findall((ROOT / page).read_text()) if not (folder / link).exists()] == []
