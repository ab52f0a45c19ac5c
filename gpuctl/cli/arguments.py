"""What happens to the command line before typer reads it.

Long flags with underscores become dashes, spellings of other launchers become ours, and what
stands after the first ``--`` is kept apart: it belongs to the user's program and is never touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuctl.errors import UsageError

# Other launchers' words for the same thing (deepspeed); not shown in help.
ALIASES = {
    "--num-nodes": "--nnodes",
    "--num-gpus": "--nproc-per-node",
    "--include": "--nodelist",
}


@dataclass(frozen=True)
class Split:
    """The words for gpuctl, and the words after ``--`` (None when there is no ``--``)."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...] | None


def split(argv: Sequence[str]) -> Split:
    """Normalise ``argv`` up to the first ``--``; raises UsageError for flags that mislead."""
    words = list(argv)
    theirs = None
    if "--" in words:
        cut = words.index("--")
        words, theirs = words[:cut], tuple(words[cut + 1 :])
    return Split(tuple(_output_alias([_long_flag(word) for word in words])), theirs)


def _long_flag(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    name = name.replace("_", "-")
    if name == "--nodes":  # Slurm's --nodes is a count, other tools' a list of names: never guess
        raise UsageError(
            "no such option: --nodes. Did you mean --nnodes?",
            hint="`--nnodes N` takes a number of nodes, `--nodelist SET` takes names like gpu[01-04]",
        )
    return ALIASES.get(name, name) + equals + value


def _output_alias(words: list[str]) -> list[str]:
    """``-o json``, as kubectl writes it, is ``--json``."""
    done: list[str] = []
    rest = iter(words)
    for word in rest:
        if word not in ("-o", "-ojson", "--output", "--output=json", "-o=json"):
            done.append(word)
            continue
        kind = next(rest, None) if word in ("-o", "--output") else "json"
        if kind != "json":
            raise UsageError(f"{word} takes one word: json", hint="use `--json`")
        done.append("--json")
    return done
