"""From a cluster, what its nodes are, and what the user asked for, to one frozen Plan.

Pure once the facts are there: ``plan``, ``launch --dry-run`` and ``launch`` share this function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from gpuctl.core.cluster import Cluster, NodeSpec
from gpuctl.core.codec import to_json
from gpuctl.core.hardware import Gpu, NodeFacts, Vendor
from gpuctl.core.network import choose_address
from gpuctl.core.nodeset import fold
from gpuctl.core.parallel import STRATEGIES, ParallelDims, resolve_dims
from gpuctl.core.plan import EnvVar, NodePlan, Plan, PlannedGpu, Program
from gpuctl.core.run import make_run_id
from gpuctl.core.training import TrainingConfig
from gpuctl.errors import CheckFailed, ConfigError, DoesNotFit, UsageError
from gpuctl.services.bundle import node_bundle
from gpuctl.vendors import node_env

TRAINER_MODULE = "gpuctl.trainer.loop"
#: What the fork server imports once a node; importing opens no device.
TRAINER_PRELOAD = ("torch", "torch.distributed", "numpy", "safetensors.torch")
#: The compiler's modules cost 3 s in every rank unless they are imported before the fork.
COMPILE_PRELOAD = ("torch._dynamo", "torch._inductor.compile_fx")


@dataclass(frozen=True)
class LaunchRequest:
    """What the user asked for, flags already merged over files."""

    kind: Literal["train", "bench", "script", "command"] = "train"
    argv: tuple[str, ...] = ()
    name: str | None = None
    strategy: str | None = None
    tp: int | None = None
    pp: int | None = None
    zero: int | None = None
    training: TrainingConfig | None = None
    nproc_per_node: int | None = None
    env: tuple[EnvVar, ...] = ()
    """``-e`` and ``--env-file``, in the order they win."""
    master_addr: str | None = None
    master_port: int | None = None
    exit_grace_s: float | None = None
    max_restarts: int = 0
    sync_sha256: str | None = None


def make_plan(
    cluster: Cluster, facts: Sequence[NodeFacts], request: LaunchRequest, *, now: datetime, token: str
) -> Plan:
    """Return the Plan; ``facts`` in the order of ``cluster.nodes``, ``token`` four hex digits.

    Raises UsageError, ConfigError for what was asked wrongly, CheckFailed for nodes that cannot run
    together, DoesNotFit for an impossible layout.
    """
    if not cluster.nodes:
        raise UsageError("no node is left to run on")
    if request.kind == "train":
        request = replace(request, strategy=_strategy(request))
    vendors = _vendors(cluster, facts)
    gpus = [_devices(spec, f, v, request) for spec, f, v in zip(cluster.nodes, facts, vendors, strict=True)]
    counts = [len(devices) for devices in gpus]
    dims = _dims(request, sum(counts))
    nodes = []
    first = 0
    for i, spec in enumerate(cluster.nodes):
        ranks = tuple(range(first, first + counts[i]))
        first += counts[i]
        nodes.append(_node(i, spec, facts, vendors[i], gpus[i], ranks, request))
    name = request.name or _default_name(request)
    try:
        run_id = make_run_id(name, now, token)
    except ValueError as exc:
        raise UsageError(str(exc)) from exc
    return Plan(
        run_id=run_id,
        name=name,
        cluster=cluster.name,
        program=_program(request, dims, vendors[0]),
        dims=dims,
        nodes=tuple(nodes),
        backend=backend_of(vendors[0]),
        strategy=request.strategy,
        ports=cluster.ports,
        failure=cluster.failure,
        master_addr=request.master_addr,
        master_port=request.master_port,
        max_restarts=request.max_restarts,
        exit_grace_s=request.exit_grace_s,
        bundle_sha256=node_bundle().sha256,
        sync_sha256=request.sync_sha256,
        warnings=_warnings(cluster, facts, counts),
    )


def _vendors(cluster: Cluster, facts: Sequence[NodeFacts]) -> list[Vendor]:
    """Return each node's vendor; one communicator cannot mix NVIDIA, AMD and CPU ranks."""
    found = [_vendor(spec, fact) for spec, fact in zip(cluster.nodes, facts, strict=True)]
    by_vendor: dict[Vendor, list[str]] = {}
    for spec, vendor in zip(cluster.nodes, found, strict=True):
        by_vendor.setdefault(vendor, []).append(spec.host)
    if len(by_vendor) > 1:
        groups = [f"{v.value} on {fold(hosts)}" for v, hosts in by_vendor.items()]
        largest = max(by_vendor.values(), key=len)
        raise CheckFailed(
            "one run cannot use GPUs of two vendors: NCCL, RCCL and Gloo do not talk to each other",
            cause="; ".join(groups),
            hint=f"run on one kind: `--nodelist {fold(largest)}`",
        )
    return found


