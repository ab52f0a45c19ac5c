"""``gpuctl init``: write a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpuctl.cli import options
from gpuctl.cli.render import count_text
from gpuctl.core.codec import to_json

EPILOG = """\b
Examples:
  gpuctl init --nodelist gpu[01-04]
  gpuctl init --from hostfile
  gpuctl init --template local
"""


def command(
    nodelist: Annotated[str | None, typer.Option("--nodelist", help="The nodes: gpu[01-04],gpu07.")] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="DeepSpeed or Open MPI hostfile, Slurm node list, ssh_config."),
    ] = None,
    template: Annotated[str | None, typer.Option("--template", help="Start from a template.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    file: Annotated[Path, typer.Option("--file", "-f", help="The file to write.")] = Path("cluster.yaml"),
    json: options.Json = False,
    no_color: options.NoColor = False,
    verbose: options.Verbose = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Write cluster.yaml from a node set, a hostfile, an ssh_config or a template."""
    from gpuctl.services.init import init

    terminal = options.terminal(json, no_color, quiet, verbose)
    result = init(file, nodelist=nodelist, source=source, template=template, force=force)
    if json:
        terminal.json({"schema_version": 1, **to_json(result)})
        return 0
    if str(file) == "-":
        terminal.data(result.text)
        return 0
    for note in result.notes:
        terminal.warn(note)
    nodes = count_text(result.num_nodes, "node")
    terminal.data(f"wrote {result.path} with {nodes} ({result.nodes}) from {result.source}")
    terminal.note("next: `gpuctl status` looks at the nodes, `gpuctl plan` shows a launch")
    return 0
