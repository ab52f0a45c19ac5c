"""The command line answers at once."""

from __future__ import annotations

import subprocess
import sys
import time


def test_help_is_quick() -> None:
    """The best of five: the budget is what gpuctl costs, not what the machine is busy with."""
    best = min(_seconds() for _ in range(5))
    bare = min(_seconds("-c", "pass") for _ in range(3))
    assert best - bare < 0.25, f"gpuctl --help takes {best:.2f} s, python alone {bare:.2f} s"


def _seconds(*words: str) -> float:
    start = time.perf_counter()
    command = [sys.executable, *(words or ("-m", "gpuctl", "--help"))]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start
