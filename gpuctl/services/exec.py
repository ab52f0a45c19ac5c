"""``gpuctl exec``: one command on every node, its output as data."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuctl.services.session import Session
from gpuctl.transports import Completed, Connection
from gpuctl.transports.fanout import GroupResult, NodeResult, fanout

COMMAND = "exec /bin/sh -s"


@dataclass(frozen=True)
class ExecResult:
    """What a command left behind on one node."""

    host: str
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    elapsed_s: float
    is_truncated: bool


def exec_on_nodes(
    session: Session,
    argv: Sequence[str],
    *,
    timeout_s: float,
    on_result: Callable[[NodeResult[ExecResult]], None] | None = None,
) -> GroupResult[ExecResult]:
    """Run ``argv`` on every connected node, after its ``activate`` line and in its ``workdir``.

    The words arrive as they are: they travel on stdin, quoted for sh, not through the login shell.
    """

    def run_one(connection: Connection) -> ExecResult:
        node = connection.node
        lines = [f"{node.activate} >&2" if node.activate else ":"]
        lines += [f"cd {_path(node.workdir)} || exit 1"] if node.workdir else []
        lines += [f"exec {shlex.join(argv)} </dev/null"]
        done: Completed = connection.run(
            COMMAND, stdin="\n".join(lines).encode() + b"\n", timeout_s=timeout_s
        )
        return ExecResult(
            node.host, done.exit_code, done.stdout, done.stderr, done.elapsed_s, done.is_truncated
        )

    return fanout(session.connections, run_one, timeout_s=timeout_s + 5, on_result=on_result)


def _path(path: str) -> str:
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)
