"""A cluster as the rest of gpuctl sees it: resolved nodes, no YAML, no pydantic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gpuctl.core.hardware import Vendor

TransportName = Literal["ssh", "openssh", "local"]


@dataclass(frozen=True)
class Failure:
    """The failure detector's and the stop's time limits, in seconds."""

    suspect_s: float = 3.0
    dead_s: float = 15.0
    grace_s: float = 30.0


@dataclass(frozen=True)
class PortRange:
    """An inclusive range of TCP ports for gpuctl's and the store's sockets."""

    first: int
    last: int


@dataclass(frozen=True)
class NodeSpec:
    """One node of the cluster file, node sets expanded and defaults merged."""

    host: str
    address: str | None = None
    """Where peers reach it; None: by route."""
    port: int | None = None
    user: str | None = None
    identity_file: str | None = None
    transport: TransportName = "ssh"
    gpus: Literal["auto"] | int | tuple[int, ...] = "auto"
    vendor: Literal["auto"] | Vendor = "auto"
    python: str | None = None
    activate: str | None = None
    workdir: str | None = None
    state_dir: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    env_from: tuple[str, ...] = ()
    origin: str = ""
    """``cluster.yaml:12``: where the node was written, for messages."""
    env_origin: dict[str, str] = field(default_factory=dict)
    """Where each variable of ``env`` was written: the source of its EnvVar."""


@dataclass(frozen=True)
class Cluster:
    """The nodes of one cluster file in file order: node_rank is the position."""

    name: str
    nodes: tuple[NodeSpec, ...]
    host_keys: Literal["strict", "accept-new"] = "strict"
    ports: PortRange | None = None
    failure: Failure = Failure()
    origin: str = ""


def labels(hosts: Sequence[str]) -> list[str]:
    """Return a unique name for each host of a list: two logical nodes may share one machine."""
    return [host if hosts.count(host) == 1 else f"{host}#{i}" for i, host in enumerate(hosts)]
