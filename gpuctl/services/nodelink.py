"""The client's end of a bridge: bootstrap over a transport's stream, then frames."""

from __future__ import annotations

import inspect
import json
import secrets
import time
from collections import deque
from dataclasses import dataclass

from gpuctl.agent import bootstrap
from gpuctl.agent.frames import Decoder, Frame, encode
from gpuctl.errors import AgentError, ProtocolError, TimeoutExpired, UnreachableError
from gpuctl.services.bundle import Archive, node_bundle
from gpuctl.transports import Connection, Stream

#: Shell noise before the bootstrap's answer that is still searched for it.
MAX_NOISE_BYTES = 1 << 20
UPLOAD_BYTES = 1 << 20


@dataclass(frozen=True)
class Interpreter:
    """How Python is started on a node: keys of the cluster file."""

    python: str = "python3"
    activate: str | None = None
    state_dir: str | None = None


class NodeLink:
    """Frames to and from one node. Not for use by several threads at once, sending apart."""

    def __init__(self, stream: Stream, host: str) -> None:
        self.host = host
        self.home = ""
        self._stream = stream
        self._decoder = Decoder()
        self._inbox: deque[Frame] = deque()

    @classmethod
    def open(cls, connection: Connection, interpreter: Interpreter, *, timeout_s: float) -> NodeLink:
        """Start the bridge on a node, carrying the bundle over where it is missing.

        Raises AgentError (no interpreter, too old, no place for files), TimeoutExpired,
        UnreachableError.
        """
        stream = connection.open(bootstrap.COMMAND)
        link = cls(stream, connection.node.host)
        try:
            link._bootstrap(interpreter, time.monotonic() + timeout_s)
        except BaseException:
            stream.close()
            raise
        return link

    def send(self, frame: Frame) -> None:
        """Send a frame; raises UnreachableError."""
        self._stream.send(encode(frame))

    def receive(self, timeout_s: float | None) -> Frame:
        """Return the next frame; raises TimeoutExpired, AgentError at end of stream."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._inbox:
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            data = self._stream.receive(1 << 18, wait)
            if not data:
                raise AgentError(
                    f"{self.host}: the agent's stream ended", cause=self._stream.stderr_tail() or None
                )
            self._inbox.extend(self._decoder.feed(data))
        return self._inbox.popleft()

    def request(self, frame: Frame, reply: str, *, timeout_s: float) -> Frame:
        """Send a frame and return the answer of type ``reply``; a refusal is an AgentError."""
        self.send(frame)
        return self.wait_for(reply, timeout_s=timeout_s)

    def wait_for(self, reply: str, *, timeout_s: float) -> Frame:
        """Return the next frame of type ``reply``; frames before it are dropped."""
        deadline = time.monotonic() + timeout_s
        while True:
            answer = self.receive(max(0.0, deadline - time.monotonic()))
            if answer.type == reply:
                return answer
            if answer.type == "refused":
                raise AgentError(f"{self.host}: {'; '.join(answer.get('reasons', ['refused']))}")

    def upload(self, kind: str, archive: Archive, *, timeout_s: float) -> None:
        """Carry a blob over (kind: sync or data), verified there."""
        parts = [archive.data[i : i + UPLOAD_BYTES] for i in range(0, len(archive.data), UPLOAD_BYTES)] or [
            b""
        ]
        for i, part in enumerate(parts):
            fields = {"kind": kind, "sha256": archive.sha256, "is_last": i == len(parts) - 1}
            self.send(Frame("put_blob", fields, part))
        self.wait_for("put_blob", timeout_s=timeout_s)

    def close(self) -> None:
        """Close the stream; the bridge ends, the agent stays."""
        self._stream.close()

    # -- bootstrap

    def _bootstrap(self, interpreter: Interpreter, deadline: float) -> None:
        bundle, nonce = node_bundle(), secrets.token_hex(16)
        source = inspect.getsource(bootstrap).encode()
        parameters = {"nonce": nonce, "bundle": bundle.sha256, "state_dir": interpreter.state_dir}
        activate = (interpreter.activate or ":").replace("\n", " ")
        self._stream.send(
            f"{activate}\n{interpreter.python}\n{len(source):08d}".encode()
            + source
            + json.dumps(parameters).encode()
            + b"\n"
        )
        noise = _Noise(self, nonce, interpreter, deadline)
        answer = noise.answer()
        if not answer.get("have_bundle"):
            self._stream.send(f"{len(bundle.data)}\n".encode() + bundle.data)
        noise.answer()
        self._inbox.extend(self._decoder.feed(noise.rest()))
        self.home = str(self.wait_for("hello", timeout_s=max(0.1, deadline - time.monotonic())).get("home"))


class _Noise:
    """Finds the bootstrap's answers between whatever the login shell printed."""

    def __init__(self, link: NodeLink, nonce: str, interpreter: Interpreter, deadline: float) -> None:
        self._link = link
        self._marker = f"\n{nonce} ".encode()
        self._interpreter = interpreter
        self._deadline = deadline
        self._buffer = b""

    def answer(self) -> dict[str, object]:
        """Return the next answer line; raises AgentError with what the node said instead."""
        while True:
            start = self._buffer.find(self._marker)
            end = self._buffer.find(b"\n", start + len(self._marker)) if start >= 0 else -1
            if end >= 0:
                line = self._buffer[start + len(self._marker) : end]
                self._buffer = self._buffer[end + 1 :]
                return self._checked(json.loads(line))
            if len(self._buffer) > MAX_NOISE_BYTES:
                raise ProtocolError(f"{self._link.host}: the login shell prints without end")
            self._more()

    def rest(self) -> bytes:
        """Return what followed the last answer: frames."""
        return self._buffer

    def _checked(self, answer: dict[str, object]) -> dict[str, object]:
        if "error" in answer:
            raise AgentError(f"{self._link.host}: the agent cannot start", cause=str(answer["error"]))
        return answer

    def _more(self) -> None:
        host = self._link.host
        try:
            data = self._link._stream.receive(1 << 16, max(0.0, self._deadline - time.monotonic()))
        except TimeoutExpired as exc:
            raise TimeoutExpired(
                f"{host}: the session is open but Python did not answer",
                cause=self._said() or None,
                hint=f"try `ssh {host} {self._interpreter.python} -V`",
            ) from exc
        if not data:
            self._ended()
        self._buffer += data

    def _ended(self) -> None:
        host, python = self._link.host, self._interpreter.python
        code = self._link._stream.exit_code(2.0)
        if code in (126, 127):
            raise AgentError(
                f"{host}: no interpreter {python}",
                cause=self._said() or f"exit code {code}",
                hint="set `python:` (or `activate:`) for this node in the cluster file",
            )
        if code is None:
            raise UnreachableError(
                f"{host}: the connection ended during the bootstrap", cause=self._said() or None
            )
        raise AgentError(
            f"{host}: {python} ended with code {code} during the bootstrap", cause=self._said() or None
        )

    def _said(self) -> str:
        said = self._link._stream.stderr_tail().strip() or self._buffer.decode("utf-8", "replace").strip()
        return "\n".join(said.splitlines()[-10:])
