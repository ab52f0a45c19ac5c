"""A link: frames over a non-blocking socket, plain (unix) or TLS, inside the agent's loop."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpuctl.agent.frames import Decoder, Frame, encode
from gpuctl.agent.loop import Loop, Timer
from gpuctl.errors import ProtocolError

if TYPE_CHECKING:
    import ssl

#: A peer that does not read loses its log frames first, then the link.
MAX_PENDING_LOG_BYTES = 1 << 20
MAX_PENDING_BYTES = 16 << 20


class Link:
    """One peer. ``on_frame(link, frame)`` for each frame, ``on_close(link, reason)`` once."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        on_frame: Callable[[Link, Frame], None],
        on_close: Callable[[Link, str], None],
        *,
        handshake_s: float | None = None,
    ) -> None:
        sock.setblocking(False)
        self.loop = loop
        self.sock = sock
        self.name = "peer"
        self.on_frame = on_frame
        self.on_close = on_close
        self.heard_at = time.monotonic()
        self.dropped_log_frames = 0
        self.is_closed = False
        self._decoder = Decoder()
        self._out = bytearray()
        self._is_handshaking = handshake_s is not None
        self._on_ready: Callable[[Link], None] | None = None
        self._deadline: Timer | None = None
        if handshake_s is not None:
            self._deadline = loop.call_later(handshake_s, lambda: self.close("the handshake took too long"))
        self._want_write = self._is_handshaking
        self._update()

    def when_ready(self, call: Callable[[Link], None]) -> None:
        """Call once when the TLS handshake is over."""
        self._on_ready = call

    def send(self, frame: Frame) -> None:
        """Queue ``frame``. Log frames are dropped when the peer is slow; others close a stuck link."""
        if self.is_closed:
            return
        if frame.type == "log" and len(self._out) > MAX_PENDING_LOG_BYTES:
            self.dropped_log_frames += 1
            return
        self._out += encode(frame)
        if len(self._out) > MAX_PENDING_BYTES:
            self.close("the peer does not read")
            return
        if not self._is_handshaking:
            self._write()

    @property
    def is_drained(self) -> bool:
        """Whether everything queued has been handed to the kernel."""
        return self.is_closed or not self._out

    def close(self, reason: str = "closed here") -> None:
        """Close the socket and report ``reason`` once."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._deadline is not None:
            self._deadline.cancel()
        self.loop.forget(self.sock.fileno())
        self.sock.close()
        self.on_close(self, reason)

    def pump(self) -> None:
        """Read what is there already, without waiting for the loop."""
        if not self.is_closed and not self._is_handshaking:
            self._read()

    def _update(self) -> None:
        if not self.is_closed:
            self.loop.watch(self.sock.fileno(), self._readable, self._writable if self._want_write else None)

    def _readable(self) -> None:
        if self._is_handshaking:
            self._handshake()
        else:
            self._read()

    def _writable(self) -> None:
        if self._is_handshaking:
            self._handshake()
        else:
            self._write()

    def _handshake(self) -> None:
        import ssl

        tls: ssl.SSLSocket = self.sock  # type: ignore[assignment]
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            self._set_want_write(False)
        except ssl.SSLWantWriteError:
            self._set_want_write(True)
        except OSError as exc:
            self.close(f"TLS handshake failed: {exc}")
        else:
            self._is_handshaking = False
            if self._deadline is not None:
                self._deadline.cancel()
            self._set_want_write(False)
            if self._on_ready is not None:
                self._on_ready(self)
            self._write()
            self._read()

    def _read(self) -> None:
        # TLS keeps decrypted bytes the selector does not see, so read until it would block; bounded,
        # so that one peer cannot hold the loop
        for _ in range(64):
            try:
                data = self.sock.recv(1 << 16)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as exc:
                if self._would_block(exc):
                    return
                self.close(f"connection lost: {exc.strerror or exc}")
                return
            if not data:
                self.close("the peer closed the connection")
                return
            self.heard_at = time.monotonic()
            if not self._deliver(data):
                return
        self.loop.call_soon(self._read_more)

    def _read_more(self) -> None:
        if not self.is_closed:
            self._read()

    def _deliver(self, data: bytes) -> bool:
        try:
            for frame in self._decoder.feed(data):
                self.on_frame(self, frame)
                if self.is_closed:
                    return False
        except ProtocolError as exc:
            self.close(f"not the gpuctl protocol: {exc.message}")
            return False
        return True

    def _write(self) -> None:
        while self._out and not self.is_closed:
            try:
                sent = self.sock.send(memoryview(self._out)[: 1 << 18])
            except (BlockingIOError, InterruptedError):
                self._set_want_write(True)
                return
            except OSError as exc:
                if self._would_block(exc):
                    self._set_want_write(True)
                    return
                self.close(f"connection lost: {exc.strerror or exc}")
                return
            del self._out[:sent]
        self._set_want_write(False)

    @staticmethod
    def _would_block(exc: OSError) -> bool:
        # by name: importing ssl costs a one-node agent 4 MiB for nothing
        return type(exc).__name__ in ("SSLWantReadError", "SSLWantWriteError")

    def _set_want_write(self, wanted: bool) -> None:
        if wanted != self._want_write:
            self._want_write = wanted
            self._update()
