"""``gpuctl bench``: measure collectives between the nodes, checked to the element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from gpuctl.cli import launch, options
from gpuctl.cli.planning import build_plan, gather_facts, parse_env
from gpuctl.cli.render import Terminal, bytes_text

if TYPE_CHECKING:
    from gpuctl.core.plan import Plan
    from gpuctl.services.bench import BenchCollector, BenchOptions, BenchReport
    from gpuctl.services.session import Session

EPILOG = """\b
Examples:
  gpuctl bench allreduce
  gpuctl bench all_reduce all_gather --maxbytes 256M
  gpuctl bench allreduce --save monday; gpuctl bench allreduce --compare monday
"""
COLUMNS = ("collective", "size", "count", "median us", "p95 us", "algbw GB/s", "busbw GB/s", "wrong")


def command(
    collectives: Annotated[
        list[str], typer.Argument(metavar="COLLECTIVE...", help="all_reduce, all_gather, ...")
    ],
    minbytes: Annotated[str, typer.Option("--minbytes", help="Smallest size (M = MiB).")] = "1K",
    maxbytes: Annotated[
        str | None, typer.Option("--maxbytes", help="Largest size; 1G on GPUs, 16M on CPUs.")
    ] = None,
    factor: Annotated[float, typer.Option("--factor", help="Growth from size to size.")] = 2.0,
    iters: Annotated[int, typer.Option("--iters", help="Timed calls a size.", min=1)] = 20,
    warmup_iters: Annotated[int, typer.Option("--warmup-iters", help="Calls before them.", min=0)] = 5,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16, ...")] = "float32",
    op: Annotated[str, typer.Option("--op", help="sum, prod, min, max, avg.")] = "sum",
    algo: Annotated[str, typer.Option("--algo", help="library, ring or naive.")] = "library",
    save: Annotated[str | None, typer.Option("--save", help="Keep the result under this name.")] = None,
    compare: Annotated[str | None, typer.Option("--compare", help="Judge against a kept result.")] = None,
    env: launch.Env = None,
    env_file: launch.EnvFile = None,
    file: options.File = None,
    hostfile: options.Hostfile = None,
    nodelist: options.Nodelist = None,
    exclude: options.Exclude = None,
    nnodes: options.Nnodes = None,
    nproc_per_node: options.NprocPerNode = None,
    json: options.Json = False,
    no_color: options.NoColor = False,
    verbose: options.Verbose = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Measure collectives: algbw and busbw as nccl-tests defines them, every result checked."""
    from gpuctl.services.bench import load_baseline, raise_if_bad, save_baseline
    from gpuctl.services.plan import LaunchRequest
    from gpuctl.services.session import open_session

    terminal = options.terminal(json, no_color, quiet, verbose)
    bench = _options(collectives, minbytes, maxbytes, factor, iters, warmup_iters, dtype, op, algo)
    baseline = load_baseline(compare) if compare is not None else None
    request = LaunchRequest(kind="bench", nproc_per_node=nproc_per_node, env=parse_env(env or (), env_file))
    cluster = options.Selection(file, hostfile, nodelist, exclude, nnodes).load()
    with open_session(cluster) as session:
        facts = gather_facts(session, terminal)
        plan = build_plan(cluster, facts, request)
        plan, collector, code = _run(plan, bench, session, terminal)
        if code != 0:
            return code
        report = collector.report(plan, facts=facts, baseline=baseline)
    if save is not None:
        terminal.note(f"kept as {save_baseline(save, report)}")
    _print(report, terminal)
    raise_if_bad(report)
    return 0


def _options(
    collectives: list[str],
    minbytes: str,
    maxbytes: str | None,
    factor: float,
    iters: int,
    warmup_iters: int,
    dtype: str,
    op: str,
    algo: str,
) -> BenchOptions:
    from gpuctl.collectives.bandwidth import parse_size
    from gpuctl.collectives.config import Algorithm, Op
    from gpuctl.services.bench import BenchOptions

    return BenchOptions(
        collectives=tuple(collectives),
        min_bytes=parse_size(minbytes),
        max_bytes=None if maxbytes is None else parse_size(maxbytes),
        factor=factor,
        iters=iters,
        warmup_iters=warmup_iters,
        dtype=dtype,
        op=cast(Op, _one_of("--op", op, ("sum", "prod", "min", "max", "avg"))),
        algo=cast(Algorithm, _one_of("--algo", algo, ("library", "ring", "naive"))),
    )


def _one_of(flag: str, value: str, known: tuple[str, ...]) -> str:
    from gpuctl.errors import UsageError

    if value not in known:
        raise UsageError(f"{flag} {value}: unknown", hint=f"one of {', '.join(known)}")
    return value


def _run(
    plan: Plan, bench: BenchOptions, session: Session, terminal: Terminal
) -> tuple[Plan, BenchCollector, int]:
    from gpuctl.services.bench import BenchCollector, with_bench
    from gpuctl.services.launch import Uploads

    plan = with_bench(plan, bench)
    collector = BenchCollector(lambda row: None if terminal.is_json else _print_row(row, terminal))
    quiet = Terminal(is_quiet=True) if terminal.is_json else terminal
    if not terminal.is_json:
        terminal.data("  ".join(f"{c:>{w}}" for c, w in zip(COLUMNS, WIDTHS, strict=True)))
    code = launch.run_plan(plan, session, Uploads(), quiet, False, also=collector.on_event)
    return plan, collector, code


WIDTHS = (14, 10, 12, 11, 11, 10, 10, 6)


def _print_row(row: Mapping[str, Any], terminal: Terminal) -> None:
    if row.get("collective") == "p2p":
        return
    times = row["time_us"]
    cells = (
        row["collective"],
        bytes_text(row["size_bytes"]),
        row["count"],
        f"{times['median']:.1f}",
        f"{times['p95']:.1f}",
        "-" if row["algbw_gb_s"] is None else f"{row['algbw_gb_s']:.3f}",
        "-" if row["busbw_gb_s"] is None else f"{row['busbw_gb_s']:.3f}",
        row["wrong"] if row["checked"] else "n/a",
    )
    terminal.data("  ".join(f"{cell!s:>{w}}" for cell, w in zip(cells, WIDTHS, strict=True)))


def _print(report: BenchReport, terminal: Terminal) -> None:
    from gpuctl.services.bench import document

    if terminal.is_json:
        terminal.json(document(report))
        return
    for warning in report.warnings:
        terminal.warn(warning)
    for verdict in report.verdicts:
        measured = f"{verdict.collective}, {verdict.regime} sizes: {verdict.measured:.3g} {verdict.unit}"
        share = "" if verdict.ratio is None else f" ({verdict.ratio:.0%} of {verdict.reference:.3g})"
        terminal.data(f"{measured}{share}: {verdict.level}" + (f", {verdict.note}" if verdict.note else ""))
    for link in report.slow_links:
        ranks = "-".join(map(str, link.ranks))
        terminal.warn(f"rank {ranks}: {link.bandwidth_gb_s:.3g} GB/s, the median is {link.median_gb_s:.3g}")
    for comparison in report.comparisons or ():
        if comparison.is_regression:
            terminal.warn(
                f"{comparison.collective} {comparison.size_bytes} bytes: {comparison.slowdown:+.0%}"
            )
