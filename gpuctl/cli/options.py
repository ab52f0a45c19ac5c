"""The options that every verb shares, and what they mean together."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuctl.cli.render import Terminal
from gpuctl.errors import UsageError

if TYPE_CHECKING:
    from gpuctl.core.cluster import Cluster, NodeSpec


File = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="Cluster file; - is stdin. Default: $GPUCTL_CLUSTER, ./cluster.yaml."),
]
LongFile = Annotated[
    Path | None,
    typer.Option("--file", help="Cluster file; - is stdin. Default: $GPUCTL_CLUSTER, ./cluster.yaml."),
]
Hostfile = Annotated[
    str | None,
    typer.Option("--hostfile", "-H", help="DeepSpeed or Open MPI hostfile, or host:slots,host:slots."),
]
Nodelist = Annotated[str | None, typer.Option("--nodelist", help="Only these nodes: gpu[01-04],gpu07.")]
Exclude = Annotated[str | None, typer.Option("--exclude", help="Without these nodes.")]
Nnodes = Annotated[int | None, typer.Option("--nnodes", help="Only the first N nodes.", min=1)]
NprocPerNode = Annotated[int | None, typer.Option("--nproc-per-node", help="Ranks on each node.", min=1)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NoColor = Annotated[bool, typer.Option("--no-color", help="No colours.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say only what was asked for, and errors.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


@dataclass(frozen=True)
class Selection:
    """Which nodes a command is about."""

    file: Path | None = None
    hostfile: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    nnodes: int | None = None

    def load(self) -> Cluster:
        """Read the cluster file (or hostfile) and keep the chosen nodes; raises ConfigError, UsageError."""
        from gpuctl.config.cluster import load_cluster, select_nodes
        from gpuctl.config.hostfile import load_hostfile

        if self.hostfile is not None and self.file is not None:
            raise UsageError("--file and --hostfile both name the nodes", hint="give one of them")
        cluster = load_hostfile(self.hostfile) if self.hostfile is not None else load_cluster(self.file)
        chosen = select_nodes(cluster, self.nodelist, self.exclude, self.nnodes)
        return replace(chosen, nodes=tuple(_local_defaults(node) for node in chosen.nodes))


def _local_defaults(node: NodeSpec) -> NodeSpec:
    """Fill in what a user expects of this machine: gpuctl's own interpreter, the folder they stand in."""
    if node.transport != "local":
        return node
    python = node.python or (None if node.activate else sys.executable)
    return replace(node, python=python, workdir=node.workdir or str(Path.cwd()))


def terminal(json: bool, no_color: bool, quiet: bool = False, verbose: bool = False) -> Terminal:
    """Return where this command's words go."""
    return Terminal(is_json=json, no_color=no_color, is_quiet=quiet, is_verbose=verbose)
