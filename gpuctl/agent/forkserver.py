"""The fork server: imports a bundled program's libraries once, forks its ranks, reports their exits.

Runs in a process of its own, exec'd by the agent with the node's environment, so that
``/proc/PID/environ`` of a rank shows the run's tag and load-time variables count. It imports, forks,
reaps and reports; it never kills and never opens a device: no ``torch.cuda.is_available()`` here, the
driver is initialised after the fork. When the agent goes (end of file) it goes, and its ranks with it.

Requests are packets of JSON with descriptors attached (SCM_RIGHTS): the body in a memfd, stdout, stderr,
the channel, and rank 0's listening socket. See :mod:`gpuctl.agent.forkclient` for the other end.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from gpuctl.agent import identity, spawn

PACKET_BYTES = 64 << 10
MAX_TRACEBACK_CHARS = 32 << 10
MAX_FDS = 8


class ForkServer:
    """The server's side of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._ranks: dict[int, int] = {}

    def serve(self, preload: Sequence[str]) -> int:
        """Import ``preload``, then fork on request until the agent closes; return the exit code."""
        try:
            for name in preload:
                importlib.import_module(name)
        except BaseException:  # SystemExit at import is a failed import too
            text = traceback.format_exc()[-MAX_TRACEBACK_CHARS:]
            self._say({"event": "import_failed", "traceback": text})
            return 1
        gc.collect()
        gc.freeze()  # a collection in a rank would copy every page of what was imported
        wake = self._watch_children()
        self._say({"event": "ready"})
        self._reap()
        while True:
            ready, _, _ = select.select([self._sock, wake], [], [])
            if wake in ready:
                wake.recv(4096)
                self._reap()
            if self._sock in ready and not self._take_request():
                return 0

    def _watch_children(self) -> socket.socket:
        read, write = socket.socketpair()
        write.setblocking(False)
        self._wake = write
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        self._wake_read = read
        return read

    def _take_request(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._sock, PACKET_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        request = json.loads(data)
        body = json.loads(_read_all(fds[0]))
        parent = os.getpid()
        with spawn.signals_blocked():
            try:
                pid = os.fork()
            except OSError:
                self._say({"event": "import_failed", "traceback": traceback.format_exc()})
                return False
            if pid == 0:
                self._leave_server()
                run_rank(parent, request["rank"], body, fds)
        for fd in fds:  # at once: another holder of a listening socket keeps a dead store's port accepting
            os.close(fd)
        self._ranks[pid] = request["rank"]
        self._say({"event": "forked", "rank": request["rank"], "pid": pid})
        return True

    def _leave_server(self) -> None:
        for sock in (self._sock, self._wake, self._wake_read):
            sock.close()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._ranks:
                self._say({"event": "exited", "rank": self._ranks.pop(pid), "pid": pid, "status": status})

    def _say(self, event: Mapping[str, Any]) -> None:
        self._sock.send(json.dumps(event).encode())


def run_rank(parent: int, rank: int, body: Mapping[str, Any], fds: Sequence[int]) -> NoReturn:
    """In the forked child: become rank ``rank``, run its program, leave without the server's clean-up."""
    code = 1
    try:
        spawn.become_rank(parent, spawn.OOM_SCORE_ADJ, fds[1], fds[2])
        os.close(fds[0])
        identity.set_name(f"gpuctl:r{rank}")
        _take_environment(body["env"], fds[3:])
        if body["cwd"] is not None:
            os.chdir(body["cwd"])
        _reseed()
        code = _run(body)
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        # whole multiples of 256 must not look like success
        os._exit(code if 0 <= code <= 255 else (code & 0xFF) or 1)


def _run(body: Mapping[str, Any]) -> int:
    from gpuctl.agent.worker import Worker, run_program

    def run(config: Mapping[str, Any], worker: Worker) -> None:
        # imported here, so that its failure is this rank's error with a traceback
        getattr(importlib.import_module(body["module"]), body["function"])(config, worker)

    return run_program(run, body["config"])


def _take_environment(env: Mapping[str, str], sockets: Sequence[int]) -> None:
    from gpuctl.agent.worker import CHANNEL_FD, LISTENER_FD

    os.environ.clear()
    os.environ.update(env)
    for name, fd in zip((CHANNEL_FD, LISTENER_FD), sockets, strict=False):
        os.environ[name] = str(fd)


def _reseed() -> None:
    """Ranks share the server's state: without this all would draw the same numbers.

    ``random`` reseeds itself after a fork; torch's generators start from a constant in any process.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass  # nobody reads any more


def _read_all(fd: int) -> bytes:
    os.lseek(fd, 0, os.SEEK_SET)
    with os.fdopen(os.dup(fd), "rb") as file:
        return file.read()


def main(fd: int) -> int:
    """Serve the agent on socket ``fd``; the first packet names what to import."""
    identity.set_name("gpuctl:fork")
    sock = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    try:
        hello = sock.recv(PACKET_BYTES)
        return ForkServer(sock).serve(json.loads(hello)["preload"]) if hello else 0
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the agent closed while something was on its way


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
