"""Ways to reach a node: one seam, :class:`Connection`, and a file per way behind it.

A remote command is always one constant string; every value travels as bytes on stdin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gpuctl.core.cluster import NodeSpec
from gpuctl.core.registry import TRANSPORTS


@dataclass(frozen=True)
class Completed:
    """What a finished command left behind. ``exit_code`` is 128+n for a signal, None if unknown."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    elapsed_s: float
    is_truncated: bool = False


class Stream(Protocol):
    """A command that is still running: a byte stream both ways."""

    def send(self, data: bytes) -> None:
        """Send all of ``data``; raises UnreachableError when the peer is gone."""

    def receive(self, max_bytes: int, timeout_s: float | None) -> bytes:
        """Return 1..max_bytes bytes, or b"" at end of stream.

        Raises TimeoutExpired when nothing came within ``timeout_s`` (None: wait for ever) and
        UnreachableError when the connection died.
        """

    def close_stdin(self) -> None:
        """Tell the command that no more input comes."""

    def stderr_tail(self) -> str:
        """Return the last 4 KiB the command wrote to stderr so far."""

    def exit_code(self, timeout_s: float) -> int | None:
        """Return the exit code once the command ended, None if it has not within ``timeout_s``."""

    def close(self) -> None:
        """Close the stream; a process that ignores end of stream is the remote side's business."""


class Connection(Protocol):
    """An authenticated connection to one node."""

    node: NodeSpec

    def run(
        self, command: str, *, stdin: bytes = b"", timeout_s: float, max_output_bytes: int = 4 << 20
    ) -> Completed:
        """Run ``command`` in the login shell and wait; raises TimeoutExpired, UnreachableError."""

    def open(self, command: str) -> Stream:
        """Start ``command`` and return its byte stream."""

    def close(self) -> None:
        """Close the connection and everything opened over it. Never raises."""


@dataclass(frozen=True)
class ConnectOptions:
    """What a connect needs besides the node: deadlines and the host key policy."""

    timeout_s: float = 10.0
    """Budget for resolve to session, in seconds; each phase is named in its error."""
    host_keys: str = "strict"


def connect(node: NodeSpec, options: ConnectOptions = ConnectOptions()) -> Connection:
    """Connect to ``node`` by its transport.

    Raises UnreachableError, HostKeyError, AuthError, TimeoutExpired, ConfigError.
    """
    connection: Connection = TRANSPORTS[node.transport].load()(node, options)
    return connection
