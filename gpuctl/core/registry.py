"""A lazy table of name -> implementation: a vendor or a transport is one row here.

Rows name a module and an attribute; nothing is imported before the row is used, so that
``gpuctl --help`` loads neither paramiko nor torch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """Where an implementation lives."""

    module: str
    attribute: str
    summary: str

    def load(self) -> Any:
        """Import and return the implementation."""
        return getattr(importlib.import_module(self.module), self.attribute)


VENDORS: dict[str, Row] = {
    "nvidia": Row("gpuctl.vendors.nvidia", "NVIDIA", "NVIDIA GPUs, NCCL"),
    "amd": Row("gpuctl.vendors.amd", "AMD", "AMD GPUs, RCCL"),
    "cpu": Row("gpuctl.vendors.cpu", "CPU", "no GPU, Gloo"),
}

TRANSPORTS: dict[str, Row] = {
    "ssh": Row("gpuctl.transports.ssh", "connect", "paramiko"),
    "openssh": Row("gpuctl.transports.openssh", "connect", "the system's ssh"),
    "local": Row("gpuctl.transports.local", "connect", "this machine, no SSH"),
}
