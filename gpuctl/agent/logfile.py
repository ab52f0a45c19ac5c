"""A log file that keeps the raw bytes, head and tail, within a cap.

Beyond the cap the middle is punched out as a hole, so that byte offsets stay true for whoever follows
the file. A full disk costs log bytes, never the run, and the file says how many.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from pathlib import Path

from gpuctl.agent.logtimes import TimeIndex

CAP_BYTES = 64 << 20
#: The part at the front that is kept: start-up, versions, the first error.
HEAD_FRACTION = 0.5
#: Holes are punched in whole steps, not at every write.
PUNCH_STEP_BYTES = 1 << 20
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
        self._gap = 0
        self._times = TimeIndex(path)

    def write(self, data: bytes) -> OSError | None:
        """Append ``data``; return the error when (part of) it could not be written."""
        if time.monotonic() < self._retry_at:
            self.dropped_bytes += len(data)
            self._gap += len(data)
            return None
        view = memoryview(data)
        try:
            self._open()
            self._mark_gap()
            self._times.note(self._size)
            while view:
                written = os.write(self._fd, view)
                self._size += written
                view = view[written:]
            self._give_up_the_middle()
        except OSError as exc:
            self.dropped_bytes += len(view)
            self._gap += len(view)
            self._retry_at = time.monotonic() + RETRY_DISK_S
            return exc
        return None

    def close(self) -> None:
        """Close the file."""
        self._times.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        if self._fd < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(self.path, flags, 0o600)
            self._size = os.fstat(self._fd).st_size

    def _mark_gap(self) -> None:
        """Say in the file itself what is missing here, once the disk takes bytes again."""
        if self._gap:
            self._size += os.write(self._fd, b"\n[gpuctl: %d bytes could not be written]\n" % self._gap)
            self._gap = 0

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
