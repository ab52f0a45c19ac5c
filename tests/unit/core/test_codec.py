"""The codec: every contract survives a JSON round trip, versions apart by a field included."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuctl.core.cluster import Cluster, Failure, NodeSpec, PortRange
from gpuctl.core.codec import from_json, to_json
from gpuctl.core.hardware import FactsFile, Gpu, Nic, NodeFacts, Vendor
from gpuctl.core.training import TrainingConfig

NODE = NodeSpec("gpu01", gpus=(0, 2), vendor=Vendor.AMD, env={"A": "1"}, env_from=("HF_TOKEN",), port=22)
FACTS = NodeFacts(
    "gpu01",
    vendor=Vendor.NVIDIA,
    gpus=(Gpu(0, Vendor.NVIDIA, memory_total_bytes=85520809984, utilization_percent=3),),
    nics=(Nic("eth0", ("10.0.0.1",), mtu=9000),),
)


@pytest.mark.parametrize(
    "value",
    [
        NODE,
        Cluster("lab", (NODE, NodeSpec("gpu02")), ports=PortRange(29400, 29500), failure=Failure(dead_s=5)),
        FactsFile((FACTS,)),
        TrainingConfig(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_round_trip_through_json_text_changes_nothing(value: Any) -> None:
    assert from_json(type(value), json.loads(json.dumps(to_json(value)))) == value


def test_unknown_keys_of_a_newer_version_are_ignored() -> None:
    assert from_json(Failure, {"suspect_s": 1, "later": 2}) == Failure(suspect_s=1.0)


def test_missing_keys_of_an_older_version_take_the_default() -> None:
    assert from_json(NodeSpec, {"host": "a"}) == NodeSpec("a")


@pytest.mark.parametrize(
    ("cls", "data", "message"),
    [
        (NodeSpec, {}, "NodeSpec: host is missing"),
        (NodeSpec, [], "NodeSpec: a mapping was expected, not list"),
        (NodeSpec, {"host": 1}, "NodeSpec.host: str was expected, not int"),
        (PortRange, {"first": True, "last": 2}, "PortRange.first: an int was expected, not bool"),
        (Cluster, {"name": "x", "nodes": {}}, "Cluster.nodes: a list was expected, not dict"),
        (FactsFile, {"nodes": [{"host": "a", "gpus": [{"index": 0}]}]},
         "FactsFile.nodes[0].gpus[0]: vendor is missing"),
    ],
)  # fmt: skip
def test_a_wrong_shape_is_a_value_error_that_says_where(cls: type, data: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        from_json(cls, data)
    assert str(caught.value) == message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)
node_like = st.dictionaries(
    st.sampled_from(["host", "gpus", "vendor", "env", "port", "env_from", "transport"]), json_values
)


@settings(deadline=None)
@given(json_values | node_like)
def test_whatever_a_peer_sends_is_a_node_or_a_value_error(data: Any) -> None:
    try:
        from_json(NodeSpec, data)
    except ValueError:
        pass
