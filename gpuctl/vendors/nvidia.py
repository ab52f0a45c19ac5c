"""NVIDIA: what nvidia-smi says (CSV of fields every driver since 465 has), what NCCL needs."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpuctl.core.hardware import Gpu, GpuProcess, NodeFacts, Problem, Vendor
from gpuctl.core.plan import EnvVar
from gpuctl.vendors import ToolAnswer, ToolQuery, VendorReading, gloo_env, nccl_interface

CORE_FIELDS = ("index", "uuid", "name", "pci.bus_id", "memory.total", "driver_version")
#: Fields that some driver does not know: one unknown field fails a whole query (exit code 2).
EXTRA_FIELDS = (
    "index", "compute_cap", "mig.mode.current", "memory.free", "utilization.gpu",
    "temperature.gpu", "power.draw", "power.limit",
)  # fmt: skip
APP_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")
MIB = 1 << 20
#: Texts that mean a broken device; other bracketed texts mean "does not apply here".
SICK = ("ERR!", "Unknown Error", "GPU requires reset", "GPU is lost", "Insufficient Permissions")
#: nvidia-smi(1), RETURN VALUE, and 18 (driver and library differ).
EXIT_KINDS = {
    2: "tool-too-old", 4: "no-permission", 6: "no-devices", 8: "power-cable", 9: "driver-not-loaded",
    12: "library-missing", 14: "inforom", 15: "gpu-lost", 18: "driver-mismatch", 124: "tool-timeout",
}  # fmt: skip
TEXT_KINDS = (
    (re.compile(r"no devices were found", re.I), "no-devices"),
    (re.compile(r"driver/library version mismatch", re.I), "driver-mismatch"),
    (re.compile(r"couldn't communicate with the NVIDIA driver", re.I), "driver-not-loaded"),
    (re.compile(r"is lost\b|fallen off the bus|unable to determine the device handle", re.I), "gpu-lost"),
    (re.compile(r"insufficient permissions", re.I), "no-permission"),
    (re.compile(r"is not a valid field to query", re.I), "tool-too-old"),
)  # fmt: skip


def _query(fields: Sequence[str], what: str = "gpu") -> str:
    return f"nvidia-smi --query-{what}={','.join(fields)} --format=csv,noheader,nounits"


class _Nvidia:
    vendor = Vendor.NVIDIA
    queries = (
        ToolQuery("nvidia", _query(CORE_FIELDS), 8),
        ToolQuery("nvidia_extra", _query(EXTRA_FIELDS), 8),
        ToolQuery("nvidia_apps", _query(APP_FIELDS, "compute-apps"), 8),
    )

    def read(self, answers: Mapping[str, ToolAnswer]) -> VendorReading:
        core = answers.get("nvidia")
        if core is None or core.exit_code == 127:
            return VendorReading(())
        problem = failure(core)
        rows = _rows(core.stdout, len(CORE_FIELDS)) if core.exit_code == 0 else []
        gpus = [gpu for row in rows if (gpu := _gpu(row)) is not None]
        if problem is not None and not gpus:
            return VendorReading(() if problem.kind == "no-devices" else None, problems=(problem,))
        gpus = _with_extras(gpus, answers.get("nvidia_extra"))
        gpus = _with_processes(gpus, answers.get("nvidia_apps"))
        driver = next((row[5] for row in rows if re.match(r"\d+\.\d+", row[5])), None)
        return VendorReading(tuple(gpus), driver, problems=(problem,) if problem else ())

    def comm_env(self, facts: NodeFacts, interface: str | None, gpus: Sequence[Gpu]) -> tuple[EnvVar, ...]:
        mask = ",".join(gpu.uuid or str(gpu.index) for gpu in gpus)
        visible = EnvVar(
            "CUDA_VISIBLE_DEVICES",
            mask,
            "the GPUs of this run, by UUID: indices change with the order",
            "nvidia",
        )
        return (visible, *nccl_interface(interface, "nvidia"), *gloo_env(interface))


def failure(answer: ToolAnswer) -> Problem | None:
    """Return what a failed nvidia-smi means: its text first (most goes to stdout), then its exit code."""
    text = f"{answer.stdout}\n{answer.stderr}".strip()
    kind = next((kind for pattern, kind in TEXT_KINDS if pattern.search(text)), None)
    if answer.exit_code == 0 and kind is None:
        return None
    kind = kind or EXIT_KINDS.get(answer.exit_code or 0, "tool-failed")
    first = next(
        (line.strip() for line in text.splitlines() if line.strip()), f"exit code {answer.exit_code}"
    )
    if kind == "tool-timeout":
        first = "nvidia-smi did not answer in time"
    return Problem(kind, f"nvidia-smi: {first[:200]}", text[:2000] or None)


def _rows(text: str, width: int) -> list[list[str]]:
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    try:
        return [
            [cell.strip() for cell in row]
            for row in rows
            if len(row) == width and re.fullmatch(r"[0-9]{1,4}", row[0].strip())
        ]
    except csv.Error:
        return []


def _gpu(row: Sequence[str]) -> Gpu | None:
    index, uuid, name, bus, memory, _ = row
    sick = next((cell for cell in row if any(text in cell for text in SICK)), None)
    return Gpu(
        index=int(index),
        vendor=Vendor.NVIDIA,
        name=_known(name),
        uuid=uuid if re.fullmatch(r"(GPU|MIG)-[0-9a-fA-F-]+", uuid) else None,
        pci_address=bus if re.fullmatch(r"[0-9a-fA-F:.]+", bus) else None,
        memory_total_bytes=_mib(memory),
        is_healthy=sick is None,
        problem=sick,
    )


def _with_extras(gpus: Sequence[Gpu], answer: ToolAnswer | None) -> list[Gpu]:
    if answer is None or answer.exit_code != 0:
        return list(gpus)
    by_index = {int(row[0]): row for row in _rows(answer.stdout, len(EXTRA_FIELDS))}
    return [_with_extra(gpu, by_index[gpu.index]) if gpu.index in by_index else gpu for gpu in gpus]


def _with_extra(gpu: Gpu, row: Sequence[str]) -> Gpu:
    _, capability, mig, free, utilization, temperature, power, limit = row
    arch = f"sm_{capability.replace('.', '')}" if re.fullmatch(r"\d+\.\d", capability) else None
    return replace(
        gpu,
        arch=arch,
        partition="MIG" if mig == "Enabled" else None,
        memory_free_bytes=_mib(free),
        utilization_percent=_number(utilization),
        temperature_c=_number(temperature),
        power_w=_number(power),
        power_limit_w=_number(limit),
    )


def _with_processes(gpus: Sequence[Gpu], answer: ToolAnswer | None) -> list[Gpu]:
    if answer is None or answer.exit_code != 0:
        return list(gpus)
    by_uuid: dict[str, list[GpuProcess]] = {}
    for line in answer.stdout.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) >= 4 and re.fullmatch(r"[0-9]{1,9}", cells[1]):
            process = GpuProcess(
                int(cells[1]), command=_known(",".join(cells[2:-1])), memory_bytes=_mib(cells[-1])
            )
            by_uuid.setdefault(cells[0], []).append(process)
    return [replace(gpu, processes=tuple(by_uuid.get(gpu.uuid or "", ()))) for gpu in gpus]


def _known(cell: str) -> str | None:
    return None if not cell or cell.strip("[]") in ("N/A", "Not Supported", "Not Found") else cell


def _number(cell: str) -> float | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?: ?(?:%|W|MiB))?", cell)
    return float(match[1]) if match else None


def _mib(cell: str) -> int | None:
    value = _number(cell)
    return int(value) * MIB if value else None  # 0 MiB of memory means "could not tell"


NVIDIA = _Nvidia()
