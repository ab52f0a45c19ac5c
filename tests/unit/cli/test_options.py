from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpuctl.cli.options import Selection
from gpuctl.core.cluster import NodeSpec

CLUSTER = """\
nodes:
  - {host: here, transport: local}
  - {host: there}
  - {host: set, transport: local, python: /usr/bin/python3, workdir: /srv}
  - {host: activated, transport: local, activate: . env/bin/activate}
"""


def load(folder: Path) -> dict[str, NodeSpec]:
    (folder / "cluster.yaml").write_text(CLUSTER)
    return {node.host: node for node in Selection(file=folder / "cluster.yaml").load().nodes}


def test_a_local_node_works_where_the_user_stands_with_gpuctls_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nodes = load(tmp_path)
    assert (nodes["here"].python, nodes["here"].workdir) == (sys.executable, str(tmp_path))
    assert (nodes["there"].python, nodes["there"].workdir) == (None, None)


def test_what_the_file_says_of_a_local_node_stays(tmp_path: Path) -> None:
    nodes = load(tmp_path)
    assert (nodes["set"].python, nodes["set"].workdir) == ("/usr/bin/python3", "/srv")
    assert nodes["activated"].python is None
