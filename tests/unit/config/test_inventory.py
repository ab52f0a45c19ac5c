"""What ``init --from`` reads: each kind told by its content."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuctl.config.inventory import Inventory, read_inventory
from gpuctl.core.nodeset import fold
from gpuctl.errors import ConfigError

FIXTURES = Path(__file__).parents[2] / "fixtures"


def recorded(name: str) -> Inventory:
    path = FIXTURES / name
    return read_inventory(path.read_text(), name, path.parent)


def hosts_of(inventory: Inventory) -> str:
    return fold(host.host for host in inventory.hosts)


@pytest.mark.parametrize(
    ("name", "kind", "hosts"),
    [
        ("hostfile/deepspeed-good.txt", "a DeepSpeed hostfile", "worker-[1-2],localhost,192.0.2.10"),
        ("hostfile/prrte-variants.txt", "an Open MPI hostfile", "hostname[1-5],192.168.1.10"),
        ("hostfile/mpich-colon.txt", "an MPICH hostfile", "10.0.0.[1-2]"),
        ("slurm/sinfo-node-states.txt", "Slurm's sinfo", "bigmem-[1-2],c1-[5-29],gpu-[1,5-6,8-13,15-16]"),
        ("ssh/homelab-config", "an ssh_config", "backup0,node[0-3],ubuntu-gpu,mass,code-r,router"),
        ("ssh/hpc-login-config", "an ssh_config", "leibniz"),
        ("ssh/chained-proxyjump-and-proxycommand-config", "an ssh_config", "work"),
    ],
)
def test_recorded_files_are_told_by_content(name: str, kind: str, hosts: str) -> None:
    inventory = recorded(name)
    assert (inventory.kind, hosts_of(inventory)) == (kind, hosts)


@pytest.mark.parametrize("text", ["gpu[001-004,007]\n", "\ngpu[001-002],gpu003,gpu004,gpu007"])
def test_a_slurm_node_list(text: str) -> None:
    inventory = read_inventory(text, "f")
    assert (inventory.kind, hosts_of(inventory)) == ("a Slurm node list", "gpu[001-004,007]")


def test_nodes_that_slurm_took_away_are_named() -> None:
    assert recorded("slurm/sinfo-node-states.txt").notes == (
        "left out: gpu-2 is mixed+drain",
        "left out: gpu-[4,14] is idle+drain",
        "left out: gpu-7 is mixed+reserved",
    )


def test_jump_hosts_and_git_servers_are_left_out_with_the_reason() -> None:
    assert recorded("ssh/homelab-config").notes == ("left out: github.com, a git server (User git)",)
    assert recorded("ssh/hpc-login-config").notes == ("left out: hpc, a jump host of others",)


@pytest.mark.parametrize("name", ["ssh/negated-wildcard-config", "ssh/proxyjump-multi-config"])
def test_an_ssh_config_of_patterns_only_names_no_host(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recorded(name)
    assert caught.value.message == "the ssh_config names no host to run on"
    assert caught.value.hint == "name them: `gpuctl init --nodelist gpu[01-04]`"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f names no host"),
        ("version: 1\nnodes:\n- host: a\n", "f is a cluster file already"),
        ("a|down|\n", "f: no node is allocated, idle, mixed"),
        ("missingslots\n", "f:1: 'missingslots' has no slots (read as a DeepSpeed hostfile)"),
    ],
)
def test_what_is_no_list_of_hosts_says_why(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_inventory(text, "f")
    assert caught.value.message == message


def test_an_include_that_includes_itself_ends(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text("Include config\nHost a\n")
    with pytest.raises(ConfigError) as caught:
        read_inventory(path.read_text(), "config", tmp_path)
    assert caught.value.message == "more than 64 files are included"


@settings(deadline=None)
@given(st.text(max_size=80) | st.text("Host a*!|,[1-2]\n=ProxyJump idle", max_size=80))
def test_any_text_is_hosts_or_a_config_error(text: str) -> None:
    try:
        assert read_inventory(text, "f").hosts
    except ConfigError:
        pass
