"""``gpuctl init``: what it writes loads, and it never writes over a file unasked."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuctl.config.cluster import load_cluster
from gpuctl.config.inventory import read_inventory
from gpuctl.errors import ConfigError
from gpuctl.services.init import InitResult, init, render, template_names

FIXTURES = Path(__file__).parents[2] / "fixtures"


def write(tmp_path: Path, **arguments: object) -> InitResult:
    return init(tmp_path / "cluster.yaml", **{"environ": {}, **arguments})  # type: ignore[arg-type]


def test_a_node_set_becomes_one_entry(tmp_path: Path) -> None:
    result = write(tmp_path, nodelist="gpu[01-04],login")
    assert (result.num_nodes, result.nodes, result.source) == (5, "gpu[01-04],login", "--nodelist")
    cluster = load_cluster(tmp_path / "cluster.yaml", environ={})
    assert [node.host for node in cluster.nodes] == ["gpu01", "gpu02", "gpu03", "gpu04", "login"]
    assert "  - host: gpu[01-04],login\n" in result.text


def test_what_is_commented_out_is_right_too(tmp_path: Path) -> None:
    text = write(tmp_path, nodelist="a").text
    head, _, tail = text.partition("# ssh:\n")
    uncommented = "\n".join(
        line.removeprefix("# ") for line in ("# ssh:\n" + tail).split("\n") if "# Keys for" not in line
    )
    cluster = load_cluster(Path("c.yaml"), text=head + uncommented, environ={})
    assert (cluster.nodes[0].python, cluster.nodes[0].gpus) == ("~/venv/bin/python", "auto")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("hostfile/deepspeed-good.txt", 4),
        ("hostfile/mpich-colon.txt", 2),
        ("hostfile/prrte-variants.txt", 6),
        ("slurm/sinfo-node-states.txt", 38),
        ("ssh/homelab-config", 9),
    ],
)
def test_recorded_files_become_cluster_files(name: str, count: int, tmp_path: Path) -> None:
    result = write(tmp_path, source=FIXTURES / name)
    assert result.num_nodes == count == len(load_cluster(tmp_path / "cluster.yaml", environ={}).nodes)
    assert str(FIXTURES / name) in result.source


def test_slots_users_and_ports_of_a_hostfile_are_kept_in_order(tmp_path: Path) -> None:
    write(tmp_path, source=FIXTURES / "hostfile/prrte-variants.txt")
    nodes = load_cluster(tmp_path / "cluster.yaml", environ={}).nodes
    assert [node.host for node in nodes] == [f"hostname{n}" for n in range(1, 6)] + ["192.168.1.10"]
    assert [node.gpus for node in nodes] == [1, 4, 4, 1, 1, 1]
    assert (nodes[3].user, nodes[4].port) == ("alice", 2222)


def test_what_was_left_out_stands_in_the_file(tmp_path: Path) -> None:
    result = write(tmp_path, source=FIXTURES / "slurm/sinfo-node-states.txt")
    assert "# left out: gpu-7 is mixed+reserved\n" in result.text
    assert "left out: gpu-7 is mixed+reserved" in result.notes


def test_the_allocation_around_names_the_nodes(tmp_path: Path) -> None:
    result = write(tmp_path, template="slurm", environ={"SLURM_JOB_NODELIST": "n[1-3]"})
    assert (result.source, result.nodes) == ("this Slurm allocation", "n[1-3]")
    assert load_cluster(tmp_path / "cluster.yaml", environ={}).nodes[0].activate == "module load cuda"


@pytest.mark.parametrize("template", template_names())
def test_every_template_can_take_other_nodes(template: str, tmp_path: Path) -> None:
    assert write(tmp_path, template=template, nodelist="x[1-2]").nodes == "x[1-2]"
    alone = init(tmp_path / "alone.yaml", template=template, environ={})
    assert alone.source == f"template {template}"


def test_without_anything_it_is_this_machine(tmp_path: Path) -> None:
    result = write(tmp_path)
    assert (result.source, result.nodes) == ("template local", "localhost")


def test_a_dash_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "host: a" in init(Path("-"), nodelist="a", environ={}).text
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_written_over_only_with_force(tmp_path: Path) -> None:
    write(tmp_path, nodelist="a")
    with pytest.raises(ConfigError) as caught:
        write(tmp_path, nodelist="b")
    assert caught.value.message == f"{tmp_path}/cluster.yaml is there already"
    assert caught.value.hint == "`gpuctl init --force` writes over it; -f names another"
    result = write(tmp_path, nodelist="b", force=True)
    assert (result.is_overwritten, result.nodes) == (True, "b")
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.yaml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodelist": "$(x)"}, "--nodelist: '$(x)' is not a host name"),
        ({"nodelist": "a", "source": Path("b")}, "--nodelist and --from both name the nodes"),
        ({"template": "nope"}, "there is no template 'nope'"),
        ({"template": "../clusters/local"}, "there is no template '../clusters/local'"),
        ({"source": FIXTURES / "hostfile/deepspeed-bad-duplicate.txt"}, None),
        ({"source": Path("/nowhere/hosts")}, "cannot read /nowhere/hosts"),
    ],
)
def test_errors_write_nothing(arguments: dict[str, object], message: str | None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        write(tmp_path, **arguments)
    assert message is None or caught.value.message == message
    assert caught.value.hint
    assert list(tmp_path.iterdir()) == []


@settings(deadline=None)
@given(st.text(max_size=60) | st.text("gpu01 slots=8\n@:[-],|idle#", max_size=60))
def test_any_text_becomes_a_file_that_loads_or_a_config_error(text: str) -> None:
    try:
        inventory = read_inventory(text, "f")
    except ConfigError:
        return
    cluster = load_cluster(Path("c.yaml"), text=render(inventory, "a test"), environ={})
    assert [node.host for node in cluster.nodes] == [host.host for host in inventory.hosts]
