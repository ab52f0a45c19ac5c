from __future__ import annotations

import pytest

from gpuctl.cli.arguments import split
from gpuctl.errors import UsageError


def test_underscores_become_dashes_in_names_and_never_in_values() -> None:
    assert split(["launch", "--nproc_per_node=2", "--name", "my_run"]).ours == (
        "launch", "--nproc-per-node=2", "--name", "my_run",
    )  # fmt: skip


def test_what_stands_after_the_dashes_is_never_touched() -> None:
    words = split(["launch", "a.py", "--", "--my_flag", "-o", "json", "--", "--nodes"])
    assert words.theirs == ("--my_flag", "-o", "json", "--", "--nodes")
    assert words.ours == ("launch", "a.py")


def test_nothing_after_the_dashes_is_told_from_no_dashes() -> None:
    assert split(["launch", "--"]).theirs == ()
    assert split(["launch"]).theirs is None


@pytest.mark.parametrize(("theirs", "ours"), [("--num_nodes", "--nnodes"), ("--include=a", "--nodelist=a")])
def test_other_launchers_words_mean_ours(theirs: str, ours: str) -> None:
    assert split([theirs]).ours == (ours,)


@pytest.mark.parametrize("words", [["-o", "json"], ["-ojson"], ["--output", "json"], ["--output=json"]])
def test_o_json_is_json(words: list[str]) -> None:
    assert split(["status", *words]).ours == ("status", "--json")


@pytest.mark.parametrize("words", [["--nodes", "2"], ["--nodes=2"], ["-o"], ["-o", "wide"]])
def test_what_misleads_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError):
        split(["status", *words])
