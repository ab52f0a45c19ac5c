"""The trainer on one GPU beside a plain loop and FSDP2 of the same work, in turn, in one run.

Run: ``python benchmarks/train_one_gpu.py [--micro-batch 8] [--steps 300] [--json FILE]``. The trainer is
started as a user would, by ``gpuctl launch -s zero2`` over transport local. Prints a table of medians
(the first steps left out) and how far the losses of both are apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpuctl.services.data import default_text

WARM_UP = 20
CLUSTER = """\
version: 1
name: one
nodes:
  - {{host: localhost, transport: local, python: {python}, state_dir: {state}}}
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--plain-steps", type=int, default=120)
    parser.add_argument("--set", action="append", default=[], help="more settings for both")
    parser.add_argument("--rounds", type=int, default=1, help="plain, trainer, plain, trainer, ...")
    parser.add_argument("--no-fsdp2", action="store_true", help="leave FSDP2 out")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    settings = {
        "preset": a.model, "seq_len": a.seq_len, "global_batch": a.micro_batch, "micro_batch": a.micro_batch,
        "steps": a.steps, "optim.warmup_steps": 20,
    }  # fmt: skip
    words = [*(f"{k}={v}" for k, v in settings.items()), *a.set]
    plain, ours, fsdp = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(a.rounds):
            plain.append(run_plain(words, a.plain_steps, Path(folder)))
            ours.append(run_trainer(words, Path(folder)))
            if not a.no_fsdp2:
                fsdp.append(run_plain(["--fsdp2", *words], a.plain_steps, Path(folder)))
    show(plain, ours, fsdp, a)


def run_plain(settings: list[str], steps: int, folder: Path) -> list[dict[str, Any]]:
    data = default_text(folder / "cache")
    command = [sys.executable, str(Path(__file__).with_name("plain_loop.py")), "--data", str(data.path)]
    return lines_of([*command, "--run-steps", str(steps), *settings], folder)


def run_trainer(settings: list[str], folder: Path) -> list[dict[str, Any]]:
    cluster = folder / "cluster.yaml"
    cluster.write_text(CLUSTER.format(python=sys.executable, state=folder / "state"))
    command = [sys.executable, "-m", "gpuctl", "launch", "-f", str(cluster), "-s", "zero2", "--json"]
    for setting in settings:
        command += ["--set", setting]
    return [
        event
        for event in lines_of(command, folder)
        if event.get("event") in ("step", "started", "checkpoint")
    ]


def lines_of(command: list[str], folder: Path) -> list[dict[str, Any]]:
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(sys.path[1:])}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def median_rate(runs: list[list[dict[str, Any]]]) -> float:
    rates = [line["tokens_per_s"] for run in runs for line in steps_of(run)[WARM_UP:]]
    return statistics.median(rates)


def median_of(runs: list[list[dict[str, Any]]], key: str) -> float | None:
    values = [line[key] for run in runs for line in steps_of(run)[WARM_UP:] if line.get(key) is not None]
    return statistics.median(values) if values else None


def steps_of(run: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in run if "loss" in line]


def show(
    plain: list[list[dict[str, Any]]],
    ours: list[list[dict[str, Any]]],
    fsdp: list[list[dict[str, Any]]],
    a: argparse.Namespace,
) -> None:
    plain_rate, our_rate = median_rate(plain), median_rate(ours)
    last = steps_of(ours[0])[-1]
    gaps = [
        abs(p["loss"] - o["loss"]) / p["loss"]
        for p, o in zip(steps_of(plain[0]), steps_of(ours[0]), strict=False)
    ]
    memory = {"plain": steps_of(plain[0])[-1]["memory_bytes"], "gpuctl": last["memory_bytes"]}
    result = {
        "model": a.model, "micro_batch": a.micro_batch, "seq_len": a.seq_len,
        "plain_tokens_per_s": plain_rate, "gpuctl_tokens_per_s": our_rate, "ratio": our_rate / plain_rate,
        "mfu": median_of(ours, "mfu"), "tflops": median_of(ours, "tflops"), "memory_bytes": memory,
        "first_loss": steps_of(ours[0])[0]["loss"], "last_loss": last["loss"], "steps": last["step"],
        "plain_losses": [s["loss"] for s in steps_of(plain[0])][::10],
        "gpuctl_losses": [s["loss"] for s in steps_of(ours[0])][::10],
        "median_loss_gap": statistics.median(gaps), "worst_loss_gap": max(gaps),
    }  # fmt: skip
    if fsdp:
        fsdp_rate = median_rate(fsdp)
        result |= {"fsdp2_tokens_per_s": fsdp_rate, "ratio_to_fsdp2": our_rate / fsdp_rate}
        memory["fsdp2"] = steps_of(fsdp[0])[-1]["memory_bytes"]
        result["fsdp2_losses"] = [s["loss"] for s in steps_of(fsdp[0])][::10]
    for key, value in result.items():
        print(f"{key:>20}  {value}")
    if a.json is not None:
        a.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
