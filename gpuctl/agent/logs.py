"""The ranks' output: raw bytes to capped files, lines for display. One thread reads all pipes.

Files keep the bytes as they came, head and tail: beyond the cap the middle is punched out as a hole, so
that byte offsets stay true for whoever follows the file. A full disk costs log bytes, never the run;
display lines go through a bounded queue that drops and counts. A rank waits for nothing but this
thread's next read.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

CAP_BYTES = 64 << 20
#: The part at the front that is kept: start-up, versions, the first error.
HEAD_FRACTION = 0.5
#: Holes are punched in whole steps, not at every write.
PUNCH_STEP_BYTES = 1 << 20
READ_BYTES = 256 << 10
#: Room for a burst while this thread waits for the interpreter or the disk (Linux default: 64 KiB).
PIPE_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 10
#: A line without an end (a prompt, a progress bar) is shown after this.
PARTIAL_AFTER_S = 0.2
MAX_QUEUED_LINES = 2000
TAIL_BYTES = 64 << 10
RETRY_DISK_S = 1.0
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2  # <linux/falloc.h>


class CappedFile:
    """An append-only file of at most ``cap_bytes`` on the disk: the head and the tail of what was written."""

    def __init__(self, path: Path, cap_bytes: int = CAP_BYTES) -> None:
        self.path = path
        self.dropped_bytes = 0
        """Bytes that the disk did not take."""
        self.punched_bytes = 0
        """Bytes that were written and given up again, in the middle."""
        self._head = int(cap_bytes * HEAD_FRACTION)
        self._tail = cap_bytes - self._head
        self._size = 0
        self._fd = -1
        self._retry_at = 0.0

    def write(self, data: bytes) -> OSError | None:
        """Append ``data``; return the error when (part of) it could not be written."""
        if time.monotonic() < self._retry_at:
            self.dropped_bytes += len(data)
            return None
        view = memoryview(data)
        try:
            self._open()
            while view:
                written = os.write(self._fd, view)
                self._size += written
                view = view[written:]
            self._give_up_the_middle()
        except OSError as exc:
            self.dropped_bytes += len(view)
            self._retry_at = time.monotonic() + RETRY_DISK_S
            return exc
        return None

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        if self._fd < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(self.path, flags, 0o600)
            self._size = os.fstat(self._fd).st_size

    def _give_up_the_middle(self) -> None:
        start = self._head + self.punched_bytes
        length = (self._size - self._tail - start) // PUNCH_STEP_BYTES * PUNCH_STEP_BYTES
        if length <= 0:
            return
        try:
            punch_hole(self._fd, start, length)
            self.punched_bytes += length
        except OSError as exc:
            if exc.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            # NFS before 4.2: begin the tail again after the head; offsets there are not kept
            os.ftruncate(self._fd, self._head)
            self.dropped_bytes += self._size - self._head
            self._size = self._head


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Give the blocks of a range back; its bytes read as zeros. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    fallocate = getattr(libc, "fallocate64", libc.fallocate)
    arguments = (ctypes.c_int64(offset), ctypes.c_int64(length))
    if fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, *arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


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


@dataclass(eq=False)
class Stream:
    """One pipe of one rank."""

    rank: int
    name: str
    fd: int
    file: CappedFile
    framer: LineFramer = field(default_factory=LineFramer)


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


class LogPump:
    """The thread that empties the ranks' pipes.

    ``on_line(rank, stream, line)`` is called by :meth:`deliver`, on the caller's thread; ``wake`` is
    called on the pump's thread when there is something to deliver. Lines are framed for the ranks that
    ``is_shown`` names: the others cost no more than a write and a copy of their tail.
    """

    def __init__(
        self,
        on_line: Callable[[int, str, bytes], None],
        wake: Callable[[], None],
        *,
        is_shown: Callable[[int], bool] = lambda rank: rank == 0,
        cap_bytes: int = CAP_BYTES,
    ) -> None:
        self.dropped_lines = 0
        """Display lines that a slow client cost; the files have them."""
        self._on_line = on_line
        self._wake_caller = wake
        self._is_shown = is_shown
        self._cap_bytes = cap_bytes
        self._selector = selectors.DefaultSelector()
        self._commands: deque[Callable[[], None]] = deque()
        self._queue: deque[tuple[int, str, bytes]] = deque()
        self._tails: dict[int, Tail] = {}
        self._streams: set[Stream] = set()
        self._has_complained = False
        self._is_closing = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self._thread.start()

    # -- called from the loop's thread

    def add(self, rank: int, stream: str, read_fd: int, path: Path) -> None:
        """Read ``read_fd`` (taken over, closed here) into ``path`` until its end."""
        os.set_blocking(read_fd, False)
        with contextlib.suppress(OSError):  # above the user's pipe quota (pipe(7))
            fcntl.fcntl(read_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._tails.setdefault(rank, Tail())
        new = Stream(rank, stream, read_fd, CappedFile(path, self._cap_bytes))
        self._command(lambda: self._watch(new))

    def deliver(self) -> None:
        """Call ``on_line`` for what is queued."""
        for _ in range(len(self._queue)):
            self._on_line(*self._queue.popleft())

    def tail(self, rank: int, n: int, timeout_s: float = 0.2) -> list[str]:
        """Return the last ``n`` lines of ``rank``, with what it wrote just before it died."""
        self._sync(timeout_s)
        known = self._tails.get(rank)
        return known.lines(n) if known is not None else []

    def close(self, deadline_s: float) -> None:
        """Read what is in the pipes and end the thread, within ``deadline_s`` seconds."""
        self._command(self._begin_close)
        self._thread.join(deadline_s)

    def _command(self, call: Callable[[], None]) -> None:
        self._commands.append(call)
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"x")

    def _sync(self, timeout_s: float) -> None:
        """Wait until everything that is in the pipes now has been read."""
        done = threading.Event()

        def drain() -> None:
            for stream in list(self._streams):
                self._read(stream)
            done.set()

        if self._thread.is_alive():
            self._command(drain)
            done.wait(timeout_s)

    # -- the thread

    def _run(self) -> None:
        while not self._is_closing:
            for key, _ in self._selector.select(self._partial_wait()):
                if key.data is None:
                    self._obey()
                elif key.data in self._streams:
                    self._read(key.data)
            self._flush_partials()
        for stream in list(self._streams):
            while stream in self._streams and self._read(stream):
                pass
            self._forget(stream)
        self._notify()
        self._selector.close()
        os.close(self._wake_read)

    def _obey(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass
        while self._commands:
            self._commands.popleft()()

    def _watch(self, stream: Stream) -> None:
        self._streams.add(stream)
        self._selector.register(stream.fd, selectors.EVENT_READ, stream)

    def _begin_close(self) -> None:
        self._is_closing = True

    def _read(self, stream: Stream) -> bool:
        """Read once; False at the end or when there is nothing."""
        try:
            data = os.read(stream.fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._forget(stream)
            return False
        problem = stream.file.write(data)
        if problem is not None:
            self._complain(stream, problem)
        self._tails[stream.rank].add(stream.name, data)
        if self._is_shown(stream.rank):
            self._show(stream, data)
        return True

    def _forget(self, stream: Stream) -> None:
        self._show_lines(stream, stream.framer.flush())
        self._streams.discard(stream)
        self._selector.unregister(stream.fd)
        os.close(stream.fd)
        stream.file.close()
        self._notify()

    def _show(self, stream: Stream, data: bytes) -> None:
        room = MAX_QUEUED_LINES - len(self._queue)
        if room <= 0:  # a flood: count, do not even split
            self.dropped_lines += data.count(b"\n")
            return
        self._show_lines(stream, stream.framer.feed(data, time.monotonic()))
        self._notify()

    def _show_lines(self, stream: Stream, lines: list[bytes]) -> None:
        room = max(0, MAX_QUEUED_LINES - len(self._queue))
        self._queue.extend((stream.rank, stream.name, line) for line in lines[:room])
        self.dropped_lines += len(lines[room:])

    def _notify(self) -> None:
        if self._queue:
            self._wake_caller()

    def _partial_wait(self) -> float | None:
        since = [s.framer.partial_since for s in self._streams if s.framer.partial_since is not None]
        return max(0.0, min(since) + PARTIAL_AFTER_S - time.monotonic()) if since else None

    def _flush_partials(self) -> None:
        now = time.monotonic()
        for stream in self._streams:
            since = stream.framer.partial_since
            if since is not None and now - since >= PARTIAL_AFTER_S:
                self._show_lines(stream, stream.framer.flush())
                self._notify()

    def _complain(self, stream: Stream, problem: OSError) -> None:
        if self._has_complained:
            return
        self._has_complained = True
        text = f"gpuctl: cannot write {stream.file.path}: {problem.strerror}; the run goes on without its log"
        print(text, file=sys.stderr, flush=True)
        self._queue.append((stream.rank, stream.name, text.encode()))
        self._notify()
