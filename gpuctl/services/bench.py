"""``gpuctl bench``: from words and sizes to a program for the ranks, and from their events to a report.

The ranks run :mod:`gpuctl.collectives.bench`; nothing here imports torch. The launch itself is
:mod:`gpuctl.services.launch`'s: it is given the Plan of :func:`with_bench` and hands its events to
:meth:`BenchCollector.on_event`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpuctl.collectives.bandwidth import DTYPE_BYTES, collective, sweep
from gpuctl.collectives.config import Algorithm, BenchConfig, Engine, Op
from gpuctl.collectives.reference import NIC_GB_S_PER_GBPS
from gpuctl.collectives.verdict import Comparison, Hardware, SlowLink, Verdict, compare, judge, slow_links
from gpuctl.core.codec import to_json
from gpuctl.core.hardware import NodeFacts
from gpuctl.core.plan import Plan, Program
from gpuctl.core.run import RUN_NAME
from gpuctl.errors import CheckFailed, ConfigError, UsageError

MODULE = "gpuctl.collectives.bench"
PROGRAM = Program(kind="bench", module=MODULE, preload=("torch", "torch.distributed", MODULE))
"""What a plan for a bench is built with; :func:`with_bench` adds the config that needs the plan."""

DEFAULT_MAX_BYTES = {"nccl": 1 << 30, "gloo": 16 << 20}
BY_HAND = ("all_reduce", "all_gather", "reduce_scatter")
"""What ``--algo ring`` and ``naive`` are written out for."""
FLOAT_DTYPES = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class BenchOptions:
    """What the user asked for."""

    collectives: tuple[str, ...]
    min_bytes: int = 1 << 10
    max_bytes: int | None = None
    """None: 1G on GPUs, 16M on CPUs."""
    factor: float = 2.0
    iters: int = 20
    warmup_iters: int = 5
    dtype: str = "float32"
    op: Op = "sum"
    root: int = 0
    engine: Engine = "torch"
    algo: Algorithm = "library"
    per: Literal["node", "rail"] | None = None
    """Groups: the ranks of a node each, or the same local rank of every node each."""
    library_path: str | None = None
    timeout_s: float = 300.0


@dataclass(frozen=True)
class BenchReport:
    """Everything a bench found out."""

    run_id: str
    collectives: tuple[str, ...]
    setup: dict[str, Any]
    results: tuple[dict[str, Any], ...]
    link: dict[str, Any] | None
    warnings: tuple[str, ...]
    verdicts: tuple[Verdict, ...] = ()
    comparisons: tuple[Comparison, ...] | None = None
    slow_links: tuple[SlowLink, ...] = ()

    @property
    def num_wrong(self) -> int:
        """Wrong elements over all rows."""
        return sum(row["wrong"] for row in self.results)

    @property
    def regressions(self) -> tuple[Comparison, ...]:
        return tuple(c for c in self.comparisons or () if c.is_regression)


def with_bench(plan: Plan, options: BenchOptions) -> Plan:
    """Return ``plan`` with the program that measures what ``options`` ask for.

    Raises UsageError when they cannot be had on this plan.
    """
    config = make_config(plan, options)
    return dataclasses.replace(plan, program=dataclasses.replace(PROGRAM, config=to_json(config)))


def make_config(plan: Plan, options: BenchOptions) -> BenchConfig:
    """Return the ranks' config; raises UsageError."""
    rows = tuple(collective(word) for word in options.collectives)
    groups = make_groups(plan, options.per)
    _check(options, plan.backend, tuple(row.name for row in rows), groups, plan.world_size)
    max_bytes = options.max_bytes or max(DEFAULT_MAX_BYTES[plan.backend], options.min_bytes)
    return BenchConfig(
        collectives=tuple(row.name for row in rows),
        sizes_bytes=sweep(options.min_bytes, max_bytes, options.factor),
        iters=options.iters,
        warmup_iters=options.warmup_iters,
        dtype=options.dtype,
        op=options.op,
        root=options.root,
        backend=plan.backend,
        engine=options.engine,
        algo=options.algo,
        groups=groups,
        expected_ranks=plan.world_size,
        library_path=options.library_path,
        timeout_s=options.timeout_s,
    )


