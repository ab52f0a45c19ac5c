"""Error texts and exit codes, whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.runner import Shell

CASES = {
    "--nodes is never guessed": (
        ("launch", "--nodes", "3"),
        2,
        "error: no such option: --nodes. Did you mean --nnodes?\n\n"
        "hint: `--nnodes N` takes a number of nodes, `--nodelist SET` takes names like gpu[01-04]\n",
    ),
    "-o takes json": (("status", "-o", "yaml"), 2, "error: -o takes one word: json\n\nhint: use `--json`\n"),
    "nothing after --": (
        ("launch", "--"),
        2,
        "error: nothing stands after --\n\nhint: `gpuctl launch -- ./program --flag`\n",
    ),
    "stop without a run": (
        ("stop",),
        2,
        "error: which run?\n\nhint: `gpuctl stop latest`, or `gpuctl status` for their ids\n",
    ),
    "exec without a command": (("exec",), 2, "error: which command?\n\nhint: `gpuctl exec -- uptime`\n"),
    "two sources of nodes": (
        ("plan", "-f", "a.yaml", "-H", "b"),
        2,
        "error: --file and --hostfile both name the nodes\n\nhint: give one of them\n",
    ),
    "clean asks before it removes": (
        ("clean",),
        2,
        "error: clean removes files on the nodes\n\nhint: `gpuctl clean -y`, or look first with --dry-run\n",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_text_on_stderr_is(shell: Shell, name: str) -> None:
    words, code, text = CASES[name]
    answer = shell.gpuctl(*words)
    assert (answer.code, answer.out, answer.err) == (code, "", text)


def test_a_script_flag_before_the_dashes_is_sent_behind_them(shell: Shell) -> None:
    answer = shell.gpuctl("launch", "train.py", "--my-rate", "1")
    assert answer.code == 2
    assert answer.err.endswith(
        "\n\nhint: arguments of your own program go after --: `gpuctl launch train.py -- --lr 3e-4`\n"
    )


def test_a_mistyped_verb_is_suggested(shell: Shell) -> None:
    answer = shell.gpuctl("lanch")
    assert answer.code == 2
    assert "did you mean 'launch'" in answer.err.lower()


def test_a_wrong_key_names_file_and_line(shell: Shell) -> None:
    (shell.folder / "cluster.yaml").write_text("version: 1\nname: a\nnodse: []\n")
    answer = shell.gpuctl("status")
    assert answer.code == 2
    assert answer.err.startswith("error: cluster.yaml:3: ")
    assert "nodes" in answer.err


def test_an_unreachable_node_is_exit_3(shell: Shell) -> None:
    text = "version: 1\nname: a\nnodes:\n  - {host: 127.0.0.1, port: 1}\n"
    (shell.folder / "cluster.yaml").write_text(text)
    answer = shell.gpuctl("plan")
    assert answer.code == 3
    assert answer.err.startswith("error: ")
    assert "Traceback" not in answer.err


def test_a_bug_of_ours_is_exit_70_with_a_saved_traceback(shell: Shell) -> None:
    (shell.folder / "sitecustomize.py").write_text(
        "import gpuctl.config.cluster as c\n"
        "def load_cluster(*a, **k): raise RuntimeError('boom \\x1b[31m')\n"
        "c.load_cluster = load_cluster\n"
    )
    answer = shell.gpuctl("status", PYTHONPATH=f"{shell.folder}:{Path(__file__).parents[2]}")
    assert answer.code == 70
    assert answer.err.startswith(
        "error: gpuctl has a bug and stopped; sorry\n  caused by: RuntimeError: boom"
    )
    [saved] = (shell.folder / ".local/state/gpuctl").glob("crash-*.txt")
    assert str(saved) in answer.err
    assert "load_cluster" in saved.read_text()
    assert "\x1b" not in answer.err
