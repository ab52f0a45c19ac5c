"""The agent's end of the fork server: start it, ask for ranks, hear of their exits. Never blocks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuctl.agent import identity
from gpuctl.agent.forkserver import PACKET_BYTES
from gpuctl.agent.spawn import spawn_exec as spawn_exec  # both ways to start a rank, in one place

#: ``-c`` and not ``-m``: with that, the working directory would come first on the ranks' import path.
START_SERVER = (
    "import sys;sys.path[:]=[p for p in sys.path if p];"
    "from gpuctl.agent.forkserver import main;sys.exit(main(int(sys.argv[1])))"
)
#: What was asked of the server while it imports waits in the socket: some 200 bytes a rank.
SEND_BUFFER_BYTES = 1 << 20
CLOSE_LIMIT_S = 0.5


@dataclass(frozen=True)
class Ready:
    """The imports are done."""


@dataclass(frozen=True)
class ImportFailed:
    """The imports (or a fork) failed; the server ends."""

    traceback: str


@dataclass(frozen=True)
class Forked:
    """A rank exists."""

    rank: int
    pid: int


@dataclass(frozen=True)
class Exited:
    """A rank has ended; ``status`` as from waitpid."""

    rank: int
    pid: int
    status: int


@dataclass(frozen=True)
class Gone:
    """The server has ended, and its ranks with it (PR_SET_PDEATHSIG)."""


Event = Ready | ImportFailed | Forked | Exited | Gone


class ForkServer:
    """A running fork server. Use :meth:`start`; watch :meth:`fileno`, then :meth:`read_events`."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self._process = identity.identify(pid)
        self._sock = sock
        self._is_gone = False

    @classmethod
    def start(
        cls,
        argv_python: Sequence[str],
        env: Mapping[str, str],
        preload: Sequence[str],
        *,
        cwd: str | None,
        stderr_fd: int,
        keep_fds: Sequence[int] = (),
        before_exec: Callable[[], None] | None = None,
    ) -> ForkServer:
        """Exec the server; it starts to import ``preload`` at once. ``keep_fds`` reach every rank.

        Call it from the main thread; ``env`` must lead the interpreter to gpuctl. Raises OSError.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.setblocking(False)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            ours.send(json.dumps({"preload": list(preload)}).encode())
            pid = spawn_exec(
                [*argv_python, "-c", START_SERVER, str(theirs.fileno())],
                env,
                cwd,
                stdout_fd=stderr_fd,
                stderr_fd=stderr_fd,
                keep_fds=[theirs.fileno(), *keep_fds],
                oom_score_adj=0,
                before_exec=before_exec,
            )
        return cls(pid, ours)

    def fileno(self) -> int:
        """Return the descriptor to watch for reading."""
        return self._sock.fileno()

    def fork(
        self,
        rank: int,
        *,
        env: Mapping[str, str],
        module: str,
        function: str = "run",
        config: Mapping[str, Any],
        cwd: str | None,
        stdout_fd: int,
        stderr_fd: int,
        channel_fd: int,
        listener_fd: int | None = None,
    ) -> None:
        """Ask for a rank that runs ``module.function(config, worker)``; also before Ready.

        The descriptors may be closed when this returns. A server that has died answers with Gone.
        """
        body = {"env": dict(env), "module": module, "function": function, "config": config, "cwd": cwd}
        memory = os.memfd_create("gpuctl-rank", os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(memory), "wb") as file:
                file.write(json.dumps(body).encode())
            fds = [memory, stdout_fd, stderr_fd, channel_fd]
            fds += [] if listener_fd is None else [listener_fd]
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._sock, [json.dumps({"rank": rank}).encode()], fds)
        finally:
            os.close(memory)

    def read_events(self) -> list[Event]:
        """Return what the server has said since the last call; ends with Gone once."""
        events: list[Event] = []
        while not self._is_gone:
            try:
                data = self._sock.recv(PACKET_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            self._is_gone = not data
            events.append(_event(json.loads(data)) if data else Gone())
        return events

    def close(self) -> None:
        """End the server (and ranks that still run); call it when the ranks have ended."""
        self._is_gone = True
        self._sock.close()
        if self._process is not None:
            identity.send_signal(self._process, signal.SIGKILL)
        deadline = time.monotonic() + CLOSE_LIMIT_S
        with contextlib.suppress(ChildProcessError):  # the agent has reaped it already
            while os.waitpid(self.pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
                time.sleep(0.001)


def _event(fields: Mapping[str, Any]) -> Event:
    kinds = {"ready": Ready, "import_failed": ImportFailed, "forked": Forked, "exited": Exited}
    arguments = {name: value for name, value in fields.items() if name != "event"}
    event: Event = kinds[fields["event"]](**arguments)
    return event