def make_groups(plan: Plan, per: Literal["node", "rail"] | None) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each group: per node only the inside is measured, per rail only the network."""
    if per is None:
        return ()
    if per == "node":
        return tuple(node.ranks for node in plan.nodes if node.ranks)
    longest = max(len(node.ranks) for node in plan.nodes)
    return tuple(
        tuple(node.ranks[rail] for node in plan.nodes if rail < len(node.ranks)) for rail in range(longest)
    )


def _check(
    options: BenchOptions,
    backend: str,
    names: Sequence[str],
    groups: tuple[tuple[int, ...], ...],
    world_size: int,
) -> None:
    """Refuse what could not be measured as asked, before anything is contacted."""
    if options.dtype not in DTYPE_BYTES:
        raise UsageError(f"{options.dtype!r} is no dtype", hint=f"one of: {', '.join(DTYPE_BYTES)}")
    if options.iters < 1 or options.warmup_iters < 0:
        raise UsageError("--iters must be 1 or more, --warmup-iters 0 or more")
    if options.min_bytes < DTYPE_BYTES[options.dtype]:
        raise UsageError(f"{options.min_bytes} bytes hold no {options.dtype}", hint="a larger --minbytes")
    if options.op == "avg" and (backend == "gloo" or options.dtype not in FLOAT_DTYPES):
        raise UsageError(f"--op avg is not there for {options.dtype} on {backend}", hint="--op sum")
    if options.algo != "library":
        _check_by_hand(options, names)
    if options.engine == "direct" and backend == "gloo" and options.library_path is None:
        raise UsageError("--engine direct needs NCCL or RCCL, these are CPU ranks", hint="--engine torch")
    if groups and "p2p" in names:
        raise UsageError("p2p measures every pair, groups are not for it", hint="leave the groups out")
    smallest = min((len(members) for members in groups), default=world_size)
    if not 0 <= options.root < smallest:
        raise UsageError(f"--root {options.root}: there are {smallest} ranks")


def _check_by_hand(options: BenchOptions, names: Sequence[str]) -> None:
    others = [name for name in names if name not in BY_HAND]
    if others:
        raise UsageError(
            f"--algo {options.algo} is written out for {', '.join(BY_HAND)}, not for {', '.join(others)}",
            hint="--algo library",
        )
    if options.op == "avg":
        raise UsageError(f"--algo {options.algo} has no average", hint="--op sum")


class BenchCollector:
    """Takes the events of a bench run; ``on_row`` is called for each row as it is measured."""

    def __init__(self, on_row: Callable[[Mapping[str, Any]], None] | None = None) -> None:
        self._on_row = on_row
        self._setup: dict[str, Any] = {}
        self._link: dict[str, Any] | None = None
        self._rows: list[dict[str, Any]] = []
        self._warnings: list[str] = []

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Take one event of the run; what is not the bench's own is ignored."""
        fields = {k: v for k, v in event.items() if k not in _ENVELOPE}
        kind = event.get("event")
        if kind == "setup":
            self._setup = fields
        elif kind == "link":
            self._link = fields
        elif kind == "warning" and "message" in fields:
            self._warnings.append(str(fields["message"]))
        elif kind == "result":
            self._rows.append(fields)
            if self._on_row is not None:
                self._on_row(fields)

    def report(
        self,
        plan: Plan,
        *,
        facts: Sequence[NodeFacts] = (),
        baseline: Mapping[str, Any] | None = None,
    ) -> BenchReport:
        """Return what was found, judged against published figures and ``baseline``'s rows."""
        matrices = [row for row in self._rows if row["collective"] == "p2p"]
        return BenchReport(
            run_id=plan.run_id,
            collectives=tuple(plan.program.config["collectives"]),
            setup=self._setup,
            results=tuple(self._rows),
            link=self._link,
            warnings=tuple(self._warnings),
            verdicts=judge(self._rows, hardware_of(plan, facts), plan.backend),
            comparisons=compare(self._rows, baseline["results"]) if baseline is not None else None,
            slow_links=_name_hosts(plan, slow_links(matrices[-1]["bandwidth_gb_s"])) if matrices else (),
        )


_ENVELOPE = frozenset({"event", "run", "generation", "time", "rank", "node", "schema_version"})


def _name_hosts(plan: Plan, links: Sequence[SlowLink]) -> tuple[SlowLink, ...]:
    """Add the nodes' names: a rank is nothing that one can go and look at."""
    return tuple(
        dataclasses.replace(link, host=" -> ".join(plan.node_of(rank).host for rank in link.ranks))
        for link in links
    )


