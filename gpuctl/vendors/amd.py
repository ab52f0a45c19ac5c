"""AMD: what rocm-smi (or amd-smi) says as JSON, what RCCL needs.

RCCL exports NCCL's symbols and reads NCCL's variables; only the visibility mask has another name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gpuctl.core.hardware import Gpu, NodeFacts, Problem, Vendor
from gpuctl.core.plan import EnvVar
from gpuctl.vendors import ToolAnswer, ToolQuery, VendorReading, cleared, gloo_env, nccl_interface

#: An integrated GPU has a small carve-out of the machine's memory as its VRAM.
INTEGRATED_BELOW_BYTES = 4 << 30
NAME_KEYS = ("Card Series", "Card series", "Card SKU", "Card model", "Device Name", "Card Model")


class _Amd:
    vendor = Vendor.AMD
    queries = (
        ToolQuery(
            "rocm",
            "rocm-smi --showproductname --showmeminfo vram --showuniqueid --showbus --showuse --showtemp"
            " --showpower --showdriverversion --json",
            8,
        ),
        ToolQuery("amdsmi", "amd-smi static --json", 8),
        ToolQuery("rocm_version", "cat /opt/rocm/.info/version", 2),
    )

    def read(self, answers: Mapping[str, ToolAnswer]) -> VendorReading:
        rocm, amdsmi = answers.get("rocm"), answers.get("amdsmi")
        version = answers.get("rocm_version")
        runtime = (
            version.stdout.strip() if version and re.match(r"\d+\.\d+", version.stdout.strip()) else None
        )
        if (rocm is None or rocm.exit_code == 127) and (amdsmi is None or amdsmi.exit_code == 127):
            return VendorReading((), runtime_version=runtime)
        document = load_json(rocm.stdout) if rocm is not None else None
        cards = read_rocm_smi(document) if isinstance(document, dict) else None
        driver = _driver(document) if isinstance(document, dict) else None
        if not cards and amdsmi is not None and amdsmi.exit_code == 0:
            cards = read_amd_smi(load_json(amdsmi.stdout)) or cards
        if cards is None:
            return VendorReading(None, driver, runtime, (_problem(rocm or amdsmi),))
        return VendorReading(tuple(cards), driver, runtime)

    def comm_env(self, facts: NodeFacts, interface: str | None, gpus: Sequence[Gpu]) -> tuple[EnvVar, ...]:
        mask = ",".join(str(gpu.index) for gpu in gpus)
        visible = EnvVar("HIP_VISIBLE_DEVICES", mask, "the GPUs of this run", "amd")
        others = tuple(
            cleared(name, "HIP_VISIBLE_DEVICES", "amd")
            for name in ("ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
        )
        return (visible, *others, *nccl_interface(interface, "amd"), *gloo_env(interface))


def load_json(text: str) -> Any:
    """Return the first JSON document in ``text`` (warnings may stand before it), or None."""
    starts = [i for i in (text.find("{"), text.find("[")) if i >= 0]
    if not starts:
        return None
    try:
        return json.JSONDecoder().raw_decode(text[min(starts) :])[0]
    except (ValueError, RecursionError):
        return None


def read_rocm_smi(document: Mapping[str, Any]) -> list[Gpu] | None:
    """Return the cards of ``rocm-smi --json`` (4.x to 7.x); None when there is no card in it."""
    cards = []
    for key, card in document.items():
        match = re.fullmatch(r"card(\d{1,4})", str(key))
        if match and isinstance(card, dict) and not _is_foreign(card):
            cards.append(_rocm_card(int(match[1]), card))
    return sorted(cards, key=lambda gpu: gpu.index) or None


def _is_foreign(card: Mapping[str, Any]) -> bool:
    vendor = str(card.get("Card Vendor", card.get("Card vendor", "")))
    return "Haiguang" in vendor or "Hygon" in vendor


def _rocm_card(index: int, card: Mapping[str, Any]) -> Gpu:
    total = _count(card.get("VRAM Total Memory (B)"))
    used = _count(card.get("VRAM Total Used Memory (B)"))
    unique = str(card.get("Unique ID", ""))
    name = next((str(card[k]) for k in NAME_KEYS if card.get(k) and str(card[k]) != "N/A"), None)
    arch = str(card.get("GFX Version", ""))
    return Gpu(
        index=index,
        vendor=Vendor.AMD,
        name=name,
        uuid=f"GPU-{unique[2:]}" if re.fullmatch(r"0x[0-9a-fA-F]+", unique) else None,
        arch=arch if re.fullmatch(r"gfx[0-9a-f]+", arch) else None,
        memory_total_bytes=total or None,
        memory_free_bytes=total - used if total and used is not None and used <= total else None,
        pci_address=_text(card.get("PCI Bus")),
        utilization_percent=_float(card.get("GPU use (%)")),
        temperature_c=_float(card.get("Temperature (Sensor edge) (C)")),
        power_w=_float(
            card.get(
                "Average Graphics Package Power (W)", card.get("Current Socket Graphics Package Power (W)")
            )
        ),
        is_integrated=total < INTEGRATED_BELOW_BYTES if total else None,
    )


def read_amd_smi(document: Any) -> list[Gpu] | None:
    """Return the GPUs of ``amd-smi static --json``: a list, or ``gpu_data`` in newer ones."""
    items = document.get("gpu_data") if isinstance(document, dict) else document
    if not isinstance(items, list):
        return None
    gpus = [gpu for item in items if isinstance(item, dict) and (gpu := _amd_smi_gpu(item)) is not None]
    return gpus or None


def _amd_smi_gpu(item: Mapping[str, Any]) -> Gpu | None:
    index = item.get("gpu")
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < 4096:
        return None
    asic, vram, bus = (_mapping(item.get(key)) for key in ("asic", "vram", "bus"))
    size = _mapping(vram.get("size"))
    total = _count(size.get("value"))
    unit = {"MB": 1 << 20, "MiB": 1 << 20, "GB": 1 << 30}.get(str(size.get("unit")), 0)
    memory = total * unit if total and unit else None
    arch = str(asic.get("target_graphics_version", ""))
    return Gpu(
        index=index,
        vendor=Vendor.AMD,
        name=_text(asic.get("market_name")),
        arch=arch if re.fullmatch(r"gfx[0-9a-f]+", arch) else None,
        memory_total_bytes=memory,
        pci_address=_text(bus.get("bdf")),
        is_integrated=memory < INTEGRATED_BELOW_BYTES if memory else None,
    )


def _driver(document: Mapping[str, Any]) -> str | None:
    return _text(_mapping(document.get("system")).get("Driver version"))


def _problem(answer: ToolAnswer | None) -> Problem:
    text = f"{answer.stdout}\n{answer.stderr}".strip() if answer else ""
    if answer is not None and answer.exit_code == 124:
        return Problem("tool-timeout", "rocm-smi did not answer in time")
    first = next((line.strip() for line in text.splitlines() if line.strip()), "it printed nothing")
    kind = (
        "driver-not-loaded"
        if re.search(r"not (initialized|loaded)|amdgpu not found", text, re.I)
        else "tool-failed"
    )
    return Problem(kind, f"rocm-smi: {first[:200]}", text[:2000] or None)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value not in ("", "N/A", "unknown") else None


def _count(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,15}", value) else None


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,6}(\.[0-9]+)?", value) else None


AMD = _Amd()
