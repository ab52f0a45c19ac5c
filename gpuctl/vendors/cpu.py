"""Nodes whose ranks compute on the CPU: Gloo, and every GPU hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpuctl.core.hardware import Gpu, NodeFacts, Vendor
from gpuctl.core.plan import EnvVar
from gpuctl.vendors import ToolAnswer, ToolQuery, VendorReading, gloo_env


class _Cpu:
    vendor = Vendor.CPU
    queries: tuple[ToolQuery, ...] = ()

    def read(self, answers: Mapping[str, ToolAnswer]) -> VendorReading:
        return VendorReading(())

    def comm_env(self, facts: NodeFacts, interface: str | None, gpus: Sequence[Gpu]) -> tuple[EnvVar, ...]:
        hidden: tuple[EnvVar, ...] = ()
        if facts.gpus:
            why = "the ranks of this node are CPU ranks"
            hidden = (
                EnvVar("CUDA_VISIBLE_DEVICES", "", why, "cpu"),
                EnvVar("HIP_VISIBLE_DEVICES", "", why, "cpu"),
            )
        return (*gloo_env(interface), *hidden)


CPU = _Cpu()
