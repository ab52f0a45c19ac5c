from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.runner import Shell, local_cluster


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """A user in an empty folder."""
    return Shell(tmp_path)


@pytest.fixture(scope="module")
def lab() -> Iterator[Shell]:
    """A user with a cluster file of this machine, shared by the tests of a module."""
    with tempfile.TemporaryDirectory(prefix="gpuctl-cli-") as folder:
        local_cluster(Path(folder))
        yield Shell(Path(folder))
