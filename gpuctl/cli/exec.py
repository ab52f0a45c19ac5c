"""``gpuctl exec``: one command on every node, identical answers folded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gpuctl.cli import options
from gpuctl.cli.render import Terminal
from gpuctl.core.nodeset import fold
from gpuctl.errors import UsageError

if TYPE_CHECKING:
    from gpuctl.services.exec import ExecResult

EPILOG = """\b
Examples:
  gpuctl exec -- nvidia-smi -L
  gpuctl exec --nodelist gpu[01-04] -- uptime
"""


def command(
    ctx: typer.Context,
    timeout: Annotated[float, typer.Option("--timeout", "-t", help="Seconds for each node.", min=0.1)] = 60.0,
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
    """Run a command on every node. Exit code 1 when it failed anywhere, 3 when a node could not be asked."""
    from gpuctl.services.exec import exec_on_nodes
    from gpuctl.services.session import open_session

    terminal = options.terminal(json, no_color, quiet, verbose)
    argv = ctx.obj.theirs
    if not argv:
        raise UsageError("which command?", hint="`gpuctl exec -- uptime`")
    cluster = options.Selection(file, hostfile, nodelist, exclude, nnodes).load()
    with open_session(cluster, is_partial=True) as session:
        group = exec_on_nodes(session, argv, timeout_s=timeout)
        results: dict[str, ExecResult] = group.values()
        errors = {**session.failures, **group.failures}
    if json:
        _print_json(results, {k: e.message for k, e in errors.items()}, terminal)
    else:
        _print_folded(results, terminal)
        for label, error in errors.items():
            terminal.warn(error.message if error.message.startswith(label) else f"{label}: {error.message}")
    if errors:
        return 3
    return 1 if any(result.exit_code != 0 for result in results.values()) else 0


def _print_json(results: dict[str, ExecResult], errors: dict[str, str], terminal: Terminal) -> None:
    nodes = [
        {
            "host": label,
            "exit_code": r.exit_code,
            "stdout": r.stdout.decode("utf-8", "backslashreplace"),
            "stderr": r.stderr.decode("utf-8", "backslashreplace"),
            "elapsed_s": round(r.elapsed_s, 3),
            "is_truncated": r.is_truncated,
        }
        for label, r in results.items()
    ]
    terminal.json({"schema_version": 1, "nodes": nodes, "errors": errors})


def _print_folded(results: dict[str, ExecResult], terminal: Terminal) -> None:
    groups: dict[tuple[bytes, bytes, int | None], list[str]] = {}
    for label, r in results.items():
        groups.setdefault((r.stdout, r.stderr, r.exit_code), []).append(label)
    for (stdout, stderr, code), labels in groups.items():
        failed = "" if code == 0 else f" (exit code {code})"
        terminal.data(f"{fold(labels)}:{failed}")
        for stream, data in (("out", stdout), ("err", stderr)):
            for line in data.splitlines():
                terminal.raw(b"  " + line, stream)
