"""What ``ssh -G`` says: the recorded configs through the real ssh, odd output, no ssh at all."""

from __future__ import annotations

import os
import pwd
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuctl.config.ssh_config import (
    Jump,
    SshTarget,
    jump_chain,
    parse,
    parse_jump,
    resolve,
    resolve_host,
    run_ssh,
)
from gpuctl.core.cluster import NodeSpec
from gpuctl.errors import ConfigError, TimeoutExpired

FIXTURES = Path(__file__).parents[2] / "fixtures/ssh"
HOME = pwd.getpwuid(os.getuid()).pw_dir
needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh client here")


def ask(config: str | Path, host: str) -> SshTarget:
    return resolve(NodeSpec(host), environ={"GPUCTL_SSH_CONFIG": str(FIXTURES / config)})


def hops(config: str, host: str) -> list[str]:
    environ = {"GPUCTL_SSH_CONFIG": str(FIXTURES / config)}
    return [f"{hop.user}@{hop.hostname}:{hop.port}" for hop in jump_chain(ask(config, host), environ=environ)]


@needs_ssh
def test_a_chain_of_jumps_is_resolved_hop_by_hop() -> None:
    config = "chained-proxyjump-and-proxycommand-config"
    target = ask(config, "work")
    assert (target.hostname, target.port, target.user) == ("localhost", 33333, "alice")
    assert target.proxy_command is None
    assert target.identity_files == (f"{HOME}/.ssh/id_rsa_work",)
    assert not target.is_default_identity
    assert hops(config, "work") == ["alice@primary.lan:22", "bob@localhost:22222"]


@needs_ssh
def test_a_proxy_command_has_its_tokens_filled_in() -> None:
    target = ask("hpc-plus-jump-config", "tunnel+gpu1")
    assert target.user == "alice"
    assert target.proxy_command is not None
    assert "${JUMPHOST_USER:-alice}" in target.proxy_command
    assert target.proxy_command.endswith(":22")


@needs_ssh
def test_negated_patterns_and_login_nodes() -> None:
    assert ask("negated-wildcard-config", "lab_gpu1").proxy_jump == "sjb"
    assert ask("negated-wildcard-config", "lab_sjb").proxy_jump is None
    target = ask("negated-wildcard-config", "lab_gpu1")
    assert (target.user, target.connect_timeout_s, target.identities_only) == ("operator", 10, True)
    assert target.user_known_hosts == ("/dev/null",)
    assert ask("hpc-login-config", "leibniz").hostname == "login.leibniz.example.edu"


@needs_ssh
def test_match_exec_is_left_to_ssh() -> None:
    target = ask("bastion-cidr-match-exec-config", "10.0.3.4")
    assert (target.user, target.proxy_jump) == ("admin", "bastion.example.com")


@needs_ssh
def test_hosts_of_an_included_file(tmp_path: Path) -> None:
    included = tmp_path / "home.cloud"
    included.write_text((FIXTURES / "homelab-config.d/home.cloud").read_text())
    included.chmod(0o600)  # ssh refuses an included file that others can write
    text = (
        (FIXTURES / "homelab-config").read_text().replace("Include homelab-config.d", f"Include {tmp_path}")
    )
    text = text.replace(f"{tmp_path}/*", str(included))
    (tmp_path / "config").write_text(text)
    target = ask(tmp_path / "config", "node1")
    assert (target.hostname, target.user) == ("node1.lan", "alice")
    assert target.identity_agent == f"{HOME}/.1password/agent.sock"


@needs_ssh
def test_jumps_in_a_circle_are_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        hops("proxyjump-multi-config", "gpu.tld")
    assert "circle" in caught.value.message or "ssh does not accept" in caught.value.message


@needs_ssh
def test_the_nodes_own_keys_win_and_ssh_is_told_of_them(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(
        "Match user me\n  HostName seen\nHost a\n  User you\n  Port 1\n  IdentityFile ~/x\n"
    )
    environ = {"GPUCTL_SSH_CONFIG": str(tmp_path / "config")}
    target = resolve(NodeSpec("a", user="me", port=22022, identity_file="/k"), environ=environ)
    assert (target.hostname, target.user, target.port, target.identity_files) == (
        "seen",
        "me",
        22022,
        ("/k",),
    )


@needs_ssh
def test_a_broken_ssh_config_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Nonsense yes\n")
    with pytest.raises(ConfigError) as caught:
        ask(tmp_path / "config", "a")
    assert caught.value.message == "ssh does not accept its configuration for a"
    assert caught.value.cause is not None
    assert "Bad configuration option: nonsense" in caught.value.cause


@needs_ssh
def test_an_ssh_that_hangs_is_ended_at_the_deadline_with_its_children(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(f'Match exec "echo $$ > {tmp_path}/pid; exec sleep 60"\n  User x\n')
    with pytest.raises(TimeoutExpired):
        run_ssh(["-F", str(tmp_path / "config"), "-G", "--", "a"], timeout_s=1.5)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "State:\tZ" not in status  # an orphan nobody has reaped yet is dead all the same


def no_ssh(arguments: Sequence[str]) -> None:
    return None


def test_without_an_ssh_binary_only_the_cluster_file_counts() -> None:
    target = resolve(NodeSpec("gpu01", user="me", port=2222, identity_file="~/.ssh/id_lab"), no_ssh)
    assert (target.hostname, target.user, target.port) == ("gpu01", "me", 2222)
    assert target.identity_files == (f"{HOME}/.ssh/id_lab",)
    assert target.known_hosts_name == "[gpu01]:2222"
    assert not target.from_ssh


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "$(x)", "a b"])
def test_a_hostile_name_never_reaches_ssh(host: str) -> None:
    def run(arguments: Sequence[str]) -> str:
        raise AssertionError("ssh was run")

    with pytest.raises(ConfigError):
        resolve_host(host, run=run)


def test_lists_of_files_keep_blanks_inside_a_path() -> None:
    target = parse("userknownhostsfile /a/known hosts /b none\nidentityfile /k 1\nidentityfile none\n", "h")
    assert target.user_known_hosts == ("/a/known hosts", "/b")
    assert target.identity_files == ("/k 1",)


def test_a_host_key_alias_is_the_name_in_known_hosts() -> None:
    assert parse("hostname 10.0.0.1\nport 2222\nhostkeyalias lab\n", "h").known_hosts_name == "lab"
    assert parse("hostname GPU01\nport 22\n", "h").known_hosts_name == "gpu01"


@pytest.mark.parametrize(
    ("text", "jump"),
    [
        ("a", Jump("a")),
        ("me@a:22", Jump("a", "me", 22)),
        ("[::1]:22", Jump("::1", None, 22)),
        ("ssh://me@a:22", Jump("a", "me", 22)),
    ],
)
def test_jumps(text: str, jump: Jump) -> None:
    assert parse_jump(text) == jump


@settings(deadline=None)
@given(
    st.text(max_size=200)
    | st.lists(st.sampled_from(["port", "hostname", "user", "none", "x y", "9" * 9])).map("\n".join)
)
def test_any_output_of_ssh_is_a_target(text: str) -> None:
    assert parse(text, "h").port > 0
