"""Vendors: what to ask a node, how to read the answer, which variables its collectives need.

No I/O here. A vendor is one file, one row of ``core.registry.VENDORS`` and recorded fixtures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpuctl.core.hardware import Gpu, NodeFacts, Problem, Vendor
from gpuctl.core.plan import EnvVar
from gpuctl.core.registry import VENDORS


@dataclass(frozen=True)
class ToolQuery:
    """One command of the probe script: a section name, constant shell text and its own deadline."""

    section: str
    command: str
    timeout_s: int = 5


@dataclass(frozen=True)
class ToolAnswer:
    """What one section of the probe printed. ``exit_code`` 124 means its deadline passed."""

    stdout: str
    stderr: str = ""
    exit_code: int | None = 0


@dataclass(frozen=True)
class VendorReading:
    """What a vendor's parser made of its sections; ``gpus`` None means it could not tell."""

    gpus: tuple[Gpu, ...] | None
    driver_version: str | None = None
    runtime_version: str | None = None
    problems: tuple[Problem, ...] = ()


class VendorModule(Protocol):
    """The seam: pure functions of text and values."""

    vendor: Vendor
    queries: tuple[ToolQuery, ...]

    def read(self, answers: Mapping[str, ToolAnswer]) -> VendorReading:
        """Parse the sections; never raises, whatever they hold."""

    def comm_env(self, facts: NodeFacts, interface: str | None, gpus: Sequence[Gpu]) -> tuple[EnvVar, ...]:
        """Return the variables of this node's ranks (visibility mask, NCCL/RCCL/Gloo), each with why."""


def vendor_module(vendor: Vendor) -> VendorModule:
    """Load the implementation of ``vendor``."""
    module: VendorModule = VENDORS[vendor.value].load()
    return module


def node_env(
    vendor: Vendor, facts: NodeFacts, interface: str | None, gpus: Sequence[Gpu]
) -> tuple[EnvVar, ...]:
    """Return what the ranks of a node need for their collectives, each variable with its reason."""
    return vendor_module(vendor).comm_env(facts, interface, gpus)


def gloo_env(interface: str | None) -> tuple[EnvVar, ...]:
    """Return Gloo's interface: one exact name; unset, it takes what the host name resolves to."""
    if interface is None:
        return ()
    why = f"Gloo binds to {interface}, the way to the peers; unset it goes by the host name (127.0.1.1)"
    return (EnvVar("GLOO_SOCKET_IFNAME", interface, why, "gloo"),)


def nccl_interface(interface: str | None, source: str) -> tuple[EnvVar, ...]:
    """Return NCCL's and RCCL's interface in the exact form: a bare name is a prefix there."""
    if interface is None or interface == "lo":
        return ()
    why = f"bootstrap and sockets use exactly {interface}, the way to the peers"
    return (EnvVar("NCCL_SOCKET_IFNAME", f"={interface}", why, source),)


def cleared(name: str, kept: str, source: str) -> EnvVar:
    """Return the removal of a second visibility mask: masks that add up hide GPUs."""
    return EnvVar(name, "", f"only {kept} selects GPUs: two masks add up", source, is_unset=True)
