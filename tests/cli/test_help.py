"""Help texts are reviewed like code: each verb's -h is kept in snapshots/.

``GPUCTL_UPDATE_SNAPSHOTS=1 pytest tests/cli/test_help.py`` writes them anew.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import typer

from gpuctl.cli.app import VERBS
from tests.cli.runner import Shell

SNAPSHOTS = Path(__file__).parent / "snapshots"
# Spacing and the names of value types differ between typer versions; words and flags do not.
TYPER = tuple(int(part) for part in typer.__version__.split(".")[:2])


@pytest.mark.skipif(TYPER < (0, 29), reason="the snapshots are those of typer 0.29")
@pytest.mark.parametrize("verb", ["", *VERBS])
def test_the_help_of_each_verb_is_the_reviewed_one(shell: Shell, verb: str) -> None:
    answer = shell.gpuctl(*verb.split(), "-h")
    snapshot = SNAPSHOTS / f"help-{verb or 'gpuctl'}.txt"
    if os.environ.get("GPUCTL_UPDATE_SNAPSHOTS"):
        SNAPSHOTS.mkdir(exist_ok=True)
        snapshot.write_text(answer.out)
    assert answer.code == 0
    assert answer.out == snapshot.read_text()


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_verb_takes_the_flags_that_stand_everywhere(shell: Shell, verb: str) -> None:
    text = shell.gpuctl(verb, "--help").out
    for flag in ("--file", "--json", "--verbose", "--quiet", "--no-color", "--debug", "--help"):
        assert flag in text, flag


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_verb_shows_an_example(shell: Shell, verb: str) -> None:
    assert re.search(r"Examples:\n +gpuctl ", shell.gpuctl(verb, "-h").out)


def test_bare_gpuctl_prints_help_and_exits_2(shell: Shell) -> None:
    answer = shell.gpuctl()
    assert (answer.code, answer.out.startswith("Usage: gpuctl")) == (2, True)


def test_version_is_the_packages(shell: Shell) -> None:
    import gpuctl

    assert shell.gpuctl("--version").out == f"gpuctl {gpuctl.__version__}\n"
