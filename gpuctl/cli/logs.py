"""``gpuctl logs``: what the ranks of a run printed, from any machine with the same cluster file."""

from __future__ import annotations

import datetime
import re
import time
from typing import TYPE_CHECKING, Annotated

import typer

from gpuctl.cli import options
from gpuctl.cli.render import Terminal
from gpuctl.errors import UsageError

if TYPE_CHECKING:
    from gpuctl.services.logs import LogLine

EPILOG = """\b
Examples:
  gpuctl logs -f latest
  gpuctl logs latest --rank 0,3-5 -n 50
  gpuctl logs latest --since 10m --timestamps
"""
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def command(
    run: Annotated[str, typer.Argument(help="Run id, unique prefix, name, or latest.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    tail: Annotated[int | None, typer.Option("--tail", "-n", help="Only the last N lines.", min=0)] = None,
    rank: Annotated[str | None, typer.Option("--rank", help="Ranks: 0,3-5 (default 0; all for all).")] = None,
    node: Annotated[str | None, typer.Option("--node", help="All ranks of this node.")] = None,
    since: Annotated[str | None, typer.Option("--since", help="From 10m ago, or from an ISO time.")] = None,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="When each line came.")] = False,
    file: options.LongFile = None,
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
    """Show what the ranks of a run printed; -f follows. Ctrl-C leaves the run alone."""
    from gpuctl.services.logs import read_logs, select_ranks
    from gpuctl.services.runs import find_run, list_runs
    from gpuctl.services.session import open_session

    terminal = options.terminal(json, no_color, quiet, verbose)
    cluster = options.Selection(file, hostfile, nodelist, exclude, nnodes).load()
    start = parse_since(since) if since is not None else None
    with open_session(cluster, is_partial=True) as session:
        runs, _ = list_runs(session.connections)
        found = find_run(run, runs, cluster.name)
        wanted = None if rank is None else parse_ranks(rank, found.lead.world_size)
        ranks = select_ranks(found, wanted, node)
        read_logs(
            found,
            session.connections,
            ranks,
            lambda line: _show(line, terminal, len(ranks) > 1, timestamps),
            tail_lines=tail,
            since=start,
            with_times=timestamps or json,
            is_following=follow,
        )
    return 0


def _show(line: LogLine, terminal: Terminal, with_rank: bool, with_time: bool) -> None:
    if terminal.is_json:
        text = line.data.decode("utf-8", "backslashreplace")
        terminal.json({"rank": line.rank, "stream": line.stream, "time": line.time, "line": text})
        return
    prefix = ""
    if with_time:
        when = (
            "?"
            if line.time is None
            else datetime.datetime.fromtimestamp(line.time).isoformat(" ", "milliseconds")
        )
        prefix += f"{when} "
    if with_rank:
        prefix += f"[rank{line.rank}] "
    terminal.raw(prefix.encode() + line.data, line.stream)


def parse_ranks(text: str, world_size: int) -> list[int]:
    """Return the ranks of ``0,3-5``, ``6-`` (to the last) or ``all``; raises UsageError."""
    if text == "all":
        return list(range(world_size))
    ranks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:(-)(\d{1,6})?)?", part.strip())
        if match is None:
            raise UsageError(f"--rank {text}: not a list of ranks", hint="write --rank 0,3-5 or --rank all")
        first = int(match[1])
        last = first if match[2] is None else (int(match[3]) if match[3] else world_size - 1)
        if last < first or first >= world_size or last >= world_size:
            raise UsageError(f"--rank {part}: the run has ranks 0-{world_size - 1}")
        ranks += range(first, last + 1)
    return list(dict.fromkeys(ranks))


def parse_since(text: str) -> float:
    """Return the Unix time that ``10m``, ``90s`` or an ISO time means; raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is not None:
        return time.time() - float(match[1]) * UNITS[match[2]]
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError as exc:
        raise UsageError(
            f"--since {text}: not a time", hint="write 90s, 10m, 2h, 1d or 2026-01-31T12:00"
        ) from exc
