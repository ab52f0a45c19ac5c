"""Every verb's ``--json`` on this machine, against the schemas in the package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.cli.runner import Answer, Shell

ROOT = Path(__file__).parents[2]


def validate(document: Any, name: str) -> None:
    """Raise when ``document`` is not what gpuctl/schemas/NAME.json says."""
    schema = json.loads((ROOT / f"gpuctl/schemas/{name}.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)


@pytest.fixture(scope="module")
def trained(lab: Shell) -> Answer:
    """A finished run of two steps."""
    return lab.gpuctl("launch", "-s", "zero1", "--steps", "2", "--json")


def test_schemas_are_those_of_the_code() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/make_schemas.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_launch_prints_events(trained: Answer) -> None:
    assert trained.code == 0, trained.err
    for event in trained.lines:
        validate(event, "launch_event")
    kinds = [event["event"] for event in trained.lines]
    assert (kinds[0], kinds[-1], kinds.count("step")) == ("started", "done", 2)


def test_plan_is_a_plan(lab: Shell) -> None:
    validate(lab.gpuctl("plan", "-s", "zero2", "--json").document, "plan")


def test_dry_run_prints_the_plan(lab: Shell) -> None:
    validate(lab.gpuctl("launch", "--dry-run", "--json").document, "plan")


def test_plan_hides_secrets(lab: Shell) -> None:
    for words in (("plan", "-v"), ("plan", "--json")):
        assert "hunter2" not in lab.gpuctl(*words, "-e", "HF_TOKEN=hunter2").out


def test_status_serves_as_facts(lab: Shell, trained: Answer) -> None:
    answer = lab.gpuctl("status", "-o", "json")
    validate(answer.document, "status")
    (lab.folder / "facts.json").write_text(answer.out)
    plan = lab.gpuctl("plan", "--facts", "facts.json", "--json").document
    assert plan["nodes"][0]["ranks"] == [0, 1]


def test_a_runs_status_logs_and_stop(lab: Shell, trained: Answer) -> None:
    validate(lab.gpuctl("status", "latest", "--json").document, "status_run")
    stopped = lab.gpuctl("stop", "latest", "--json")
    validate(stopped.document, "stop")
    assert (stopped.code, stopped.document["runs"][0]["was_finished"]) == (0, True)


def test_logs_are_lines_of_raw_text(lab: Shell) -> None:
    (lab.folder / "say.py").write_text("print('[rank0] [/x] \\x1b[31mred')\n")
    launched = lab.gpuctl("launch", "say.py")
    assert launched.code == 0, launched.err
    assert "[rank0] [/x] \\x1b[31mred" in launched.out
    lines = lab.gpuctl("logs", "latest", "--rank", "all", "--json").lines
    for line in lines:
        validate(line, "logs_line")
    assert {line["line"] for line in lines} == {"[rank0] [/x] \x1b[31mred"}


def test_a_failing_script_is_exit_1_with_one_final_failed(lab: Shell) -> None:
    (lab.folder / "bad.py").write_text("raise ValueError('no such corpus')\n")
    answer = lab.gpuctl("launch", "bad.py", "--json")
    assert answer.code == 1
    failed = [event for event in answer.lines if event["event"] == "failed"]
    assert len(failed) == 1
    validate(failed[0], "launch_event")
    assert "no such corpus" in failed[0]["message"]


def test_bench_is_checked_to_the_element(lab: Shell) -> None:
    words = ("--minbytes", "64K", "--maxbytes", "64K", "--iters", "3", "--json")
    document = lab.gpuctl("bench", "allreduce", *words).document
    validate(document, "bench")
    assert document["results"][0]["wrong"] == 0


def test_exec_answers_for_each_node(lab: Shell) -> None:
    answer = lab.gpuctl("exec", "--json", "--", "sh", "-c", "echo $0 --json; exit 4", "a b")
    validate(answer.document, "exec")
    node = answer.document["nodes"][0]
    assert (answer.code, node["exit_code"], node["stdout"]) == (1, 4, "a b --json\n")


def test_init_and_clean(lab: Shell, trained: Answer) -> None:
    validate(lab.gpuctl("init", "--nodelist", "a[1-2]", "-f", "new.yaml", "--json").document, "init")
    validate(lab.gpuctl("clean", "--dry-run", "--json").document, "clean")
