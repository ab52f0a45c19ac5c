"""Published bus bandwidths at large messages, with where each was published. Data, not code.

There is no official table. A figure is a gate that an operator uses, or a measurement that somebody
published with its setup; where both exist the measurement is taken. Add a row with its source.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """``busbw_gb_s`` of a collective on ``num_nodes`` nodes of ``gpus_per_node`` such devices."""

    device: str
    """A regular expression for the device's name, case ignored."""
    num_nodes: int
    gpus_per_node: int
    collective: str
    busbw_gb_s: float
    source: str
    note: str = ""

    def matches(self, device: str) -> bool:
        """Whether ``device`` is this figure's device."""
        return re.search(self.device, device, re.IGNORECASE) is not None


_ML = "stas00/ml-engineering network/README.md"
_NHC = "Azure/azurehpc-health-checks"
_CVS = "ROCm/cvs default thresholds"

_H100_SXM = r"H100(?!.*(PCIe|NVL))"
_A100_SXM = r"A100.*SXM"

FIGURES: tuple[Figure, ...] = (
    Figure(_H100_SXM, 1, 8, "all_reduce", 480, _ML, "NVLS, 4 GiB; 370 with NVLS off"),
    Figure(_H100_SXM, 1, 4, "all_reduce", 363, _ML, "NVLS is not chosen for 4"),
    Figure(r"H200", 1, 8, "all_reduce", 478, _ML, "473-482 measured; gates of 431-432"),
    Figure(r"H200", 1, 4, "all_reduce", 363, _ML, "NVLS is not chosen for 4"),
    Figure(r"B200", 1, 8, "all_reduce", 840, _ML, "838-846; 682 as a ring"),
    Figure(_A100_SXM, 1, 8, "all_reduce", 232, "NVIDIA/nccl#527", "230-235; Azure's gate is 228"),
    Figure(r"V100.*SXM", 1, 8, "all_reduce", 110, _NHC, "a gate"),
    Figure(r"A100.*PCIe", 1, 4, "all_reduce", 25, _NHC, "a virtual machine"),
    Figure(r"H100 NVL", 1, 2, "all_reduce", 208, _NHC, "a bridged pair"),
    Figure(
        r"H100 PCIe", 1, 8, "all_reduce", 40, "NVIDIA/nccl issues", "35-45 without bridges; weak evidence"
    ),
    Figure(r"RTX 4090", 1, 2, "all_reduce", 21, "NVIDIA/nccl#814", "20-22 through host memory"),
    Figure(r"MI300X", 1, 8, "all_reduce", 313, _ML, "4 GiB; gate of 314"),
    Figure(r"MI300X", 1, 2, "all_reduce", 48, "ROCm blogs", "one xGMI link"),
    Figure(r"MI300X", 2, 8, "all_reduce", 330, _CVS, "8 x 400 Gb/s, 8 GiB"),
    Figure(r"MI300X", 2, 8, "all_gather", 330, _CVS, "8 x 400 Gb/s"),
    Figure(r"MI300X", 2, 8, "reduce_scatter", 340, _CVS, "8 x 400 Gb/s"),
    Figure(r"MI300X", 2, 8, "all_to_all", 45, _CVS, "8 x 400 Gb/s"),
    Figure(r"MI300X", 2, 8, "send_recv", 47, _CVS, "8 x 400 Gb/s"),
    Figure(r"MI300X", 2, 8, "broadcast", 310, _CVS, "8 x 400 Gb/s"),
    Figure(_H100_SXM, 2, 8, "all_reduce", 470, "NVIDIA/nccl-tests#309", "NVLSTree on 8 x 400 Gb/s"),
    Figure(_H100_SXM, 4, 8, "all_reduce", 366, "NVIDIA/nccl-tests#309", "8 x 400 Gb/s"),
    Figure(_H100_SXM, 8, 8, "all_reduce", 387, "coreweave/nccl-tests", "8 x 400 Gb/s"),
    Figure(_A100_SXM, 2, 8, "all_reduce", 91, "NVIDIA/nccl-tests#119", "86-96 on 4 x 200 Gb/s"),
    Figure(r"B200", 4, 8, "all_reduce", 380, _ML, "P6-B200 over EFA: 377-382"),
)

NIC_GB_S_PER_GBPS = 0.12
"""busbw one NIC gives: 100, 200, 400 Gb/s are about 12, 24, 48 GB/s (NCCL's developers in
NVIDIA/nccl-tests#119 and #319)."""
