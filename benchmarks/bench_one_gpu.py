"""``gpuctl bench`` on one GPU at world size 1: what a call and a communicator cost, by both engines.

Run: ``python benchmarks/bench_one_gpu.py [--maxbytes 256M] [--iters 100] [--rounds 3] [--json FILE]``.
Alternates ``--engine torch`` and ``--engine direct`` over transport local and prints medians over the
rounds: time on the device, time of the host for queueing one call, and the direct engine's init. With
one rank nothing travels: these are overheads, not bandwidths.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CLUSTER = """\
version: 1
name: one
nodes:
  - {{host: localhost, transport: local, gpus: 1, python: {python}, state_dir: {state}}}
"""
ENGINES = ("torch", "direct")


def main() -> int:
    """Measure and print; 1 when an element was wrong or a run failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--collectives", default="all_reduce,all_gather,reduce_scatter,broadcast")
    parser.add_argument("--maxbytes", default="256M")
    parser.add_argument("--iters", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="keep every document here")
    arguments = parser.parse_args()
    documents: dict[str, list[dict[str, Any]]] = {engine: [] for engine in ENGINES}
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "cluster.yaml"
        cluster.write_text(CLUSTER.format(python=sys.executable, state=folder))
        for _ in range(arguments.rounds):
            for engine in ENGINES:
                documents[engine].append(measure(cluster, engine, arguments))
    if arguments.json:
        arguments.json.write_text(json.dumps(documents, indent=1))
    show(documents)
    return 0


def measure(cluster: Path, engine: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the document of one run; raises CalledProcessError when it failed or found wrong data."""
    command = [sys.executable, "-m", "gpuctl", "bench", *arguments.collectives.split(",")]
    command += ["-f", str(cluster), "--engine", engine, "--iters", str(arguments.iters), "--json"]
    command += ["--minbytes", "1K", "--maxbytes", arguments.maxbytes, "--factor", "8"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=300)
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["wrong"] == 0
    return document


def show(documents: dict[str, list[dict[str, Any]]]) -> None:
    """Print one table for all: medians over rounds."""
    setup = documents["direct"][0]["setup"]
    print(f"{setup['device']}, torch {setup['torch_version']}, library {setup['library_version']}")
    print(f"library: {setup['library_path']}")
    inits = [document["setup"]["init_s"] * 1e3 for document in documents["direct"]]
    print(f"init of the direct communicator: {statistics.median(inits):.1f} ms ({len(inits)} rounds)")
    print(f"{'collective':>15} {'bytes':>12}" + "".join(f" {e + ' us':>10} {'host us':>9}" for e in ENGINES))
    keys = [(row["collective"], row["size_bytes"]) for row in documents["torch"][0]["results"]]
    for key in keys:
        cells = "".join(f" {median(documents[e], key, 'us'):>10.1f} {median(documents[e], key, 'host'):>9.1f}"
                        for e in ENGINES)  # fmt: skip
        print(f"{key[0]:>15} {key[1]:>12}{cells}")


def median(documents: list[dict[str, Any]], key: tuple[str, int], what: str) -> float:
    """Return the median over rounds of a row's device or host time, microseconds."""
    rows = [r for d in documents for r in d["results"] if (r["collective"], r["size_bytes"]) == key]
    return statistics.median(r["host_us"] if what == "host" else r["time_us"]["median"] for r in rows)


if __name__ == "__main__":
    sys.exit(main())