def _vendor(spec: NodeSpec, fact: NodeFacts) -> Vendor:
    if spec.vendor != "auto":
        return spec.vendor
    if fact.vendor is None:
        raise CheckFailed(
            f"{spec.host}: whether it has GPUs could not be told",
            cause="; ".join(problem.message for problem in fact.problems) or None,
            hint="set `vendor:` for this node if it shall run anyway",
        )
    return fact.vendor


def _devices(
    spec: NodeSpec, facts: NodeFacts, vendor: Vendor, request: LaunchRequest
) -> tuple[PlannedGpu | None, ...]:
    """Return one entry a rank: the device it gets, None on a CPU node."""
    if vendor is Vendor.CPU:
        count = request.nproc_per_node or _cpu_count(spec)
        return (None,) * count
    known = {gpu.index: gpu for gpu in facts.gpus or () if gpu.vendor is vendor}
    if not known:
        raise CheckFailed(
            f"{spec.host}: no {vendor.value} GPU was found", hint="`gpuctl status` shows what was"
        )
    wanted = _wanted_indices(spec, known)
    if request.nproc_per_node is not None:
        if request.nproc_per_node > len(wanted):
            raise DoesNotFit(
                f"{spec.host}: {request.nproc_per_node} ranks asked for, {len(wanted)} GPUs there"
            )
        wanted = wanted[: request.nproc_per_node]
    return tuple(PlannedGpu(i, known[i].uuid, known[i].name) for i in wanted)


def _cpu_count(spec: NodeSpec) -> int:
    if spec.gpus == "auto":
        return 1
    return spec.gpus if isinstance(spec.gpus, int) else len(spec.gpus)


def _wanted_indices(spec: NodeSpec, known: Mapping[int, Gpu]) -> list[int]:
    healthy = [i for i in sorted(known) if known[i].is_healthy is not False]
    if spec.gpus == "auto":
        usable = [i for i in healthy if not known[i].is_integrated] or healthy
        if not usable:
            raise CheckFailed(f"{spec.host}: every GPU is sick", cause=known[min(known)].problem)
        return usable
    if isinstance(spec.gpus, int):
        if spec.gpus > len(healthy):
            raise DoesNotFit(
                f"{spec.host}: {spec.gpus} GPUs asked for, {len(healthy)} usable ({spec.origin})"
            )
        return healthy[: spec.gpus]
    missing = [i for i in spec.gpus if i not in known]
    if missing:
        raise ConfigError(f"{spec.origin}: {spec.host} has no GPU {missing[0]}; it has {sorted(known)}")
    return list(spec.gpus)


def _strategy(request: LaunchRequest) -> str:
    """Return the strategy as the table spells it: ``ZeRO-2`` is zero2, ``--zero 2`` alone is too."""
    if request.strategy is None:
        return f"zero{request.zero}" if request.zero else "ddp"
    plain = request.strategy.replace("-", "").replace("_", "").lower()
    return plain if plain in STRATEGIES else request.strategy


def _dims(request: LaunchRequest, world_size: int) -> ParallelDims:
    if request.kind != "train":
        return ParallelDims(dp=world_size)
    assert request.training is not None and request.strategy is not None
    return resolve_dims(
        request.strategy,
        world_size,
        tp=request.tp,
        pp=request.pp,
        zero=request.zero,
        model=request.training.model,
    )


