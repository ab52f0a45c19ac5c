"""Is the number normal? Against published figures, and against the cluster's own past. Pure.

Small and large sizes are judged apart (latency and bandwidth fail for different reasons), and a
sweep is never averaged into one number: the mean over 8 bytes to 8 GiB says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gpuctl.collectives.reference import FIGURES, Figure

GOOD = 0.90
BAD = 0.75
"""Bands of the reference: good at 90 % and more, bad under 75 %, fair between."""
LARGE_BYTES = 64 << 20
"""From here on a library runs at its plateau (NCCL's protocol switches are behind it)."""
SMALL_BYTES = 64 << 10
SLOW_SMALL_US = 1000.0
"""13 us (8 GPUs of a p5), 35 (RoCE pair), 51 (EFA pair) are published for 8 bytes to 8 KiB over a GPU
fabric: a millisecond means TCP or a CPU in the way."""
REGRESSION = 0.05
"""superbenchmark and ROCm/cvs call 5 % slower than the baseline a defect."""
NOISE_FACTOR = 3.0
"""... but not what the spread of the repeats explains: three times their coefficient of variation."""

MIN_LINKS = 6
"""Both directions between three ranks: fewer have no median worth the name."""

Level = Literal["good", "fair", "bad", "unknown"]


@dataclass(frozen=True)
class Verdict:
    """One judgement of a run. ``ratio`` is measured / reference."""

    collective: str
    regime: Literal["large", "small"]
    size_bytes: int
    level: Level
    measured: float
    unit: Literal["GB/s", "us"]
    reference: float | None = None
    ratio: float | None = None
    source: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Hardware:
    """What a reference is looked up by; None: could not tell."""

    device: str | None
    num_nodes: int
    gpus_per_node: int | None
    limit_gb_s: float | None = None
    """busbw that the slowest probed link allows."""


@dataclass(frozen=True)
class Comparison:
    """A row against the same row of a saved run. ``slowdown`` 0.10 means 10 % more time."""

    collective: str
    size_bytes: int
    before_us: float
    now_us: float
    slowdown: float
    noise: float
    is_regression: bool


def judge(rows: Sequence[Mapping[str, Any]], hardware: Hardware, backend: str) -> tuple[Verdict, ...]:
    """Judge the largest and the smallest row of every collective that the library ran."""
    verdicts = []
    for name in dict.fromkeys(row["collective"] for row in rows):
        mine = [row for row in rows if row["collective"] == name and row.get("busbw_gb_s") is not None]
        if not mine or mine[0]["algo"] != "library":
            continue
        largest = max(mine, key=lambda row: row["size_bytes"])
        smallest = min(mine, key=lambda row: row["size_bytes"])
        if largest["size_bytes"] >= LARGE_BYTES:
            verdicts.append(_judge_large(largest, hardware))
        if smallest["size_bytes"] <= SMALL_BYTES:
            verdicts.append(_judge_small(smallest, backend))
    return tuple(verdicts)


def find_figure(collective: str, hardware: Hardware) -> Figure | None:
    """Return the published figure for this hardware and layout, None where there is none."""
    for figure in FIGURES:
        layout = (figure.num_nodes, figure.gpus_per_node)
        if figure.collective != collective or layout != (hardware.num_nodes, hardware.gpus_per_node):
            continue
        if hardware.device is not None and figure.matches(hardware.device):
            return figure
    return None


def compare(now: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> tuple[Comparison, ...]:
    """Compare by median time every row that both runs have."""
    old = {_key(row): row for row in before}
    return tuple(_compare_row(row, old[_key(row)]) for row in now if "time_us" in row and _key(row) in old)


def _judge_large(row: Mapping[str, Any], hardware: Hardware) -> Verdict:
    measured = row["busbw_gb_s"]
    figure = find_figure(row["collective"], hardware)
    if figure is None:
        limit = hardware.limit_gb_s
        note = "no published figure for this hardware"
        if limit:
            note += f"; {measured / limit:.0%} of what the slowest link allows ({limit:.1f} GB/s)"
        return Verdict(row["collective"], "large", row["size_bytes"], "unknown", measured, "GB/s", note=note)
    ratio = measured / figure.busbw_gb_s
    level: Level = "good" if ratio >= GOOD else "bad" if ratio < BAD else "fair"
    return Verdict(
        row["collective"],
        "large",
        row["size_bytes"],
        level,
        measured,
        "GB/s",
        reference=figure.busbw_gb_s,
        ratio=ratio,
        source=figure.source,
    )


def _judge_small(row: Mapping[str, Any], backend: str) -> Verdict:
    measured = row["time_us"]["median"]
    level: Level = "unknown"
    note = "no published figure for this latency"
    if backend == "nccl" and measured >= SLOW_SMALL_US:
        level, note = "bad", "a millisecond for few bytes: TCP instead of RDMA, or a busy CPU"
    return Verdict(row["collective"], "small", row["size_bytes"], level, measured, "us", note=note)


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("collective", "size_bytes", "dtype", "op", "num_ranks", "group", "algo", "engine")
    return tuple(row.get(name) for name in names)


def _compare_row(row: Mapping[str, Any], old: Mapping[str, Any]) -> Comparison:
    before, now = old["time_us"]["median"], row["time_us"]["median"]
    slowdown = now / before - 1
    noise = NOISE_FACTOR * max(row.get("cv") or 0.0, old.get("cv") or 0.0)
    return Comparison(
        collective=row["collective"],
        size_bytes=row["size_bytes"],
        before_us=before,
        now_us=now,
        slowdown=slowdown,
        noise=noise,
        is_regression=slowdown > max(REGRESSION, noise),
    )


@dataclass(frozen=True)
class SlowLink:
    """What a p2p matrix blames: a rank all of whose links are slow, or one pair."""

    ranks: tuple[int, ...]
    bandwidth_gb_s: float
    median_gb_s: float
    host: str | None = None
    """The node, or ``from -> to``; filled in by who knows where the ranks are."""


def slow_links(matrix: Sequence[Sequence[float | None]]) -> tuple[SlowLink, ...]:
    """Name what is under 75 % of the median link.

    A rank most of whose links are slow is named alone; its pairs are then not repeated. Two ranks
    have no typical link to be held against.
    """
    cells = {
        (i, j): value for i, line in enumerate(matrix) for j, value in enumerate(line) if value is not None
    }
    if len(cells) < MIN_LINKS:
        return ()
    typical = _median(list(cells.values()))
    slow = {pair for pair, value in cells.items() if value < BAD * typical}
    found = []
    for rank in range(len(matrix)):
        mine = [pair for pair in cells if rank in pair]
        if mine and sum(pair in slow for pair in mine) > len(mine) / 2:
            found.append(SlowLink((rank,), _median([cells[pair] for pair in mine]), typical))
    blamed = {link.ranks[0] for link in found}
    for i, j in sorted(slow):
        if not {i, j} & blamed:
            found.append(SlowLink((i, j), cells[i, j], typical))
    return tuple(found)


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
