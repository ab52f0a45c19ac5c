"""Hostfiles: the recorded ones with the answers of their SOURCES.md, and what -H takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuctl.config.hostfile import HostLine, load_hostfile, parse_host_list, parse_hostfile
from gpuctl.errors import ConfigError

FIXTURES = Path(__file__).parents[2] / "fixtures/hostfile"


def recorded(name: str) -> str:
    return (FIXTURES / name).read_text()


@pytest.mark.parametrize(
    ("name", "dialect", "hosts"),
    [
        ("deepspeed-good.txt", "DeepSpeed",
         [("worker-1", 2), ("worker-2", 2), ("localhost", 1), ("192.0.2.10", 2)]),
        ("openmpi-mi300x-2node.txt", "DeepSpeed", [("100.64.129.30", 8), ("100.64.129.62", 8)]),
        ("mpich-colon.txt", "MPICH", [("10.0.0.1", 8), ("10.0.0.2", 8)]),
        ("prrte-variants.txt", "Open MPI",
         [("hostname1", 1), ("hostname2", 4), ("hostname3", 4), ("hostname4", 1), ("hostname5", 1),
          ("192.168.1.10", 1)]),
    ],
)  # fmt: skip
def test_recorded_hostfiles(name: str, dialect: str, hosts: list[tuple[str, int]]) -> None:
    hostfile = parse_hostfile(recorded(name), name)
    assert hostfile.dialect == dialect
    assert [(host.host, host.slots) for host in hostfile.hosts] == hosts


def test_open_mpi_users_ports_and_limits_are_kept() -> None:
    hosts = {host.host: host for host in parse_hostfile(recorded("prrte-variants.txt"), "f").hosts}
    assert hosts["hostname3"] == HostLine("hostname3", 4, max_slots=8, line=5)
    assert hosts["hostname4"].user == "alice"
    assert hosts["hostname5"].port == 2222


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("deepspeed-bad-duplicate.txt",
         "f:3: host worker-1 is there already, in line 1 (read as a DeepSpeed hostfile)"),
        ("deepspeed-bad-whitespace.txt", "f:1: 'is' is not understood (read as a DeepSpeed hostfile)"),
        ("deepspeed-bad-missing-slots.txt",
         "f:1: 'missingslots' has no slots (read as a DeepSpeed hostfile)"),
    ],
)  # fmt: skip
def test_recorded_bad_hostfiles_name_line_and_dialect(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(recorded(name), "f")
    assert caught.value.message == message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f names no host"),
        ("# only this\n", "f names no host"),
        ("a slots=0", "f:1: 'slots=0': a number from 1 to 1024 is expected"),
        ("a slots=x", "f:1: 'slots=x': a number from 1 to 1024 is expected"),
        ("a slots=8 gpus=1", "f:1: 'gpus=1' is not understood (read as a DeepSpeed hostfile)"),
        ("-oProxyCommand=x slots=1",
         "f:1: '-oProxyCommand=x' is not a host name (read as a DeepSpeed hostfile)"),
        ("$(x) slots=1", "f:1: '$(x)' is not a host name (read as a DeepSpeed hostfile)"),
        ("n[1-9999] slots=1",
         "f:1: node set 'n[1-9999]' stands for more than 4,096 hosts (read as a DeepSpeed hostfile)"),
        ("-x@a port=1",
         "f:1: '-x': a login name is letters, digits, '_', '.', '@' and '-', without a leading '-'"),
    ],
)  # fmt: skip
def test_bad_lines_say_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(text, "f")
    assert caught.value.message == message
    assert caught.value.hint


def test_only_open_mpi_adds_duplicates_up() -> None:
    hosts = parse_hostfile("a slots=2 max_slots=4\na slots=1\n", "f").hosts
    assert [(host.host, host.slots) for host in hosts] == [("a", 3)]


def test_node_sets_comments_and_blanks_around_the_sign_are_read() -> None:
    hosts = parse_hostfile("gpu[01-02] slots = 8  # rack 1\n", "f").hosts
    assert [(host.host, host.slots) for host in hosts] == [("gpu01", 8), ("gpu02", 8)]


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("h1:2,h2", [("h1", 2), ("h2", "auto")]),
        ("gpu[1-2]:8", [("gpu1", 8), ("gpu2", 8)]),
        ("[::1]:2,::2", [("::1", 2), ("::2", "auto")]),
        ("a,a", [("a", 2)]),
    ],
)
def test_a_list_of_hosts(text: str, nodes: list[tuple[str, int | str]]) -> None:
    assert [(node.host, node.gpus) for node in load_hostfile(text).nodes] == nodes


def test_a_hostfile_becomes_a_cluster_that_knows_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("\na slots=2\nme@b:4 port=2222\n")
    cluster = load_hostfile(str(path))
    assert [node.origin for node in cluster.nodes] == [f"{path}:2", f"{path}:3"]
    assert (cluster.nodes[1].user, cluster.nodes[1].port, cluster.nodes[1].gpus) == ("me", 2222, 4)


def test_this_machine_alone_needs_no_ssh() -> None:
    assert [node.transport for node in load_hostfile("localhost:2").nodes] == ["local"]
    assert [node.transport for node in load_hostfile("localhost:2,b:2").nodes] == ["ssh", "ssh"]


def test_a_path_that_is_not_there_is_no_host() -> None:
    with pytest.raises(ConfigError) as caught:
        load_hostfile("./hosts.missing")
    assert caught.value.message == "cannot read hosts.missing"


@settings(deadline=None)
@given(st.text(max_size=80) | st.text("ab1:=,@[]-# \nslotmax_", max_size=80))
def test_any_text_is_hosts_or_a_config_error(text: str) -> None:
    for parse in (parse_hostfile, parse_host_list):
        try:
            assert parse(text, "f").hosts
        except ConfigError as exc:
            assert exc.message.startswith("f")
