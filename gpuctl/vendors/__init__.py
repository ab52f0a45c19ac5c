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
