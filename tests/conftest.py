"""Fixtures that several suites share: labs of real sshd nodes (see ``tests/lab``)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab import Lab, find_sshd


@pytest.fixture(scope="session")
def sshd_path() -> str:
    """Return an sshd; skip (CI fails on that) where none can be had."""
    path = find_sshd()
    if path is None:
        pytest.skip("no sshd here, and none could be fetched")
    return path


@pytest.fixture(scope="session")
def lab(sshd_path: str) -> Iterator[Lab]:
    """Four sshd nodes for the whole session; tests choose how many of them they use."""
    with Lab.made(4, sshd_path) as made:
        yield made
