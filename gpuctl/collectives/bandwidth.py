"""What a collective's bandwidth is: names, sizes and the algbw/busbw factors of nccl-tests. Pure.

nccl-tests (NVIDIA, v2.19; rccl-tests is the same) prints three numbers a row. ``size`` is S,
``algbw`` is S/t, and ``busbw`` is algbw times a factor that turns it into the traffic of one link,
so that it can be held against the hardware whatever the number of ranks. Which S is meant, and
which factor, differs from one collective to the next: it is the table below, from the ``*GetBw``
functions in ``nccl-tests/src/*.cu``. Other tools differ (DeepSpeed and EleutherAI/cookbook print
2*S/t as an all-reduce's algbw): do not compare their numbers with these.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from gpuctl.errors import UsageError

SPLIT_ALIGN_BYTES = 16
"""nccl-tests rounds the per-rank part of split buffers down to this (``& -(16/eltSize)``)."""

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:iB)?\s*\Z", re.IGNORECASE)


@dataclass(frozen=True)
class Collective:
    """One row of the table: how a collective's size and bandwidth are counted."""

    name: str
    summary: str
    bus_factor: Callable[[int], float]
    """busbw / algbw as a function of the number of ranks."""
    is_split: bool = False
    """S is the whole of ``num_ranks`` equal parts (True), or one rank's buffer (False)."""
    is_reduction: bool = False
    has_root: bool = False
    moves_data: bool = True


def _one(_num_ranks: int) -> float:
    return 1.0


def _share(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


def _twice_share(num_ranks: int) -> float:
    return 2 * (num_ranks - 1) / num_ranks


_ROWS = (
    Collective("all_reduce", "every rank gets the sum of all buffers", _twice_share, is_reduction=True),
    Collective("all_gather", "every rank gets all parts", _share, is_split=True),
    Collective(
        "reduce_scatter", "every rank gets its part of the sum", _share, is_split=True, is_reduction=True
    ),
    Collective("broadcast", "every rank gets the root's buffer", _one, has_root=True),
    Collective("reduce", "the root gets the sum of all buffers", _one, is_reduction=True, has_root=True),
    Collective("all_to_all", "every rank sends a part to every rank", _share, is_split=True),
    Collective("send_recv", "rank r sends its buffer to rank r+1", _one),
    Collective("gather", "the root gets all parts", _share, is_split=True, has_root=True),
    Collective("scatter", "every rank gets its part of the root's", _share, is_split=True, has_root=True),
    Collective("barrier", "every rank waits for all", _one, moves_data=False),
    Collective("p2p", "a matrix of every pair of ranks", _one),
)
COLLECTIVES: dict[str, Collective] = {row.name: row for row in _ROWS}

_BY_LETTERS = {name.replace("_", ""): name for name in COLLECTIVES}


def collective(word: str) -> Collective:
    """Return the row that ``word`` means: ``all_reduce``, ``allreduce`` and ``all-reduce`` are one.

    Raises UsageError when there is none.
    """
    name = _BY_LETTERS.get(word.lower().replace("_", "").replace("-", ""))
    if name is None:
        raise UsageError(f"{word!r} is no collective", hint=f"one of: {', '.join(COLLECTIVES)}")
    return COLLECTIVES[name]


def parse_size(text: str) -> int:
    """Return bytes of ``16M``, ``1.5K``, ``1GiB`` or ``4096``; K, M, G, T are powers of 1024.

    Raises UsageError on anything else (``MB`` too: it could mean either).
    """
    match = _SIZE.match(text)
    if match is None:
        raise UsageError(f"{text!r} is no size", hint="write bytes, or K, M, G, T (powers of 1024): 16M")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def format_size(size_bytes: int) -> str:
    """Return ``16M`` for what :func:`parse_size` reads back, bytes where no unit divides it."""
    for unit in ("G", "M", "K"):
        if size_bytes >= _UNITS[unit] and size_bytes % _UNITS[unit] == 0:
            return f"{size_bytes // _UNITS[unit]}{unit}"
    return str(size_bytes)


def sweep(min_bytes: int, max_bytes: int, factor: float) -> tuple[int, ...]:
    """Return min, min*factor, ... up to max (nccl-tests' ``-b -e -f``). Raises UsageError."""
    if not 0 < min_bytes <= max_bytes:
        raise UsageError(f"sizes from {min_bytes} to {max_bytes} bytes", hint="--minbytes 1K --maxbytes 1M")
    if factor <= 1 and min_bytes != max_bytes:
        raise UsageError(f"a factor of {factor} never reaches {max_bytes}", hint="--factor 2")
    sizes = [min_bytes]
    while min_bytes != max_bytes and int(sizes[-1] * factor) <= max_bytes:
        sizes.append(max(int(sizes[-1] * factor), sizes[-1] + 1))
    return tuple(sizes)


def count_per_rank(row: Collective, size_bytes: int, *, element_bytes: int, num_ranks: int) -> int:
    """Return ``c``, the elements of one rank's part (split) or buffer, for a wanted size.

    0 when the size is too small to be split, as nccl-tests prints it.
    """
    elements = size_bytes // element_bytes
    if not row.is_split:
        return elements
    align = max(1, SPLIT_ALIGN_BYTES // element_bytes)
    return elements // num_ranks // align * align


def reported_bytes(row: Collective, count: int, *, element_bytes: int, num_ranks: int) -> int:
    """Return S, the size column, for ``count`` elements a rank."""
    return count * element_bytes * (num_ranks if row.is_split else 1)


@dataclass(frozen=True)
class Bandwidth:
    """Both rates of one measurement in GB/s (1e9 bytes)."""

    algbw_gb_s: float
    busbw_gb_s: float


def bandwidth(row: Collective, size_bytes: int, *, time_s: float, num_ranks: int) -> Bandwidth:
    """Return algbw = S/t and busbw = algbw * factor. ``size_bytes`` is S; busbw is 0 for one rank
    where the factor is."""
    algbw = size_bytes / 1e9 / time_s if time_s > 0 else 0.0
    return Bandwidth(algbw, algbw * row.bus_factor(num_ranks))
