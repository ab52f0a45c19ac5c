"""``gpuctl bench`` over sshd nodes whose links are what the test makes them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from tests.lab.lab import Lab

FEW = ("--iters", "3", "--warmup-iters", "1", "--json")
EVERY = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send_recv", "gather",
    "scatter", "barrier", "p2p",
)  # fmt: skip
SLACK = 0.25
"""How far the measured ratio of two algorithms may be from their models' ratio."""


def bench(lab: Lab, *words: str) -> dict[str, Any]:
    done = lab.gpuctl("bench", *words, "-f", str(lab.cluster_yaml(4, gpus=1)), *FEW, timeout_s=120)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["wrong"] == 0
    assert all(row["checked"] for row in document["results"])
    return document


@contextmanager
def shaped(lab: Lab, mbit: Mapping[int, int]) -> Iterator[None]:
    """Give each node's link a rate, both ways; skips where links cannot be shaped."""
    if not lab.is_namespaced or shutil.which("tc") is None:
        pytest.skip("shaping links takes root and tc")
    ends = [(f"gl{lab.tag}n{i}", "eth0", rate) for i, rate in mbit.items()]
    ends += [(f"gl{lab.tag}sw", f"p{i}", rate) for i, rate in mbit.items()]
    try:
        for namespace, device, rate in ends:
            tc(namespace, "add", device, "tbf", "rate", f"{rate}mbit", "burst", "32k", "latency", "300ms")
        yield
    finally:
        for namespace, device, _ in ends:
            subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], check=False)


def tc(namespace: str, verb: str, device: str, *words: str) -> None:
    subprocess.run(["tc", "-n", namespace, "qdisc", verb, "dev", device, "root", *words], check=True)


def test_every_collective_is_right_over_four_nodes(lab: Lab) -> None:
    document = bench(lab, *EVERY, "--minbytes", "132", "--maxbytes", "40K", "--factor", "17")
    assert {row["collective"] for row in document["results"]} == set(EVERY)


@pytest.mark.parametrize("algo", ["ring", "naive"])
def test_the_algorithms_are_right_with_fewer_elements_than_ranks(lab: Lab, algo: str) -> None:
    document = bench(
        lab, "all_reduce", "--algo", algo, "--minbytes", "4", "--maxbytes", "5M", "--factor", "103"
    )
    assert document["results"][0]["size_bytes"] == 4


def test_ring_against_server_is_what_the_models_say(lab: Lab) -> None:
    size = ("--minbytes", "1M", "--maxbytes", "1M")
    with shaped(lab, dict.fromkeys(range(4), 100)):
        (ring,), (server,) = (
            bench(lab, "all_reduce", "--algo", algo, *size)["results"] for algo in ("ring", "naive")
        )
    measured = server["time_us"]["median"] / ring["time_us"]["median"]
    assert measured == pytest.approx(server["model_us"] / ring["model_us"], rel=SLACK)
    # 2 (n-1)/n against 2 (n-1): four ranks, a factor of four
    assert measured == pytest.approx(4.0, rel=SLACK)


def test_the_node_behind_a_slow_link_is_named(lab: Lab) -> None:
    with shaped(lab, {0: 100, 1: 100, 2: 30, 3: 100}):
        document = bench(lab, "p2p", "--minbytes", "256K", "--maxbytes", "256K")
    (link,) = document["slow_links"]
    assert (link["ranks"], link["host"]) == ([2], "node2")
