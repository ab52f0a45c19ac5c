"""Every cluster template plans, with recorded GPUs where it names any."""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime
from pathlib import Path

import pytest

from gpuctl.config.cluster import load_cluster
from gpuctl.core.cluster import NodeSpec
from gpuctl.core.codec import from_json
from gpuctl.core.hardware import FactsFile, NodeFacts, Vendor
from gpuctl.core.training import TrainingConfig
from gpuctl.errors import CheckFailed
from gpuctl.services.plan import LaunchRequest, make_plan
from gpuctl.vendors import ToolAnswer, vendor_module

TESTS = Path(__file__).parents[2]
TEMPLATES = sorted((TESTS.parent / "templates/clusters").glob("*.yaml"))


def recorded(spec: NodeSpec, index: int) -> NodeFacts:
    """Return eight of the recorded GPUs of the vendor a node asks for (auto: NVIDIA)."""
    text = (TESTS / "fixtures/facts/h200-driver580.json").read_text()
    h200 = from_json(FactsFile, json.loads(text)).nodes[0]
    assert h200.gpus is not None
    gpus = [dataclasses.replace(h200.gpus[0], index=i, uuid=f"GPU-{index}{i}") for i in range(8)]
    vendor = Vendor.NVIDIA if spec.vendor == "auto" else spec.vendor
    if vendor is Vendor.AMD:
        answer = ToolAnswer((TESTS / "fixtures/rocm-json/mi100x6-rocm5.7.1.json").read_text())
        gpus = list(vendor_module(Vendor.AMD).read({"rocm": answer}).gpus or ())
        gpus += [dataclasses.replace(gpus[0], index=i) for i in (6, 7)]
    return dataclasses.replace(
        h200,
        host=spec.host,
        vendor=vendor,
        ssh_address=f"10.0.0.{index + 1}",
        gpus=() if vendor is Vendor.CPU else tuple(gpus),
        machine_id=f"{index:032}",
    )


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_plans(path: Path) -> None:
    cluster = load_cluster(path)
    facts = [recorded(spec, i) for i, spec in enumerate(cluster.nodes)]
    request = LaunchRequest(strategy="zero2", training=TrainingConfig())
    if len({fact.vendor for fact in facts}) > 1:
        with pytest.raises(CheckFailed, match="two vendors"):
            make_plan(cluster, facts, request, now=datetime(2026, 1, 1), token="abcd")
        return
    plan = make_plan(cluster, facts, request, now=datetime(2026, 1, 1), token="abcd")
    assert plan.world_size == plan.dims.dp == sum(len(node.ranks) for node in plan.nodes)
    assert all(variable.why and variable.source for node in plan.nodes for variable in node.env)
    assert len({node.address for node in plan.nodes}) == len(plan.nodes)
