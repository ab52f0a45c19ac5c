"""The transport ``local``: this machine, without SSH. Commands run in a session of their own."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time

from gpuctl.core.cluster import NodeSpec
from gpuctl.errors import TimeoutExpired, UnreachableError
from gpuctl.transports import Completed, ConnectOptions

STDERR_TAIL_BYTES = 4096


class LocalStream:
    """A child process as a byte stream."""

    def __init__(self, command: str, host: str) -> None:
        self._host = host
        self._tail = b""
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # the terminal's Ctrl-C is for gpuctl alone
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin, self._stdout, self._stderr = (
            self._process.stdin,
            self._process.stdout,
            self._process.stderr,
        )
        # a reader of its own: a full stderr pipe must not stop the command
        self._reader = threading.Thread(target=self._read_stderr, name="stderr", daemon=True)
        self._reader.start()

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._stdin.fileno(), view) :]
        except (OSError, ValueError) as exc:
            raise UnreachableError(
                f"{self._host}: the command does not read any more", cause=str(exc)
            ) from exc

    def receive(self, max_bytes: int, timeout_s: float | None) -> bytes:
        ready, _, _ = select.select([self._stdout], [], [], timeout_s)
        if not ready:
            raise TimeoutExpired(f"{self._host}: nothing came within {timeout_s:g} s")
        return os.read(self._stdout.fileno(), max_bytes)

    def close_stdin(self) -> None:
        with contextlib.suppress(OSError):
            self._stdin.close()

    def stderr_tail(self) -> str:
        if self._process.poll() is not None:
            self._reader.join(0.2)
        return self._tail.decode("utf-8", "replace")

    def exit_code(self, timeout_s: float) -> int | None:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        for file in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                file.close()
        threading.Thread(target=self._process.wait, daemon=True).start()  # no zombie is left

    def kill(self) -> None:
        """End the command and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read_stderr(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := os.read(self._stderr.fileno(), 1 << 16):
                self._tail = (self._tail + data)[-STDERR_TAIL_BYTES:]
        self._stderr.close()


class LocalConnection:
    """This machine as a node."""

    def __init__(self, node: NodeSpec) -> None:
        self.node = node

    def run(
        self, command: str, *, stdin: bytes = b"", timeout_s: float, max_output_bytes: int = 4 << 20
    ) -> Completed:
        began = time.monotonic()
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired as exc:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise TimeoutExpired(f"{self.node.host}: the command took longer than {timeout_s:g} s") from exc
        code = process.returncode
        return Completed(
            code if code >= 0 else 128 - code,
            out[:max_output_bytes],
            err[:max_output_bytes],
            time.monotonic() - began,
            len(out) > max_output_bytes,
        )

    def open(self, command: str) -> LocalStream:
        return LocalStream(command, self.node.host)

    def close(self) -> None:
        """Nothing is held."""


def connect(node: NodeSpec, _options: ConnectOptions | None = None) -> LocalConnection:
    """Return this machine as a node; nothing can fail."""
    return LocalConnection(node)
