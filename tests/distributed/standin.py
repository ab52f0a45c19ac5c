"""Build the stand-in for libnccl from its source, with the C compiler of this machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "fixtures" / "collectives" / "standin_nccl.c"


def build_standin(folder: Path, *flags: str) -> str:
    """Return the path of the library; skips the test where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler here: the stand-in for libnccl cannot be built")
    path = folder / "libnccl-standin.so"
    command = [compiler, "-O2", "-shared", "-fPIC", *flags, "-o", str(path), str(SOURCE), "-lrt"]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return str(path)
