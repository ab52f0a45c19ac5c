"""Lines for a display, made of raw output: framing, a bounded queue, the tail of a rank. No threads here."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_LINE_BYTES = 64 << 10
MAX_QUEUED_LINES = 2000
MAX_QUEUED_BYTES = 4 << 20
TAIL_BYTES = 64 << 10


class LineFramer:
    """Raw bytes in, lines for a terminal out: ``\\n``, ``\\r\\n`` and ``\\r`` end one; 64 KiB at most."""

    def __init__(self) -> None:
        self._rest = b""
        self.partial_since: float | None = None

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Return the lines that are complete now; a lone ``\\r`` keeps only its last bar of the batch."""
        text = self._rest + data
        # "\r" at the very end may be half of "\r\n"
        held = b"\r" if text.endswith(b"\r") else b""
        lines = text[: len(text) - len(held)].replace(b"\r\n", b"\n").split(b"\n")
        rest = lines.pop()
        out = [last_bar(line) for line in lines]
        if b"\r" in rest:
            rest = last_bar(rest)
        while len(rest) > MAX_LINE_BYTES:
            out.append(rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
        self._rest = rest + held
        if not self._rest:
            self.partial_since = None
        elif self.partial_since is None or out:
            self.partial_since = now
        return [piece for line in out for piece in _pieces(line)]

    def reset(self) -> None:
        """Forget the line that has no end yet: what follows it is not shown."""
        self._rest, self.partial_since = b"", None

    def flush(self) -> list[bytes]:
        """Return the line that has no end yet."""
        rest, self._rest, self.partial_since = self._rest.rstrip(b"\r"), b"", None
        return _pieces(last_bar(rest)) if rest else []


def last_bar(line: bytes) -> bytes:
    """Return what a terminal shows of a line that was overwritten with ``\\r``."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _pieces(line: bytes) -> list[bytes]:
    if len(line) <= MAX_LINE_BYTES:
        return [line]
    return [line[i : i + MAX_LINE_BYTES] for i in range(0, len(line), MAX_LINE_BYTES)]


class LineQueue:
    """Lines on their way from the pump's thread to the loop's: bounded, drops and counts, never blocks."""

    def __init__(self) -> None:
        self.dropped_lines = 0
        self._lines: deque[tuple[int, str, bytes]] = deque()
        self._size = 0
        self._untold: dict[tuple[int, str], int] = {}
        self._lock = threading.Lock()

    @property
    def is_full(self) -> bool:
        return len(self._lines) >= MAX_QUEUED_LINES or self._size >= MAX_QUEUED_BYTES

    def put(self, rank: int, stream: str, lines: Sequence[bytes]) -> bool:
        """Queue lines or count them as dropped; return whether the queue was empty and is not now."""
        with self._lock:
            was_empty = not self._lines
            for line in lines:
                if self.is_full:
                    self._count(rank, stream, 1)
                else:
                    self._lines.append((rank, stream, line))
                    self._size += len(line)
            return was_empty and bool(self._lines)

    def drop(self, rank: int, stream: str, num_lines: int) -> None:
        """Count lines that were not even framed."""
        with self._lock:
            self._count(rank, stream, num_lines)

    def take(self) -> list[tuple[int, str, bytes]]:
        """Return what is queued, and a line about what was dropped since the last time."""
        with self._lock:
            lines, self._size = list(self._lines), 0
            self._lines.clear()
            untold, self._untold = self._untold, {}
        for (rank, stream), count in untold.items():
            lines.append((rank, stream, b"[gpuctl: %d lines not shown, the log has them]" % count))
        return lines

    def _count(self, rank: int, stream: str, num_lines: int) -> None:
        self.dropped_lines += num_lines
        self._untold[rank, stream] = self._untold.get((rank, stream), 0) + num_lines


@dataclass
class Tail:
    """The last bytes of a rank, both streams in order of arrival."""

    chunks: deque[tuple[str, bytes]] = field(default_factory=deque)
    size: int = 0

    def add(self, stream: str, data: bytes) -> None:
        data = data[-TAIL_BYTES:]
        self.chunks.append((stream, data))
        self.size += len(data)
        while self.size - len(self.chunks[0][1]) >= TAIL_BYTES:
            self.size -= len(self.chunks.popleft()[1])

    def lines(self, n: int) -> list[str]:
        """Return the last ``n`` lines; a line of one stream is not torn by the other."""
        done: list[bytes] = []
        open_: dict[str, bytes] = {}
        for stream, data in list(self.chunks):
            *complete, rest = (open_.get(stream, b"") + data).split(b"\n")
            done += complete
            open_[stream] = rest
        done += [rest for rest in open_.values() if rest]
        return [last_bar(line).decode("utf-8", "backslashreplace") for line in done[-n:]] if n > 0 else []