def hardware_of(plan: Plan, facts: Sequence[NodeFacts]) -> Hardware:
    """Return what the plan's nodes are, for the lookup of a reference."""
    names = {gpu.name for node in plan.nodes for gpu in node.gpus}
    counts = {len(node.ranks) for node in plan.nodes}
    return Hardware(
        device=next(iter(names)) if len(names) == 1 else None,
        num_nodes=len(plan.nodes),
        gpus_per_node=next(iter(counts)) if len(counts) == 1 else None,
        limit_gb_s=_network_limit(plan, facts) if len(plan.nodes) > 1 else None,
    )


def _network_limit(plan: Plan, facts: Sequence[NodeFacts]) -> float | None:
    """Return the busbw of a ring over the slowest node's NICs, None when one cannot be told."""
    by_host = {node.host: node for node in facts}
    rates = [_node_gbps(by_host.get(node.host), node.interface) for node in plan.nodes]
    known = [rate for rate in rates if rate is not None]
    return min(known) * NIC_GB_S_PER_GBPS if known and len(known) == len(rates) else None


def _node_gbps(facts: NodeFacts | None, interface: str | None) -> float | None:
    if facts is None:
        return None
    active = [port.rate_gbps for port in facts.rdma or () if port.state and "ACTIVE" in port.state.upper()]
    rdma = [rate for rate in active if rate]
    if rdma:
        return sum(rdma)
    nic = next((nic for nic in facts.nics or () if nic.name == interface), None)
    return nic.speed_mbps / 1000 if nic and nic.speed_mbps and nic.speed_mbps > 0 else None


def document(report: BenchReport) -> dict[str, Any]:
    """Return the JSON document of ``bench --json``; ``collective`` is null when there are several."""
    one = report.collectives[0] if len(report.collectives) == 1 else None
    return {
        "schema_version": 1,
        "run": report.run_id,
        "collective": one,
        "collectives": list(report.collectives),
        "setup": report.setup,
        "link": report.link,
        "results": list(report.results),
        "wrong": report.num_wrong,
        "verdicts": to_json(report.verdicts),
        "comparisons": to_json(report.comparisons),
        "slow_links": to_json(report.slow_links),
        "warnings": list(report.warnings),
    }


def raise_if_bad(report: BenchReport) -> None:
    """Raise CheckFailed when an element was wrong or the run is slower than the saved one."""
    if report.num_wrong:
        bad = sorted({row["collective"] for row in report.results if row["wrong"]})
        raise CheckFailed(
            f"{report.num_wrong} wrong elements in {', '.join(bad)}",
            hint="data was corrupted on the way: look at PCIe ACS, IOMMU and NCCL_PROTO",
        )
    if report.regressions:
        worst = max(report.regressions, key=lambda c: c.slowdown)
        raise CheckFailed(
            f"{len(report.regressions)} rows are slower than the saved run beyond noise; the worst is "
            f"{worst.collective} of {worst.size_bytes} bytes, {worst.slowdown:+.0%}",
            hint="run it again with more --iters before believing it",
        )


def baselines_dir() -> Path:
    """Return where ``--save`` keeps runs on this machine."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "gpuctl" / "bench"


def save_baseline(name: str, report: BenchReport) -> Path:
    """Keep ``report`` under ``name`` for a later ``--compare``; the file appears whole or not at all."""
    path = _baseline_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as file:
        json.dump(document(report), file, indent=1)
    Path(file.name).replace(path)
    return path


def load_baseline(name: str) -> dict[str, Any]:
    """Return the document saved under ``name``; raises UsageError or ConfigError."""
    path = _baseline_path(name)
    try:
        saved = json.loads(path.read_text())
    except FileNotFoundError as exc:
        known = ", ".join(sorted(p.stem for p in baselines_dir().glob("*.json"))) or "none yet"
        raise UsageError(f"nothing is saved as {name!r}", cause=f"saved: {known}") from exc
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: not a saved bench", cause=str(exc)) from exc
    if not isinstance(saved, dict) or not isinstance(saved.get("results"), list):
        raise ConfigError(f"{path}: not a saved bench")
    return saved


def _baseline_path(name: str) -> Path:
    if not RUN_NAME.match(name):
        raise UsageError(f"{name!r} is no name", hint="letters, digits, '.', '_' and '-', 64 at most")
    return baselines_dir() / f"{name}.json"
