"""``gpuctl status``: the nodes with their GPUs and the runs, or one run rank by rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpuctl.cli import options
from gpuctl.cli.render import Terminal, age_text, bytes_text
from gpuctl.core.codec import from_json, to_json
from gpuctl.core.run import RunRecord
from gpuctl.errors import UnknownAnswer

if TYPE_CHECKING:
    from gpuctl.core.cluster import Cluster
    from gpuctl.core.hardware import NodeFacts
    from gpuctl.services.runs import Run
    from gpuctl.services.session import Session

EPILOG = """\b
Examples:
  gpuctl status
  gpuctl status latest
  gpuctl status --json > facts.json
"""
WATCH_EVERY_S = 2.0
RECENT = 10


def command(
    run: Annotated[str | None, typer.Argument(help="Run id, unique prefix, name, or latest.")] = None,
    all_runs: Annotated[bool, typer.Option("--all", "-a", help="Finished runs too, all of them.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Again every 2 s.")] = False,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Have every rank write its stacks to its log.")
    ] = False,
    file: options.File = None,
    hostfile: options.Hostfile = None,
    nodelist: options.Nodelist = None,
    exclude: options.Exclude = None,
    nnodes: options.Nnodes = None,
    json: options.Json = False,
    no_color: options.NoColor = False,
    verbose: options.Verbose = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Show the nodes with their GPUs and the runs; with RUN: its ranks, phases and steps."""
    from gpuctl.services.session import open_session

    terminal = options.terminal(json, no_color, quiet, verbose)
    cluster = options.Selection(file, hostfile, nodelist, exclude, nnodes).load()
    with open_session(cluster, is_partial=True) as session:
        _warn_of_failures(session, terminal)
        while True:
            if run is not None:
                _show_run(run, cluster, session, terminal, with_stacks=stacks)
            else:
                _show_all(session, terminal, all_runs)
            if not watch:
                break
            time.sleep(WATCH_EVERY_S)
        return UnknownAnswer.exit_code if session.failures else 0


def _warn_of_failures(session: Session, terminal: Terminal) -> None:
    for label, error in session.failures.items():
        message = error.message if error.message.startswith(label) else f"{label}: {error.message}"
        terminal.warn(message + (f" ({error.cause})" if error.cause else ""))


def _show_all(session: Session, terminal: Terminal, all_runs: bool) -> None:
    from gpuctl.services.probe import probe
    from gpuctl.services.runs import list_runs

    facts = probe(session)
    runs, asked = list_runs(session.connections)
    for label, error in {**facts.failures, **asked.failures}.items():
        terminal.warn(error.message if error.message.startswith(label) else f"{label}: {error.message}")
    shown = runs if all_runs else _recent(runs)
    if terminal.is_json:
        terminal.json(
            {
                "schema_version": 1,
                "nodes": [to_json(fact) for fact in facts.values().values()],
                "unreachable": {label: error.message for label, error in session.failures.items()},
                "runs": [run_document(run) for run in shown],
            }
        )
        return
    terminal.table(
        ("node", "vendor", "gpus", "memory", "driver", "torch", "problem"),
        [_node_row(fact) for fact in facts.values().values()],
    )
    terminal.data()
    if not shown:
        terminal.data("no runs" if all_runs or not runs else "no live runs (-a shows the finished ones)")
        return
    terminal.table(
        ("run", "state", "nodes", "ranks", "step", "loss", "age", "reason"), [_run_row(run) for run in shown]
    )


def _recent(runs: Sequence[Run]) -> list[Run]:
    """Return live runs, and of the finished ones the newest few."""
    live = [run for run in runs if not run.state.is_final]
    return live + [run for run in runs if run.state.is_final][: max(0, RECENT - len(live))]


def _node_row(fact: NodeFacts) -> tuple[object, ...]:
    gpus = [gpu for gpu in fact.gpus or () if gpu.vendor is fact.vendor]
    names = sorted({gpu.name or "?" for gpu in gpus})
    memory = gpus[0].memory_total_bytes if gpus else fact.memory_total_bytes
    torch = fact.software.torch_version if fact.software else None
    count = f"{len(gpus)} x {', '.join(names)}" if gpus else ("?" if fact.gpus is None else "none")
    problem = fact.problems[0].message if fact.problems else None
    return (
        fact.host,
        fact.vendor.value if fact.vendor else "?",
        count,
        bytes_text(memory),
        fact.driver_version,
        torch,
        problem,
    )


def _run_row(run: Run) -> tuple[object, ...]:
    lead = run.lead
    loss = None if lead.loss is None else f"{lead.loss:.4f}"
    age = None if lead.created_at is None else time.time() - lead.created_at
    return (
        run.run_id,
        run.state.value,
        lead.num_nodes,
        lead.world_size,
        lead.step,
        loss,
        age_text(age),
        (lead.waiting_for and f"waiting for {lead.waiting_for}") or lead.reason,
    )


def run_document(run: Run) -> dict[str, Any]:
    """Return one run as JSON: the lead's record, and each node's state."""
    return {
        **to_json(run.lead),
        "state": run.state.value,
        "nodes": [
            {"node_rank": r.node_rank, "host": r.host, "state": r.state.value, "kill_method": r.kill_method}
            for r in sorted(run.records, key=lambda r: r.node_rank)
        ],
    }


def _show_run(
    text: str, cluster: Cluster, session: Session, terminal: Terminal, *, with_stacks: bool
) -> None:
    from gpuctl.services.runs import find_run, list_runs, live_record, request_stacks

    runs, _ = list_runs(session.connections)
    run = find_run(text, runs, cluster.name)
    record: RunRecord = run.lead
    document = run_document(run)
    if not run.state.is_final:
        live: Mapping[str, Any] | None = live_record(run, session.connections)
        if live is not None:
            record = from_json(RunRecord, live)
            document = {**document, **live}
        if with_stacks:
            request_stacks(run, session.connections)
            terminal.note(f"the stacks are in the ranks' logs: `gpuctl logs {run.run_id} --rank 0-`")
    if terminal.is_json:
        terminal.json({"schema_version": 1, "run": document})
        return
    _print_run(run, record, terminal)


def _print_run(run: Run, record: RunRecord, terminal: Terminal) -> None:
    head = [f"{run.run_id}: {run.state.value}"]
    if record.waiting_for:
        head.append(f"waiting for {record.waiting_for}")
    if record.reason:
        head.append(record.reason)
    terminal.data(", ".join(head))
    hosts = {r.node_rank: r for r in run.records}
    terminal.table(
        ("node", "host", "state", "kills by"),
        [(rank, r.host, r.state.value, r.kill_method) for rank, r in sorted(hosts.items())],
    )
    terminal.data()
    terminal.table(
        ("rank", "pid", "phase", "step", "exit"),
        [(r.rank, r.pid, r.phase, r.step, r.signal or r.exit_code) for r in record.ranks],
    )