def _node(
    node_rank: int,
    spec: NodeSpec,
    facts: Sequence[NodeFacts],
    vendor: Vendor,
    devices: tuple[PlannedGpu | None, ...],
    ranks: tuple[int, ...],
    request: LaunchRequest,
) -> NodePlan:
    mine = facts[node_rank]
    choice = choose_address(spec, mine, facts)
    gpus = tuple(device for device in devices if device is not None)
    chosen = [gpu for gpu in mine.gpus or () if gpu.index in {g.index for g in gpus} and gpu.vendor is vendor]
    env = [
        *node_env(vendor, mine, choice.interface, chosen),
        _omp_threads(mine, len(ranks)),
        *_cluster_env(spec),
        *request.env,
    ]
    python = (mine.software.python if mine.software else None) or spec.python or "python3"
    return NodePlan(
        node_rank=node_rank,
        host=spec.host,
        address=choice.address,
        interface=choice.interface,
        transport=spec.transport,
        vendor=vendor,
        gpus=gpus,
        ranks=ranks,
        python=python,
        activate=spec.activate,
        workdir=spec.workdir,
        state_dir=spec.state_dir,
        env=last_wins(env),
        env_from=spec.env_from,
        machine_id=mine.machine_id,
        address_why=choice.why,
    )


def backend_of(vendor: Vendor) -> Literal["nccl", "gloo"]:
    """Return torch's backend: RCCL is ``nccl`` too."""
    return "gloo" if vendor is Vendor.CPU else "nccl"


def last_wins(variables: Sequence[EnvVar]) -> tuple[EnvVar, ...]:
    """Return one entry a name, the last one, in the order of first appearance."""
    by_name: dict[str, EnvVar] = {}
    for variable in variables:
        by_name[variable.name] = variable
    return tuple(by_name.values())


def _omp_threads(facts: NodeFacts, num_ranks: int) -> EnvVar:
    threads = max(1, (facts.cpu_count or num_ranks) // max(1, num_ranks))
    why = f"{facts.cpu_count or 'unknown'} CPUs shared by {num_ranks} ranks; unset, every rank takes them all"
    return EnvVar("OMP_NUM_THREADS", str(threads), why, "gpuctl")


def _cluster_env(spec: NodeSpec) -> list[EnvVar]:
    return [
        EnvVar(name, value, "set in the cluster file", spec.env_origin.get(name, spec.origin))
        for name, value in spec.env.items()
    ]


def _program(request: LaunchRequest, dims: ParallelDims, vendor: Vendor) -> Program:
    if request.kind == "train":
        assert request.training is not None
        preload = TRAINER_PRELOAD + (COMPILE_PRELOAD if request.training.compile else ())
        config = {
            "training": to_json(request.training),
            "dims": to_json(dims),
            "strategy": request.strategy,
            "backend": backend_of(vendor),
        }
        return Program("train", (), TRAINER_MODULE, preload, config)
    return Program(request.kind, request.argv)


def _default_name(request: LaunchRequest) -> str:
    if request.kind == "train":
        return request.strategy or "ddp"
    if request.kind == "bench":
        return "bench"
    stem = request.argv[0].rsplit("/", 1)[-1].removesuffix(".py")
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in stem)
    return kept.lstrip("._-")[:64] or "run"


def _warnings(cluster: Cluster, facts: Sequence[NodeFacts], counts: Sequence[int]) -> tuple[str, ...]:
    warnings = []
    if len(set(counts)) > 1:
        shown = ", ".join(f"{spec.host}: {n}" for spec, n in zip(cluster.nodes, counts, strict=True))
        warnings.append(f"the nodes have different numbers of ranks ({shown}): the smallest sets the pace")
    for fact in facts:
        warnings += [f"{fact.host}: {p.message}" for p in fact.problems]
    return tuple(warnings)


def with_data(plan: Plan, sha256: str) -> Plan:
    """Return ``plan`` with the digest of the data that launch pushes."""
    config = dict(plan.program.config)
    training = dict(config["training"])
    training["data"] = {**training["data"], "digest": sha256}
    return replace(plan, program=replace(plan.program, config={**config, "training": training}))
