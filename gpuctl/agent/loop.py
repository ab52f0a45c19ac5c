"""The agent's event loop: file descriptors and timers, one thread, no polling.

Everything the agent decides happens here; whatever could block (log files, state files) has a
thread of its own.
"""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(order=True)
class Timer:
    """A call that will be made once, unless cancelled."""

    at: float
    order: int
    call: Callable[[], None] = field(compare=False)
    is_cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.is_cancelled = True


class Loop:
    """Calls back when a descriptor is ready or a moment (monotonic clock) has come."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[Timer] = []
        self._order = itertools.count()
        self._soon: deque[Callable[[], None]] = deque()
        self._is_running = False
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.watch(self._wake_read, self._drain_wake)

    def watch(
        self, fd: int, on_read: Callable[[], None] | None, on_write: Callable[[], None] | None = None
    ) -> None:
        """Call ``on_read`` / ``on_write`` while ``fd`` is ready; both None: stop watching it."""
        events = (selectors.EVENT_READ if on_read else 0) | (selectors.EVENT_WRITE if on_write else 0)
        known = fd in self._selector.get_map()
        if not events:
            if known:
                self._selector.unregister(fd)
        elif known:
            self._selector.modify(fd, events, (on_read, on_write))
        else:
            self._selector.register(fd, events, (on_read, on_write))

    def forget(self, fd: int) -> None:
        """Stop watching ``fd``."""
        self.watch(fd, None)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Call once after ``delay_s`` seconds."""
        timer = Timer(time.monotonic() + delay_s, next(self._order), call)
        heapq.heappush(self._timers, timer)
        return timer

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call once, after what runs now; may be called from another thread."""
        with self._lock:
            self._soon.append(call)
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            pass  # a full pipe wakes the loop as well

    def stop(self) -> None:
        """Leave :meth:`run` after the current callback."""
        self._is_running = False

    def run(self) -> None:
        """Call back until :meth:`stop`."""
        self._is_running = True
        while self._is_running:
            self.run_once()

    def run_once(self) -> None:
        """Wait for the next thing and handle it."""
        for key, mask in self._selector.select(self._next_wait()):
            on_read, on_write = key.data
            if mask & selectors.EVENT_WRITE and on_write:
                on_write()
            if mask & selectors.EVENT_READ and on_read and key.fd in self._selector.get_map():
                on_read()
        self._run_due()

    def _next_wait(self) -> float | None:
        if self._soon:
            return 0.0
        while self._timers and self._timers[0].is_cancelled:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0].at - time.monotonic()) if self._timers else None

    def _run_due(self) -> None:
        with self._lock:
            calls = list(self._soon)
            self._soon.clear()
        for call in calls:
            call()
        now = time.monotonic()
        while self._timers and self._timers[0].at <= now:
            timer = heapq.heappop(self._timers)
            if not timer.is_cancelled:
                timer.call()

    def _drain_wake(self) -> None:
        try:
            while os.read(self._wake_read, 4096):
                pass
        except BlockingIOError:
            pass
