"""``gpuctl bench``: measure collectives between the nodes, checked to the element."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from gpuctl.cli import launch, options
from gpuctl.cli.bench_text import Table, csv_text, matrix_lines, plot_lines, report_lines, warning_lines
from gpuctl.cli.planning import build_plan, gather_facts, parse_env
from gpuctl.cli.render import Terminal
from gpuctl.errors import UsageError

if TYPE_CHECKING:
    from gpuctl.core.cluster import Cluster
    from gpuctl.core.plan import EnvVar, Plan
    from gpuctl.services.bench import BenchCollector, BenchOptions, BenchReport
    from gpuctl.services.session import Session

EPILOG = """\b
Examples:
  gpuctl bench allreduce
  gpuctl bench all_reduce all_gather --maxbytes 256M
  gpuctl bench allreduce --algo ring --maxbytes 16M
  gpuctl bench p2p --minbytes 4M --maxbytes 4M
  gpuctl bench allreduce --save monday; gpuctl bench allreduce --compare monday
"""


def command(
    collectives: Annotated[
        list[str], typer.Argument(metavar="COLLECTIVE...", help="all_reduce, all_gather, ..., p2p.")
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
    root: Annotated[int, typer.Option("--root", help="The rank of broadcast, reduce, ...", min=0)] = 0,
    engine: Annotated[str, typer.Option("--engine", help="torch or direct.")] = "torch",
    library: Annotated[
        str | None, typer.Option("--library", help="libnccl or librccl for --engine direct.")
    ] = None,
    algo: Annotated[str, typer.Option("--algo", help="library, ring or naive.")] = "library",
    per_node: Annotated[bool, typer.Option("--per-node", help="A group a node: its inside.")] = False,
    per_rail: Annotated[bool, typer.Option("--per-rail", help="A group a local rank: the network.")] = False,
    save: Annotated[str | None, typer.Option("--save", help="Keep the result under this name.")] = None,
    compare: Annotated[str | None, typer.Option("--compare", help="Judge against a kept result.")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    plot: Annotated[bool, typer.Option("--plot", help="Bars below the table.")] = False,
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
    from gpuctl.collectives.bandwidth import parse_size
    from gpuctl.collectives.config import Algorithm, Engine, Op
    from gpuctl.services.bench import BenchOptions

    if json and csv:
        raise UsageError("--json and --csv are two answers", hint="give one of them")
    if per_node and per_rail:
        raise UsageError("--per-node and --per-rail are two ways to group", hint="give one of them")
    bench = BenchOptions(
        collectives=tuple(collectives),
        min_bytes=parse_size(minbytes),
        max_bytes=None if maxbytes is None else parse_size(maxbytes),
        factor=factor,
        iters=iters,
        warmup_iters=warmup_iters,
        dtype=dtype,
        op=cast(Op, _one_of("--op", op, get_args(Op))),
        root=root,
        engine=cast(Engine, _one_of("--engine", engine, get_args(Engine))),
        library_path=library,
        algo=cast(Algorithm, _one_of("--algo", algo, get_args(Algorithm))),
        per="node" if per_node else "rail" if per_rail else None,
    )
    terminal = options.terminal(json, no_color, quiet, verbose)
    cluster = options.Selection(file, hostfile, nodelist, exclude, nnodes).load()
    variables = parse_env(env or (), env_file)
    return _measure(bench, cluster, variables, nproc_per_node, Output(terminal, csv, plot), save, compare)


@dataclass(frozen=True)
class Output:
    """How the answer is printed."""

    terminal: Terminal
    is_csv: bool
    has_plot: bool

    @property
    def has_table(self) -> bool:
        return not (self.terminal.is_json or self.is_csv)


def _one_of(flag: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise UsageError(f"{flag} {value}: unknown", hint=f"one of {', '.join(known)}")
    return value


def _measure(
    bench: BenchOptions,
    cluster: Cluster,
    variables: tuple[EnvVar, ...],
    nproc_per_node: int | None,
    output: Output,
    save: str | None,
    compare: str | None,
) -> int:
    from gpuctl.services.bench import load_baseline, raise_if_bad, save_baseline, with_bench
    from gpuctl.services.plan import LaunchRequest
    from gpuctl.services.session import open_session

    terminal = output.terminal
    baseline = load_baseline(compare) if compare is not None else None
    request = LaunchRequest(kind="bench", nproc_per_node=nproc_per_node, env=variables)
    with open_session(cluster) as session:
        facts = gather_facts(session, terminal)
        plan = with_bench(build_plan(cluster, facts, request), bench)
        collector, code = _run(plan, bench, session, output)
        if code != 0:
            return code
        report = collector.report(plan, facts=facts, baseline=baseline)
    _print(report, output)
    if save is not None:
        terminal.note(f"kept as {save_baseline(save, report)}")
    raise_if_bad(report)
    return 0


def _run(plan: Plan, bench: BenchOptions, session: Session, output: Output) -> tuple[BenchCollector, int]:
    """Run the plan with the table growing row by row."""
    from gpuctl.services.bench import BenchCollector
    from gpuctl.services.launch import Uploads

    terminal = output.terminal
    table = Table(
        has_groups=bench.per is not None,
        has_model=bench.algo != "library",
        has_torch=bench.engine == "direct",
    )

    def show(row: Mapping[str, Any]) -> None:
        for line in matrix_lines(row) if row["collective"] == "p2p" else (table.line(row),):
            terminal.data(line)

    collector = BenchCollector(show if output.has_table else None)
    if output.has_table and plan.program.config["collectives"] != ["p2p"]:
        terminal.data(table.head())
    quiet = terminal if output.has_table else Terminal(is_quiet=True)
    return collector, launch.run_plan(plan, session, Uploads(), quiet, False, also=collector.on_event)


def _print(report: BenchReport, output: Output) -> None:
    from gpuctl.services.bench import document

    terminal = output.terminal
    if terminal.is_json:
        terminal.json(document(report))
        return
    for line in warning_lines(report):
        terminal.warn(line)
    if output.is_csv:
        terminal.data(csv_text(report.results))
        return
    for line in plot_lines(report.results) if output.has_plot else ():
        terminal.data(line)
    for line in report_lines(report):
        terminal.data(line)
