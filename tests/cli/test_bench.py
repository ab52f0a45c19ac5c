"""``gpuctl bench`` through real agents on this machine."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from tests.cli.runner import Shell
from tests.cli.test_json import validate
from tests.distributed.standin import build_standin

FEW = ("--minbytes", "4K", "--maxbytes", "64K", "--factor", "16", "--iters", "3", "--warmup-iters", "1")


def test_matrix_and_models_are_what_the_schema_says(lab: Shell) -> None:
    answer = lab.gpuctl("bench", "p2p", *FEW, "--json")
    validate(answer.document, "bench")
    assert [len(row["bandwidth_gb_s"]) for row in answer.document["results"]] == [2, 2]
    answer = lab.gpuctl("bench", "allreduce", "all-gather", *FEW, "--algo", "ring", "--json")
    validate(answer.document, "bench")
    assert answer.document["collectives"] == ["all_reduce", "all_gather"]
    assert answer.document["link"]["bandwidth_gb_s"] > 0


def test_our_own_communicator_gets_its_id_from_the_agents(lab: Shell, tmp_path: Path) -> None:
    library = build_standin(tmp_path)
    answer = lab.gpuctl("bench", "allreduce", *FEW, "--engine", "direct", "--library", library, "--json")
    assert answer.code == 0, answer.err
    validate(answer.document, "bench")
    assert answer.document["setup"]["library_version"] == "2.28.3"
    assert [(row["engine"], row["wrong"]) for row in answer.document["results"]] == [("direct", 0)] * 2
    kept = [path for path in lab.folder.rglob("*") if path.is_file() and "runs" in path.parts]
    assert kept
    # The id is a bearer secret: not in the plan, the events, the logs or the record of the run.
    assert not [path for path in kept if b"/standin-" in path.read_bytes()]


def test_saved_runs_compare_and_csv_is_a_table(lab: Shell) -> None:
    words = ("bench", "allreduce", *FEW)
    assert lab.gpuctl(*words, "--save", "monday").code == 0
    answer = lab.gpuctl(*words, "--compare", "monday", "--csv")
    rows = list(csv.DictReader(io.StringIO(answer.out)))
    assert [row["size_bytes"] for row in rows] == ["4096", "65536"]
    assert lab.gpuctl(*words, "--compare", "tuesday").code == 2


def test_two_answers_or_two_groupings_are_refused(lab: Shell) -> None:
    assert "--json and --csv are two answers" in lab.gpuctl("bench", "allreduce", "--json", "--csv").err
    answer = lab.gpuctl("bench", "allreduce", "--per-node", "--per-rail")
    assert (answer.code, "--per-node and --per-rail are two ways to group" in answer.err) == (2, True)
