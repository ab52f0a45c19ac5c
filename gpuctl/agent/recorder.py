"""The thread that writes ``state.json`` and ``events.jsonl``: the loop never waits for a disk."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any

from gpuctl.agent.paths import RunDir
from gpuctl.core.codec import to_json
from gpuctl.core.run import RunRecord

#: A disk that stands still for this many records loses events, never the run.
MAX_QUEUED = 10_000


class Recorder:
    """Writes in order; the newest state wins when the disk is slower than the run."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._queue: queue.Queue[tuple[str, Any] | None] = queue.Queue(MAX_QUEUED)
        self._has_complained = False
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def state(self, record: RunRecord) -> None:
        """Replace ``state.json``."""
        self._put(("state", record))

    def event(self, event: dict[str, Any]) -> None:
        """Append a line to ``events.jsonl``."""
        self._put(("event", event))

    def close(self, timeout_s: float) -> None:
        """Write what is queued, within ``timeout_s``."""
        self._put(None)
        self._thread.join(timeout_s)

    def _put(self, item: tuple[str, Any] | None) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            pass

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            kind, value = item
            try:
                if kind == "state":
                    write_atomically(self._run_dir.state, json.dumps(to_json(value)))
                else:
                    append_line(self._run_dir.events, json.dumps(value))
            except OSError as exc:
                self._complain(exc)

    def _complain(self, exc: OSError) -> None:
        if not self._has_complained:
            self._has_complained = True
            print(f"cannot write the run's state: {exc}", file=sys.stderr, flush=True)


def write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` so that a reader sees the old text or the new one, never a part."""
    scratch = path.with_name(path.name + ".tmp")
    fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
    os.replace(scratch, path)


def append_line(path: Path, text: str) -> None:
    """Append one line to ``path``."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text + "\n")
