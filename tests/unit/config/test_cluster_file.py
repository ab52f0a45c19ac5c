"""cluster.yaml: every key, every error with file:line and a hint, and any text at all."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuctl.config.cluster import load_cluster, select_nodes
from gpuctl.core.cluster import Cluster, Failure, PortRange
from gpuctl.core.hardware import Vendor
from gpuctl.errors import ConfigError

EVERY_KEY = """\
version: 1
name: lab
ssh:
  host_keys: accept-new
defaults:
  user: ubuntu
  python: ~/venv/bin/python
  activate: . ~/.profile
  workdir: ~/work
  state_dir: /var/tmp
  env: {NCCL_DEBUG: WARN, A: 1.10, B: 0022, C: true, D: no, E: ''}
  env_from: [HF_TOKEN]
nodes:
  - host: gpu[01-04]
    gpus: auto
    vendor: auto
  - host: mi300-1
    address: 10.0.3.7
    port: 2222
    user: me
    identity_file: ~/.ssh/id_lab
    transport: openssh
    gpus: [0, 2, 3]
    vendor: amd
    env:
      NCCL_DEBUG: INFO
    env_from: [WANDB_MODE]
network: {ports: 29400-29500}
failure: {suspect_s: 1, dead_s: 5, grace_s: 0.5}
"""


def load(text: str, name: str = "c.yaml") -> Cluster:
    return load_cluster(Path(name), text=text, environ={"HOME": "/home/me"})


def error_of(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(text)
    return caught.value


def test_every_key_of_the_design_arrives() -> None:
    cluster = load(EVERY_KEY)
    assert (cluster.name, cluster.host_keys, cluster.origin) == ("lab", "accept-new", "c.yaml")
    assert cluster.ports == PortRange(29400, 29500)
    assert cluster.failure == Failure(1.0, 5.0, 0.5)
    node = cluster.nodes[4]
    assert (node.host, node.address, node.port, node.user) == ("mi300-1", "10.0.3.7", 2222, "me")
    assert (node.transport, node.gpus, node.vendor) == ("openssh", (0, 2, 3), Vendor.AMD)
    assert node.identity_file == "/home/me/.ssh/id_lab"


def test_node_sets_are_expanded_and_defaults_merged_key_by_key() -> None:
    cluster = load(EVERY_KEY)
    assert [node.host for node in cluster.nodes] == ["gpu01", "gpu02", "gpu03", "gpu04", "mi300-1"]
    first, last = cluster.nodes[0], cluster.nodes[-1]
    assert (first.user, last.user) == ("ubuntu", "me")
    assert last.env["NCCL_DEBUG"] == "INFO"
    assert last.env["A"] == "1.10"
    assert last.env_from == ("HF_TOKEN", "WANDB_MODE")


def test_the_nodes_home_is_left_to_the_node() -> None:
    node = load(EVERY_KEY).nodes[0]
    assert (node.python, node.workdir, node.state_dir) == ("~/venv/bin/python", "~/work", "/var/tmp")


def test_env_values_arrive_as_they_are_written() -> None:
    assert load(EVERY_KEY).nodes[0].env == {
        "NCCL_DEBUG": "WARN", "A": "1.10", "B": "0022", "C": "true", "D": "no", "E": "",
    }  # fmt: skip


def test_nodes_and_variables_know_where_they_were_written() -> None:
    node = load(EVERY_KEY).nodes[4]
    assert node.origin == "c.yaml:17"
    assert (node.env_origin["NCCL_DEBUG"], node.env_origin["A"]) == ("c.yaml:26", "c.yaml:11")


def test_a_relative_key_file_is_relative_to_the_cluster_file() -> None:
    cluster = load("nodes:\n- host: a\n  identity_file: keys/id\n", "lab/c.yaml")
    assert cluster.nodes[0].identity_file == "lab/keys/id"


def test_the_least_file_takes_the_defaults() -> None:
    cluster = load("nodes:\n- host: a\n")
    node = cluster.nodes[0]
    assert (cluster.name, cluster.failure, cluster.ports) == ("cluster", Failure(), None)
    assert (node.transport, node.gpus, node.vendor, node.user) == ("ssh", "auto", "auto", None)


NODE = "nodes:\n- host: a\n"
ERRORS = [
    ("nodez:\n- host: a\n", "1: unknown key 'nodez'", "did you mean 'nodes'?"),
    ("version: 1\n\nhosts:\n- host: a\n", "3: unknown key 'hosts'", "did you mean 'nodes'?"),
    (NODE + "  usr: me\n", "3: unknown key 'usr'", "did you mean 'user'?"),
    (NODE + "  num_gpus: 8\n", "3: unknown key 'num_gpus'", "did you mean 'gpus'?"),
    (NODE + "user: me\n", "3: unknown key 'user'", "'user' belongs under `defaults:`"),
    (NODE + "  proxy_command: x\n", "3: unknown key 'proxy_command'",
     "write it into ~/.ssh/config: gpuctl connects as `ssh HOST` does"),
    (NODE + "ssh: {hostkeys: strict}\n", "3: unknown key 'hostkeys'", "did you mean 'host_keys'?"),
    (NODE + "failure: {wibble: 3}\n", "3: unknown key 'wibble'", "known here: suspect_s, dead_s, grace_s"),
    ("defaults: {host: a}\n" + NODE, "1: unknown key 'host'", "'host' belongs under `nodes:`"),
    ("version: 1\n", "1: nodes is missing", "add `- host: gpu[01-04]`"),
    ("nodes:\n- vendor: cpu\n", "2: host is missing", "add `- host: gpu[01-04]`"),
    ("nodes: []\n", "1: nodes is empty", "add `- host: gpu01`"),
    ("nodes:\n- a\n", "2: nodes: keys and values are expected, not 'a'", "write `- host: gpu[01-04]`"),
    ("nodes: {host: a}\n", "1: nodes: a list is expected, not keys and values", "write `- host: gpu[01-04]`"),
    ("version: 2\n" + NODE, "1: version 2 is not known", "write `version: 1`"),
    ("name: a/b\n" + NODE, "1: name: 'a/b': a name is 1 to 64 of the characters A-Z a-z 0-9 . _ -",
     "write `name: lab`"),
    (NODE + "  port: 0022\n", "3: port: a whole number is expected, not '0022'", "write `port: 2222`"),
    (NODE + "  port: 22:22\n", "3: port: a whole number is expected, not '22:22'", "write `port: 2222`"),
    (NODE + "  port: 2_2\n", "3: port: a whole number is expected, not '2_2'", "write `port: 2222`"),
    (NODE + "  port: 22.0\n", "3: port: a whole number is expected, not 22.0", "write `port: 2222`"),
    (NODE + "  port: 70000\n", "3: port: 70000: a port is 1 to 65535", "write `port: 2222`"),
    (NODE + "  vendor: no\n", "3: vendor: 'no' is not one of auto, nvidia, amd, cpu", "write `vendor: auto`"),
    (NODE + "  vendor: nvida\n", "3: vendor: 'nvida' is not one of auto, nvidia, amd, cpu",
     "did you mean 'nvidia'?"),
    (NODE + "  user: 12\n", "3: user: text is expected, not 12", "quote it: '12'"),
    (NODE + "  user: yes please\n",
     "3: user: 'yes please': a login name is letters, digits, '_', '.', '@' and '-', without a leading '-'",
     "write `user: ubuntu`"),
    (NODE + "  user: -oProxyCommand=x\n",
     "3: user: '-oProxyCommand=x': a login name is letters, digits, '_', '.', '@' and '-', "
     "without a leading '-'", "write `user: ubuntu`"),
    (NODE + "  user:\n", "3: user has no value",
     "give it one or remove the line; a lone ~ is YAML's word for nothing"),
    (NODE + "  gpus: 0\n", "3: gpus: 0: auto, a count (1 to 1024) or a list of indices is expected",
     "write `gpus: 8`"),
    (NODE + "  gpus: true\n", "3: gpus: True: auto, a count (1 to 1024) or a list of indices is expected",
     "write `gpus: 8`"),
    (NODE + "  gpus: [0, 0]\n", "3: gpus: a GPU is named twice", "write `gpus: 8`"),
    (NODE + "  workdir: work\n", "3: workdir: 'work': a path on the node starts with / or ~/",
     "write `workdir: ~/work`"),
    (NODE + "  state_dir: /x/$USER\n",
     "3: state_dir: '/x/$USER': variables are not replaced, only a leading ~ is", "write the path out"),
    (NODE + "  activate: \"a\\nb\"\n",
     "3: activate: 'a\\nb': it has to be one line without control characters",
     "write `activate: . ~/.profile`"),
    (NODE + "  env: {RANK: 1}\n", "3: env.RANK: RANK is set by gpuctl, for every rank its own",
     "remove the line"),
    (NODE + "  env: {HF_TOKEN: hf_x}\n",
     "3: env.HF_TOKEN: HF_TOKEN looks like a secret, and a cluster file is no place for one",
     "export it where you run gpuctl and write `env_from: [HF_TOKEN]`"),
    (NODE + "  env: {A: }\n", "3: env.A has no value",
     "give it one or remove the line; a lone ~ is YAML's word for nothing"),
    (NODE + "  env_from: HF_TOKEN\n", "3: env_from: a list is expected, not 'HF_TOKEN'",
     "write `env_from: [HF_TOKEN]`"),
    (NODE + "network: {ports: 30-20}\n",
     "3: network.ports: '30-20': a range of ports goes up and has at least two",
     "write `ports: 29400-29500`"),
    (NODE + "failure: {dead_s: 2}\n", "3: suspect_s (3) is not below dead_s (2)",
     "the defaults are suspect_s: 3 and dead_s: 15"),
    (NODE + "failure: {grace_s: -1}\n", "3: failure.grace_s: -1: a number of seconds is expected, 0 to 86400",
     "write `grace_s: 30`"),
    ("nodes:\n- host: a[1-2]\n  address: 10.0.0.1\n", "2: one address for 2 hosts (a[1-2])",
     "write these hosts one by one, or leave address out: it is found by route"),
    ("nodes:\n- host: a\n- host: b[1-3]\n- host: b2\n", "4: host b2 is a node already at c.yaml:3",
     "remove one; two CPU nodes on one machine need `vendor: cpu` and a state_dir each"),
    ("nodes:\n- host: n[1-9999]\n", "2: node set 'n[1-9999]' stands for more than 4,096 hosts",
     "check the range for a slip of the keyboard"),
    ("nodes:\n- host: n[1-4096]\n- host: x\n", "3: more than 4,096 nodes", "split the cluster file"),
    ("nodes:\n- host: 12\n", "2: host: text is expected, not 12", "quote it: '12'"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message", "hint"), ERRORS, ids=[message for _, message, _ in ERRORS])
def test_errors_name_line_key_and_a_way_out(text: str, message: str, hint: str | None) -> None:
    error = error_of(text)
    assert error.message == f"c.yaml:{message}"
    assert hint is None or error.hint == hint


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "$(x)", "a b", "a;b", "'`x`'", "'../x'", "a\\b", "a@b"])
def test_hostile_hosts_are_refused_with_their_line(host: str) -> None:
    error = error_of(f"nodes:\n- host: ok\n- host: {host}\n")
    assert error.message.startswith("c.yaml:3: ")
    assert "is not a host name" in error.message


@pytest.mark.parametrize("address", ["10.0.0.1; rm", "-x", "$(x)", "10.0.0.0/8"])
def test_hostile_addresses_are_refused(address: str) -> None:
    assert error_of(f"nodes:\n- host: a\n  address: {address}\n").message.startswith("c.yaml:3: address: ")


def test_all_wrong_lines_are_named_and_the_first_explained() -> None:
    error = error_of(NODE + "  port: x\n  user: -x\n  foo: 1\n")
    assert error.message.startswith("c.yaml:3: port: ")
    assert error.cause == "lines 4, 5 are wrong too"


def test_values_of_env_are_never_repeated() -> None:
    error = error_of(NODE + "  env: {A: [s3cret], B: {x: s3cret}, 'a b': s3cret}\n")
    assert "s3cret" not in f"{error.message} {error.cause} {error.hint}"


def test_one_host_may_be_two_cpu_nodes_with_a_state_dir_each() -> None:
    text = "nodes:\n- {host: a, vendor: cpu, state_dir: /x}\n- {host: a, vendor: cpu, state_dir: /y}\n"
    assert [node.state_dir for node in load(text).nodes] == ["/x", "/y"]
    assert "already at c.yaml:2" in error_of(text.replace("/y", "/x")).message
    assert "already at c.yaml:2" in error_of(text.replace("vendor: cpu", "vendor: amd")).message


def test_one_host_may_be_two_nodes_on_two_ports() -> None:
    assert len(load("nodes:\n- {host: a, port: 22}\n- {host: a, port: 23}\n").nodes) == 2


@pytest.mark.parametrize(
    ("text", "cause"), [("", "it is empty"), ("- a\n", "it is a list, not keys and values")]
)
def test_what_is_no_cluster_file_says_so(text: str, cause: str) -> None:
    assert (error_of(text).message, error_of(text).cause) == ("c.yaml: not a cluster file", cause)


def test_the_file_is_the_flag_then_the_variable_then_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("flag", "variable"):
        (tmp_path / f"{name}.yaml").write_text(f"name: {name}\n{NODE}")
    (tmp_path / "cluster.yaml").write_text(f"name: folder\n{NODE}")
    environ = {"GPUCTL_CLUSTER": "variable.yaml"}
    assert load_cluster(Path("flag.yaml"), environ=environ).name == "flag"
    assert load_cluster(None, environ=environ).name == "variable"
    assert load_cluster(None, environ={}).name == "folder"


def test_no_file_at_all_hints_at_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_cluster(None, environ={})
    assert (
        caught.value.message
        == "there is no cluster file: neither -f, nor $GPUCTL_CLUSTER, nor ./cluster.yaml"
    )
    assert caught.value.hint == "write one: `gpuctl init --nodelist gpu[01-04]`"


def test_a_dash_reads_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(NODE.encode())))
    assert load_cluster(Path("-"), environ={}).nodes[0].origin == "<stdin>:2"


@pytest.mark.parametrize("path", ["missing.yaml", "."])
def test_a_file_that_cannot_be_read_is_a_config_error(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_cluster(tmp_path / path, environ={})
    assert caught.value.message.startswith("cannot read ")


def test_a_huge_file_is_not_read_whole() -> None:
    with pytest.raises(ConfigError) as caught:
        load_cluster(Path("/dev/zero"), environ={})
    assert caught.value.message == "/dev/zero has more than 1,000,000 bytes"


def hosts_of(cluster: Cluster) -> list[str]:
    return [node.host for node in cluster.nodes]


def test_selection_keeps_file_order() -> None:
    cluster = load(EVERY_KEY)
    assert hosts_of(select_nodes(cluster)) == hosts_of(cluster)
    assert hosts_of(select_nodes(cluster, "mi300-1,gpu[02-03]")) == ["gpu02", "gpu03", "mi300-1"]
    assert hosts_of(select_nodes(cluster, exclude="gpu[01-03]")) == ["gpu04", "mi300-1"]
    assert hosts_of(select_nodes(cluster, "gpu[01-04]", "gpu02", 2)) == ["gpu01", "gpu03"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpu[03-06]", None, None), "--nodelist: gpu[05-06] is not in c.yaml"),
        ((None, "gpu9", None), "--exclude: gpu9 is not in c.yaml"),
        ((None, "gpu[01-04],mi300-1", None), "no node is left"),
        ((None, None, 6), "--nnodes 6: 5 can be had (gpu[01-04],mi300-1)"),
        ((None, None, 0), "--nnodes 0: 5 can be had (gpu[01-04],mi300-1)"),
        (("gpu[", None, None), "--nodelist: node set 'gpu[': brackets do not match"),
    ],
)
def test_a_selection_that_cannot_be_says_why(arguments: tuple[str, str, int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        select_nodes(load(EVERY_KEY), *arguments)
    assert caught.value.message == message
    assert caught.value.hint


WORDS = (
    *EVERY_KEY.split(),
    "\n",
    "\n  ",
    "\n- ",
    ": ",
    "{",
    "}",
    "[",
    "]",
    "no",
    "0022",
    "~",
    "<<",
    "&a",
    "*a",
    "\t",
)


@settings(deadline=None)
@given(st.text(max_size=150) | st.lists(st.sampled_from(WORDS), max_size=25).map(" ".join))
def test_any_text_is_a_cluster_or_a_config_error_within_a_second(text: str) -> None:
    assert_cluster_or_error(text)


@settings(deadline=None)
@given(st.data())
def test_any_change_of_a_good_file_is_a_cluster_or_a_config_error(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(EVERY_KEY)))
    end = data.draw(st.integers(start, min(len(EVERY_KEY), start + 12)))
    put = data.draw(st.sampled_from(WORDS) | st.text(max_size=4))
    assert_cluster_or_error(EVERY_KEY[:start] + put + EVERY_KEY[end:])


def assert_cluster_or_error(text: str) -> None:
    started = time.monotonic()
    try:
        assert load(text).nodes
    except ConfigError as exc:
        assert exc.message.startswith("c.yaml")
        assert exc.message.isprintable()
        assert exc.hint
    assert time.monotonic() - started < 1


@pytest.mark.parametrize(
    "text",
    [
        "nodes: [" + "1," * 490_000 + "1]",
        "nodes:\n" + "- host: a\n" * 99_000,
        "".join(f"k{n}: 1\n" for n in range(90_000)),
        "nodes:\n- host: a" + "[1-2]" * 150_000,
        "nodes: " + "[" * 900_000,
        'a: "' + '\\"' * 400_000,
    ],
    ids=["numbers", "nodes", "keys", "brackets of one host", "brackets", "quotes"],
)
def test_a_megabyte_of_nonsense_is_refused_in_seconds(text: str) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError):
        load(text)
    assert time.monotonic() - started < 5  # 1 s on an idle core; the cores here are shared


def test_four_thousand_nodes_written_out_load() -> None:
    text = "nodes:\n" + "".join(f"- host: gpu{n:04d}\n  gpus: 8\n  env: {{A: 1}}\n" for n in range(4096))
    assert len(load(text).nodes) == 4096
