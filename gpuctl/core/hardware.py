"""What a node is: vendor, GPUs, network interfaces, software. ``None`` means "could not tell".

These values are public: they are what ``status --json`` prints and what ``plan --facts`` reads.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Vendor(str, enum.Enum):
    """Who made the accelerators of a node; ``cpu`` when it has none that are used."""

    NVIDIA = "nvidia"
    AMD = "amd"
    CPU = "cpu"


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds a GPU, as the vendor tool or a file descriptor scan saw it."""

    pid: int
    user: str | None = None
    command: str | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Gpu:
    """One device that a rank can be given (a MIG slice or a CPX partition counts as one)."""

    index: int
    vendor: Vendor
    name: str | None = None
    uuid: str | None = None
    arch: str | None = None
    """``sm_90`` or ``gfx942``."""
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    pci_address: str | None = None
    utilization_percent: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    is_integrated: bool | None = None
    is_healthy: bool | None = None
    problem: str | None = None
    partition: str | None = None
    """``MIG 1g.10gb``, ``CPX/NPS4``; None when the whole device is meant."""
    parent_uuid: str | None = None
    processes: tuple[GpuProcess, ...] | None = None


@dataclass(frozen=True)
class Nic:
    """One network interface with its addresses (textual, without prefix length)."""

    name: str
    addresses: tuple[str, ...] = ()
    is_up: bool | None = None
    is_virtual: bool | None = None
    is_loopback: bool = False
    is_wireless: bool | None = None
    mtu: int | None = None
    speed_mbps: int | None = None
    prefix_lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class RdmaDevice:
    """One port of an RDMA device from ``/sys/class/infiniband``."""

    name: str
    port: int
    state: str | None = None
    rate_gbps: float | None = None
    link_layer: str | None = None
    """``InfiniBand`` or ``Ethernet``."""
    netdev: str | None = None
    gids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Route:
    """The kernel's answer for one peer: which interface and source address reach it."""

    peer: str
    interface: str | None = None
    source: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Software:
    """The interpreter of a node and what can be imported from it, read without importing."""

    python: str | None = None
    """Absolute path of the interpreter."""
    python_version: str | None = None
    torch_version: str | None = None
    torch_cuda: str | None = None
    torch_hip: str | None = None
    nccl_version: str | None = None
    """NCCL or RCCL, from the library's package or the library itself."""
    collective_library: str | None = None
    arch_list: tuple[str, ...] | None = None
    packages: dict[str, str] | None = None
    compiler: str | None = None


@dataclass(frozen=True)
class Disk:
    """Where gpuctl keeps its files on the node."""

    path: str
    free_bytes: int | None = None
    filesystem: str | None = None
    is_shared: bool | None = None


@dataclass(frozen=True)
class Problem:
    """Something the probe found wrong: a kind that code can test, and the text behind it."""

    kind: str
    message: str
    detail: str | None = None


@dataclass(frozen=True)
class NodeFacts:
    """Everything one probe round trip found out about a node."""

    host: str
    vendor: Vendor | None = None
    hostname: str | None = None
    machine_id: str | None = None
    boot_id: str | None = None
    uid: int | None = None
    user: str | None = None
    kernel: str | None = None
    cpu_count: int | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    driver_version: str | None = None
    runtime_version: str | None = None
    """CUDA or ROCm version as the vendor tool or ``/opt/rocm`` says."""
    gpus: tuple[Gpu, ...] | None = None
    nics: tuple[Nic, ...] | None = None
    rdma: tuple[RdmaDevice, ...] | None = None
    routes: tuple[Route, ...] | None = None
    ssh_address: str | None = None
    """The node's own end of the SSH connection (SSH_CONNECTION), when there is one."""
    software: Software | None = None
    disk: Disk | None = None
    shm_bytes: int | None = None
    clock_offset_s: float | None = None
    kill_method: str | None = None
    """cgroup, subreaper or process-group: what ends a run's processes here."""
    inherited_env: dict[str, str] | None = None
    """Variables of the login environment that change a collective (values of secrets masked)."""
    config_files: dict[str, str] | None = None
    """``/etc/nccl.conf`` and the like, with their text."""
    limits: dict[str, int] | None = None
    """Soft resource limits inside the launched context; -1 is unlimited."""
    gpu_count_by_os: int | None = None
    """Devices the kernel shows (PCI, KFD), whatever the vendor tool says."""
    container: str | None = None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class FactsFile:
    """The document of ``status --json`` and ``plan --facts``."""

    nodes: tuple[NodeFacts, ...]
    schema_version: int = 1
