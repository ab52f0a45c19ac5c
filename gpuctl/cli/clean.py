"""``gpuctl clean``: remove finished runs, bundles and data from the nodes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gpuctl.cli import options
from gpuctl.cli.render import bytes_text
from gpuctl.core.codec import to_json
from gpuctl.errors import UsageError

EPILOG = """\b
Examples:
  gpuctl clean
  gpuctl clean -y
"""


def command(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go.")] = False,
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
    """Remove finished runs with their logs, and bundles and data that nobody uses. Checkpoints stay."""
    from gpuctl.services.runs import clean
    from gpuctl.services.session import open_session

    terminal = options.terminal(json, no_color, quiet, verbose)
    if not yes and not dry_run and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "clean removes files on the nodes", hint="`gpuctl clean -y`, or look first with --dry-run"
        )
    cluster = options.Selection(file, hostfile, nodelist, exclude, nnodes).load()
    with open_session(cluster) as session:
        if not yes and not dry_run:
            found = clean(session.connections, is_dry_run=True)
            found.raise_for_failures("cannot be cleaned")
            count = len({run for result in found.values().values() for run in result.removed})
            if not typer.confirm(f"remove {count} finished runs on {len(session.connections)} nodes?"):
                return 1
        group = clean(session.connections, is_dry_run=dry_run)
        group.raise_for_failures("cannot be cleaned")
    results = group.values()
    if json:
        nodes = {label: to_json(result) for label, result in results.items()}
        terminal.json({"schema_version": 1, "dry_run": dry_run, "nodes": nodes})
        return 0
    terminal.table(
        ("node", "would go" if dry_run else "removed", "kept (live)", "bytes"),
        [(label, len(r.removed), len(r.kept), bytes_text(r.freed_bytes)) for label, r in results.items()],
    )
    return 0
