"""Runs gpuctl as a user does: a process, its two streams, its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


class Shell:
    """A user with an empty home, standing in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        keep = ("PATH", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH")
        env = {name: os.environ[name] for name in keep if name in os.environ}
        self.env = {**env, "HOME": str(folder), "COLUMNS": "80", "TERM": "dumb"}

    def gpuctl(self, *words: str, timeout_s: float = 120, **env: str) -> Answer:
        """Run one command."""
        done = subprocess.run(
            [sys.executable, "-m", "gpuctl", *words],
            cwd=self.folder,
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Answer(done.returncode, done.stdout, done.stderr)


LOCAL_CLUSTER = """\
version: 1
name: here
defaults: {{state_dir: {state_dir}, python: {python}}}
nodes:
  - {{host: localhost, transport: local, vendor: cpu, gpus: 2}}
"""


def local_cluster(folder: Path) -> None:
    """Write a cluster file of this machine with a state_dir of its own."""
    text = LOCAL_CLUSTER.format(state_dir=folder, python=sys.executable)
    (folder / "cluster.yaml").write_text(text)
