"""The Plan: who is which rank, at which address, with which environment, and why.

``plan`` prints it, ``launch --dry-run`` prints it, ``launch`` ships and executes that same object.
It holds no port, no generation and no restart count (they travel in ``start``) and no value of
``env_from`` (those travel in their own frame).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from gpuctl.core.cluster import Failure, PortRange, TransportName
from gpuctl.core.hardware import Vendor
from gpuctl.core.parallel import ParallelDims

ProgramKind = Literal["train", "bench", "script", "command"]


@dataclass(frozen=True)
class EnvVar:
    """One variable for the ranks of a node, with the reason it is set and who set it."""

    name: str
    value: str
    why: str
    source: str
    """``flag``, ``env-file``, ``cluster.yaml:LINE``, ``nvidia``, ``amd``, ``gloo``, ``gpuctl``."""
    is_unset: bool = False
    """The variable is removed from the ranks' environment instead of set (visibility masks)."""


@dataclass(frozen=True)
class Program:
    """What the ranks run.

    Bundled programs (train, bench) are forked from the fork server: ``module`` has a function
    ``run(config, worker)``. ``script`` is run as ``python argv...``, ``command`` as ``argv``.
    """

    kind: ProgramKind
    argv: tuple[str, ...] = ()
    module: str | None = None
    preload: tuple[str, ...] = ()
    """Modules the fork server imports once before it forks."""
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def is_bundled(self) -> bool:
        return self.kind in ("train", "bench")


@dataclass(frozen=True)
class PlannedGpu:
    """A device given to local rank ``local_rank`` of its node; locked by uuid while in use."""

    index: int
    uuid: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class NodePlan:
    """One node's part. ``ranks`` are contiguous; local_rank is the position in it."""

    node_rank: int
    host: str
    address: str
    interface: str | None
    transport: TransportName
    vendor: Vendor
    gpus: tuple[PlannedGpu, ...]
    ranks: tuple[int, ...]
    python: str
    activate: str | None = None
    workdir: str | None = None
    state_dir: str | None = None
    env: tuple[EnvVar, ...] = ()
    env_from: tuple[str, ...] = ()
    machine_id: str | None = None
    address_why: str = ""


@dataclass(frozen=True)
class Plan:
    """A frozen launch. See the module docstring for what is left out on purpose."""

    run_id: str
    name: str
    cluster: str
    program: Program
    dims: ParallelDims
    nodes: tuple[NodePlan, ...]
    backend: Literal["nccl", "gloo"]
    lead: int = 0
    """node_rank of the lead agent: rank 0's node."""
    strategy: str | None = None
    ports: PortRange | None = None
    failure: Failure = Failure()
    master_addr: str | None = None
    """``--master-addr``; None: the lead's address."""
    master_port: int | None = None
    """``--master-port``; None: chosen by the lead for each generation."""
    max_restarts: int = 0
    min_nodes: int | None = None
    exit_grace_s: float | None = None
    """User scripts: once a rank exited 0, how long the others may go on; None: for ever."""
    bundle_sha256: str | None = None
    sync_sha256: str | None = None
    memory: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    schema_version: int = 1

    @property
    def world_size(self) -> int:
        return sum(len(node.ranks) for node in self.nodes)

    @property
    def lead_node(self) -> NodePlan:
        return self.nodes[self.lead]

    def node_of(self, rank: int) -> NodePlan:
        """Return the node that holds ``rank``."""
        return next(node for node in self.nodes if rank in node.ranks)
