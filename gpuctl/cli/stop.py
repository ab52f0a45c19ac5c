"""``gpuctl stop``: ask runs to save and leave, or end them."""

from __future__ import annotations

import getpass
import os
import socket
from typing import Annotated

import typer

from gpuctl.cli import options
from gpuctl.core.codec import to_json
from gpuctl.errors import UsageError

EPILOG = """\b
Examples:
  gpuctl stop latest
  gpuctl stop --force zero2-20260131-120000-ab12
"""


def command(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Ids, prefixes, names, latest.")
    ] = None,
    all_runs: Annotated[
        bool, typer.Option("--all", "-a", help="Every live run of yours on these nodes.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", "-t", help="Seconds to save and leave (default: grace_s).", min=0),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="End it now, save nothing.")] = False,
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
    """Stop runs: the ranks save and leave within -t, then the kill ladder. A finished run is no error."""
    from gpuctl.services.runs import find_run, list_runs, stop_run
    from gpuctl.services.session import open_session

    terminal = options.terminal(json, no_color, quiet, verbose)
    if not runs and not all_runs:
        raise UsageError("which run?", hint="`gpuctl stop latest`, or `gpuctl status` for their ids")
    cluster = options.Selection(file, hostfile, nodelist, exclude, nnodes).load()
    grace = cluster.failure.grace_s if timeout is None else timeout
    by = f"{_user()} on {socket.gethostname()}"
    results = []
    with open_session(cluster, is_partial=True) as session:
        known, _ = list_runs(session.connections)
        if all_runs:
            chosen = [run for run in known if not run.state.is_final]
        else:
            chosen = [find_run(text, known, cluster.name) for text in runs or ()]
        for run in chosen:
            result = stop_run(run, session.connections, grace_s=grace, is_forced=force, by=by)
            results.append(result)
            if not json:
                said = "had ended already" if result.was_finished else f"ended in {result.elapsed_s:.1f} s"
                terminal.data(f"{result.run_id}: {result.state.value}, {said}")
    if json:
        terminal.json({"schema_version": 1, "runs": [to_json(result) for result in results]})
    elif not chosen:
        terminal.data("no live runs")
    return 0


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's uid need not have a name
        return f"uid {os.getuid()}"
