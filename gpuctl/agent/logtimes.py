"""When the bytes of a log came: a small index beside each log file, since the log itself stays raw.

Records of 16 bytes, little-endian: Unix time (f64, seconds), offset in the log (u64). Not one for each
write: the longer the log lives, the rarer they get, so that a month of output costs a few MiB.
"""

from __future__ import annotations

import bisect
import os
import struct
import time
from pathlib import Path

RECORD = struct.Struct("<dQ")
FIRST_INTERVAL_S = 0.1
#: After so many records the interval grows by its first value again.
RECORDS_PER_STEP = 65_536


def index_path(log: Path) -> Path:
    """Return the path of the index of ``log``."""
    return log.with_name(log.name + ".times")


class TimeIndex:
    """Writes the index of one log."""

    def __init__(self, log: Path) -> None:
        self._path = index_path(log)
        self._fd = -1
        self._num_records = 0
        self._last = 0.0

    def note(self, offset: int) -> None:
        """Remember that the byte at ``offset`` came now. Raises OSError like any write."""
        now = time.time()
        interval = FIRST_INTERVAL_S * (1 + self._num_records // RECORDS_PER_STEP)
        if 0 <= now - self._last < interval:
            return
        if self._fd < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o600)
        os.write(self._fd, RECORD.pack(now, offset))
        self._num_records += 1
        self._last = now

    def close(self) -> None:
        """Close the index."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_index(log: Path) -> list[tuple[float, int]]:
    """Return the (time, offset) records of a log; empty when it has no index."""
    try:
        data = index_path(log).read_bytes()
    except OSError:
        return []
    whole = len(data) // RECORD.size * RECORD.size
    return [(at, offset) for at, offset in RECORD.iter_unpack(data[:whole])]


def offset_since(index: list[tuple[float, int]], since: float) -> int | None:
    """Return where what came at ``since`` or later begins; None when nothing did."""
    return next((offset for at, offset in index if at >= since), None)


def times_between(index: list[tuple[float, int]], start: int, end: int) -> list[tuple[float, int]]:
    """Return the records that date the bytes [start, end): the last one before it, and those inside."""
    offsets = [offset for _, offset in index]
    first = max(0, bisect.bisect_right(offsets, start) - 1)
    return index[first : bisect.bisect_left(offsets, end)]
