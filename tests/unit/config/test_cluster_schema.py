"""The JSON schema for editors knows the keys that the loader knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gpuctl.config.spec import ClusterSpec, FailureKeys, NetworkKeys, NodeEntry, NodeKeys, SshKeys

ROOT = Path(__file__).parents[3]
SCHEMA: dict[str, Any] = json.loads((ROOT / "gpuctl/schemas/cluster.json").read_text())
PLACES = SCHEMA["properties"]


@pytest.mark.parametrize(
    ("model", "part"),
    [
        (ClusterSpec, SCHEMA),
        (SshKeys, PLACES["ssh"]),
        (NodeKeys, PLACES["defaults"]),
        (NodeEntry, PLACES["nodes"]["items"]),
        (NetworkKeys, PLACES["network"]),
        (FailureKeys, PLACES["failure"]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_the_schema_has_every_key_and_no_other(model: type[ClusterSpec], part: dict[str, Any]) -> None:
    assert set(part["properties"]) == set(model.model_fields)
    assert part["additionalProperties"] is False


@pytest.mark.parametrize("path", sorted(ROOT.glob("templates/clusters/*")), ids=lambda path: path.name)
def test_every_template_is_valid(path: Path) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(yaml.safe_load(path.read_text()))


def test_a_slip_of_the_keyboard_is_not() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate({"nodes": [{"host": "a", "usr": "me"}]})
