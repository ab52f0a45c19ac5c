"""Where things lie on a node, below ``<state_dir>/gpuctl-UID`` (contract 7)."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpuctl.core.run import RUN_ID


@dataclass(frozen=True)
class RunDir:
    """The directory of one node's part of a run."""

    path: Path

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def state(self) -> Path:
        return self.path / "state.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def work(self) -> Path:
        """The synchronised folder's copy that the ranks of this run work in."""
        return self.path / "work"

    def generation(self, generation: int) -> Path:
        return self.path / f"gen-{generation}"

    def log(self, generation: int, rank: int, stream: str) -> Path:
        """``stream`` is ``out`` or ``err``."""
        return self.generation(generation) / f"rank-{rank}.{stream}"

    def error_file(self, generation: int, rank: int) -> Path:
        return self.generation(generation) / f"error-{rank}.json"


@dataclass(frozen=True)
class Home:
    """``<state_dir>/gpuctl-UID`` of this node."""

    path: Path

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    def tree(self, kind: str, sha256: str) -> Path:
        """An unpacked tree: ``kind`` is ``bundles`` or ``sync``."""
        return self.path / kind / sha256

    def data(self, sha256: str) -> Path:
        """A data file pushed by the client."""
        return self.path / "data" / sha256

    def checkpoints(self, name: str) -> Path:
        return self.path / "checkpoints" / name

    def run_dir(self, run_id: str, node_rank: int) -> RunDir:
        """Return the directory of one node of a run; raises ValueError on what is no run id."""
        if not RUN_ID.match(run_id):
            raise ValueError(f"{run_id!r} is not a run id")
        return RunDir(self.runs / run_id / f"node-{node_rank}")

    def run_dirs(self) -> list[RunDir]:
        """Every run's directory on this node."""
        return [RunDir(p) for p in sorted(self.runs.glob("*/node-*")) if RUN_ID.match(p.parent.name)]


@contextlib.contextmanager
def short_path(directory: Path, name: str) -> Iterator[str]:
    """Yield a path for ``directory/name`` that fits a unix socket address (108 bytes) anywhere."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


def listen_unix(directory: Path) -> socket.socket:
    """Listen on ``directory/sock`` (the directory is 0700)."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(directory / "sock")
    with short_path(directory, "sock") as path:
        sock.bind(path)
    sock.listen(64)
    sock.setblocking(False)
    return sock


def connect_unix(directory: Path) -> socket.socket:
    """Connect to the agent that listens in ``directory``; raises OSError when none does."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(directory, "sock") as path:
            sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock
