"""The Plan is a function of the cluster, the facts and the request."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import pytest

from gpuctl.core.cluster import Cluster, NodeSpec
from gpuctl.core.hardware import Gpu, Nic, NodeFacts, Software, Vendor
from gpuctl.core.plan import EnvVar, Plan
from gpuctl.core.training import TrainingConfig
from gpuctl.errors import CheckFailed, ConfigError, DoesNotFit, GpuctlError, UsageError
from gpuctl.services.plan import LaunchRequest, make_plan

NOW = datetime(2026, 1, 31, 12, 0, 0)
TRAIN = LaunchRequest(training=TrainingConfig(), strategy="zero2")


def facts(host: str, address: str, vendor: Vendor = Vendor.NVIDIA, gpus: int = 4) -> NodeFacts:
    """One healthy node with one interface."""
    return NodeFacts(
        host=host,
        vendor=vendor,
        machine_id=f"id-{host}",
        cpu_count=32,
        gpus=tuple(Gpu(i, vendor, uuid=f"GPU-{host}-{i}") for i in range(gpus)),
        nics=(Nic("eth0", (address,), is_up=True, prefix_lengths=(24,)),),
        ssh_address=address,
        software=Software(python="/usr/bin/python3", torch_version="2.13.0"),
    )


A, B = facts("a", "10.0.0.1"), facts("b", "10.0.0.2", gpus=2)
TWO = Cluster("lab", (NodeSpec("a"), NodeSpec("b")))


def plan(
    cluster: Cluster = TWO, known: tuple[NodeFacts, ...] = (A, B), request: LaunchRequest = TRAIN
) -> Plan:
    return make_plan(cluster, known, request, now=NOW, token="ab12")


def with_node(**changes: object) -> Cluster:
    """The cluster with its second node changed."""
    return replace(TWO, nodes=(TWO.nodes[0], replace(TWO.nodes[1], **changes)))  # type: ignore[arg-type]


def test_ranks_are_contiguous_by_node_and_follow_the_gpus() -> None:
    made = plan()
    assert [node.ranks for node in made.nodes] == [(0, 1, 2, 3), (4, 5)]
    assert [gpu.uuid for gpu in made.nodes[1].gpus] == ["GPU-b-0", "GPU-b-1"]
    assert (made.dims.dp, made.dims.zero, made.backend) == (6, 2, "nccl")


def test_the_run_id_is_name_time_token() -> None:
    assert plan().run_id == "zero2-20260131-120000-ab12"
    assert plan(request=replace(TRAIN, name="mine")).run_id == "mine-20260131-120000-ab12"


def test_a_name_that_is_no_file_name_is_refused() -> None:
    with pytest.raises(UsageError):
        plan(request=replace(TRAIN, name="../x"))


def test_the_same_input_gives_the_same_plan() -> None:
    assert plan() == plan()


def test_addresses_are_those_the_peers_reach() -> None:
    assert [(n.address, n.interface) for n in plan().nodes] == [("10.0.0.1", "eth0"), ("10.0.0.2", "eth0")]


def test_every_variable_says_why_and_by_whom() -> None:
    for node in plan().nodes:
        assert all(variable.why and variable.source for variable in node.env)
        assert {"NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"} <= {variable.name for variable in node.env}


def test_a_flag_wins_over_the_file_and_the_file_over_gpuctl() -> None:
    cluster = with_node(env={"OMP_NUM_THREADS": "7", "NCCL_DEBUG": "WARN"}, origin="cluster.yaml:5")
    flag = EnvVar("NCCL_DEBUG", "INFO", "asked for", "flag")
    env = {v.name: v for v in plan(cluster, request=replace(TRAIN, env=(flag,))).nodes[1].env}
    assert (env["OMP_NUM_THREADS"].value, env["NCCL_DEBUG"].value) == ("7", "INFO")
    assert env["NCCL_DEBUG"].source == "flag"


def test_two_vendors_in_one_communicator_are_refused() -> None:
    amd = facts("b", "10.0.0.2", Vendor.AMD)
    with pytest.raises(CheckFailed) as caught:
        plan(known=(A, amd))
    assert caught.value.cause == "nvidia on a; amd on b"
    assert caught.value.hint == "run on one kind: `--nodelist a`"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({"gpus": 3}, DoesNotFit), ({"gpus": (0, 5)}, ConfigError), ({"vendor": Vendor.AMD}, GpuctlError)],
)
def test_gpus_that_are_not_there_are_refused(changes: dict[str, object], kind: type[GpuctlError]) -> None:
    with pytest.raises(kind, match=r"b|vendor"):
        plan(with_node(**changes))


def test_chosen_gpus_are_used_in_the_order_they_were_written() -> None:
    cluster = replace(TWO, nodes=(replace(TWO.nodes[0], gpus=(3, 1)), TWO.nodes[1]))
    assert [gpu.index for gpu in plan(cluster).nodes[0].gpus] == [3, 1]


def test_a_sick_gpu_is_left_out_of_auto() -> None:
    assert A.gpus is not None
    sick = replace(A, gpus=(replace(A.gpus[0], is_healthy=False), *A.gpus[1:]))
    assert [gpu.index for gpu in plan(known=(sick, B)).nodes[0].gpus] == [1, 2, 3]


def test_more_ranks_than_gpus_do_not_fit() -> None:
    with pytest.raises(DoesNotFit, match="4 ranks asked for, 2 GPUs there"):
        plan(request=replace(TRAIN, nproc_per_node=4))


def test_cpu_nodes_run_gloo_with_as_many_ranks_as_asked() -> None:
    known = (facts("a", "10.0.0.1", Vendor.CPU, 0), facts("b", "10.0.0.2", Vendor.CPU, 0))
    made = plan(known=known, request=replace(TRAIN, nproc_per_node=2))
    assert (made.backend, made.world_size, made.nodes[0].gpus) == ("gloo", 4, ())


def test_own_scripts_have_a_name_from_their_file_and_no_strategy() -> None:
    made = plan(request=LaunchRequest(kind="script", argv=("src/my train.py", "--lr", "1")))
    assert (made.name, made.strategy, made.program.argv[1:]) == ("my-train", None, ("--lr", "1"))


def test_unequal_nodes_are_warned_of() -> None:
    assert any("different numbers of ranks" in warning for warning in plan().warnings)


@pytest.mark.parametrize(
    ("fields", "strategy"),
    [
        ({"strategy": None}, "ddp"),
        ({"strategy": None, "zero": 1}, "zero1"),
        ({"strategy": "ZeRO-2"}, "zero2"),
    ],
)
def test_a_strategy_has_one_spelling_in_the_plan(fields: dict[str, object], strategy: str) -> None:
    made = plan(request=replace(TRAIN, **fields))  # type: ignore[arg-type]
    assert (made.strategy, made.program.config["strategy"], made.name) == (strategy,) * 3
