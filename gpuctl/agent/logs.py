"""The ranks' output: one thread reads all pipes, fills the files, frames lines for display.

Files keep the bytes as they came (:mod:`gpuctl.agent.logfile`); display lines go through a bounded queue
that drops and counts. A rank waits for nothing but this thread's next read.
"""

from __future__ import annotations

import contextlib
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

from gpuctl.agent.logfile import CAP_BYTES, CappedFile
from gpuctl.agent.loglines import LineFramer, LineQueue, Tail

READ_BYTES = 256 << 10
#: Room for a burst while this thread waits for the interpreter or the disk (Linux default: 64 KiB).
PIPE_BYTES = 1 << 20
#: A line without an end (a prompt, a progress bar) is shown after this.
PARTIAL_AFTER_S = 0.2


@dataclass(eq=False)
class Stream:
    """One pipe of one rank."""

    rank: int
    name: str
    fd: int
    file: CappedFile
    framer: LineFramer = field(default_factory=LineFramer)


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
        self._on_line = on_line
        self._wake_caller = wake
        self._is_shown = is_shown
        self._cap_bytes = cap_bytes
        self._selector = selectors.DefaultSelector()
        self._commands: deque[Callable[[], None]] = deque()
        self._queue = LineQueue()
        self._tails: dict[int, Tail] = {}
        self._tail_lock = threading.Lock()
        self._streams: set[Stream] = set()
        self._has_complained = False
        self._is_closing = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self._thread.start()

    @property
    def dropped_lines(self) -> int:
        """Display lines that a slow client cost; the files have them."""
        return self._queue.dropped_lines

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
        for line in self._queue.take():
            self._on_line(*line)

    def tail(self, rank: int, n: int, timeout_s: float = 0.2) -> list[str]:
        """Return the last ``n`` lines of ``rank``, with what it wrote just before it died."""
        self._sync(rank, timeout_s)
        with self._tail_lock:
            known = self._tails.get(rank)
            return known.lines(n) if known is not None else []

    def close(self, deadline_s: float) -> None:
        """Read what is in the pipes and end the thread, within ``deadline_s`` seconds."""
        self._command(self._begin_close)
        self._thread.join(deadline_s)
        if not self._thread.is_alive() and self._wake_write >= 0:
            os.close(self._wake_write)
            self._wake_write = -1

    def _command(self, call: Callable[[], None]) -> None:
        self._commands.append(call)
        if self._thread.is_alive():
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._wake_write, b"x")

    def _sync(self, rank: int, timeout_s: float) -> None:
        """Wait until everything that is in the rank's pipes now has been read."""
        done = threading.Event()

        def drain() -> None:
            for stream in [s for s in self._streams if s.rank == rank]:
                self._drain(stream)
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
            self._drain(stream)
            self._forget(stream)
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
        stream.file.write(b"")  # the file is there from the start, also of a rank that says nothing
        self._selector.register(stream.fd, selectors.EVENT_READ, stream)

    def _begin_close(self) -> None:
        self._is_closing = True

    def _drain(self, stream: Stream) -> None:
        """Read what the pipe holds; no more than it can hold, for whoever still writes into it."""
        for _ in range(2 * PIPE_BYTES // READ_BYTES):
            if not self._read(stream):
                return

    def _read(self, stream: Stream) -> bool:
        """Read once; False at the end or when there is nothing."""
        if stream not in self._streams:
            return False
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
        with self._tail_lock:
            self._tails[stream.rank].add(stream.name, data)
        if self._is_shown(stream.rank):
            self._frame(stream, data)
        return True

    def _forget(self, stream: Stream) -> None:
        if stream in self._streams:
            self._show(stream, stream.framer.flush())
            self._streams.discard(stream)
            self._selector.unregister(stream.fd)
            os.close(stream.fd)
            stream.file.close()

    def _frame(self, stream: Stream, data: bytes) -> None:
        if self._queue.is_full:  # a flood: count, do not even split
            self._queue.drop(stream.rank, stream.name, data.count(b"\n"))
            stream.framer.reset()
        else:
            self._show(stream, stream.framer.feed(data, time.monotonic()))

    def _show(self, stream: Stream, lines: list[bytes]) -> None:
        # the first line of an empty queue wakes the loop, which takes all that is there by then
        if self._queue.put(stream.rank, stream.name, lines):
            self._wake_caller()

    def _partial_wait(self) -> float | None:
        since = [s.framer.partial_since for s in self._streams if s.framer.partial_since is not None]
        return max(0.0, min(since) + PARTIAL_AFTER_S - time.monotonic()) if since else None

    def _flush_partials(self) -> None:
        now = time.monotonic()
        for stream in self._streams:
            since = stream.framer.partial_since
            if since is not None and now - since >= PARTIAL_AFTER_S:
                self._show(stream, stream.framer.flush())

    def _complain(self, stream: Stream, problem: OSError) -> None:
        if self._has_complained:
            return
        self._has_complained = True
        text = f"gpuctl: cannot write {stream.file.path}: {problem.strerror}; the run goes on without its log"
        print(text, file=sys.stderr, flush=True)
        self._show(stream, [text.encode(errors="surrogateescape")])
