"""Who a process is, and how to signal that process and never a stranger.

A pid alone names nobody: it is reused. A process is (boot id, pid, start ticks), and it is signalled
through a pidfd that was opened first and verified afterwards. The few system calls that Python lacks
(or that its builds against old headers lack) go through libc. The guardian lives on this module alone:
no dataclasses here, which would bring a MiB of ``inspect`` along.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

# <linux/prctl.h>
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
# the same numbers on every architecture (Linux 5.1 unified them); os.pidfd_open is missing from
# Pythons built against older headers, conda's among them
SYS_PIDFD_SEND_SIGNAL = 424
SYS_PIDFD_OPEN = 434


class ProcessId(NamedTuple):
    """One process, for as long as the machine's history is told."""

    boot_id: str
    pid: int
    start_ticks: int


class Stat(NamedTuple):
    """What ``/proc/PID/stat`` says of a process."""

    pid: int
    ppid: int
    state: str
    num_threads: int
    start_ticks: int

    @property
    def is_dead(self) -> bool:
        """A zombie holds nothing any more, unless only its first thread has ended."""
        return self.state in "ZX" and self.num_threads <= 1


@functools.cache
def boot_id() -> str:
    """Return the id of this boot of the machine."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def read_stat(pid: int) -> Stat | None:
    """Return what the kernel says of ``pid``, None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # the name is in parentheses and may hold anything, parentheses too; proc(5) counts from 1
    fields = text[text.rindex(b")") + 2 :].split()
    return Stat(pid, int(fields[1]), fields[0].decode(), int(fields[17]), int(fields[19]))


def identify(pid: int) -> ProcessId | None:
    """Return the identity of the process that has ``pid`` now, None when none has."""
    stat = read_stat(pid)
    return None if stat is None else ProcessId(boot_id(), pid, stat.start_ticks)


def is_alive(process: ProcessId) -> bool:
    """Return whether that very process still runs (a zombie does not)."""
    if process.boot_id != boot_id():
        return False
    stat = read_stat(process.pid)
    return stat is not None and stat.start_ticks == process.start_ticks and not stat.is_dead


def send_signal(process: ProcessId, number: int) -> bool:
    """Signal ``process``; False when it is gone already. Raises PermissionError."""
    if process.boot_id != boot_id():
        return False

    def is_same() -> bool:
        stat = read_stat(process.pid)
        return stat is not None and stat.start_ticks == process.start_ticks

    return _signal_verified(process.pid, number, is_same)


def send_signal_to_descendant(root: int, pid: int, number: int) -> bool:
    """Signal ``pid`` if it descends from ``root``; False when it does not, or is gone."""
    return _signal_verified(pid, number, lambda: is_descendant(pid, root))


def is_descendant(pid: int, root: int) -> bool:
    """Return whether ``root`` is among the ancestors of ``pid``."""
    seen = set()
    while pid not in (0, 1) and pid not in seen:
        seen.add(pid)
        stat = read_stat(pid)
        if stat is None:
            return False
        if stat.ppid == root:
            return True
        pid = stat.ppid
    return False


def descendants(pid: int) -> list[int]:
    """Return the processes below ``pid``, parents before their children.

    A process that is born or re-parented meanwhile may be missing: who needs all of them asks again.
    """
    found: list[int] = []
    seen = {pid}
    children: Callable[[int], Iterable[int]]
    children = _children_by_file if _has_children_files() else _children_by_scan()
    queue = [pid]
    for parent in queue:
        for child in children(parent):
            if child not in seen:
                seen.add(child)
                found.append(child)
                queue.append(child)
    return found


def set_name(name: str) -> None:
    """Name this process (15 bytes) as ``ps`` and ``top`` show it."""
    _prctl(PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


def set_subreaper() -> None:
    """Become the parent of every orphan below this process; raises OSError."""
    _prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def set_pdeathsig(number: int) -> None:
    """Ask for a signal when the *thread* that forked this process ends.

    Cleared by fork and by a set-uid exec, and it misses a parent that died before the call: compare
    ``os.getppid()`` afterwards (prctl(2)).
    """
    _prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(number))


def load_libc() -> ctypes.CDLL:
    """Load libc now: a child between fork and exec must find it loaded."""
    return _libc()


def _signal_verified(pid: int, number: int, is_same: Callable[[], bool]) -> bool:
    """Open a pidfd, verify who has the number now, signal through the pidfd.

    From the opening on the pidfd means one process. If that process still lives when it is signalled,
    it held the number while it was verified; if it does not, the kernel says ESRCH.
    """
    fd = _libc().syscall(SYS_PIDFD_OPEN, pid, 0)
    if fd < 0:
        number_ = ctypes.get_errno()
        if number_ == errno.ENOSYS:  # before Linux 5.3 (RHEL 8): verify, then the number
            return is_same() and _kill(pid, number)
        if number_ in (errno.ESRCH, errno.EINVAL):
            return False
        raise OSError(number_, os.strerror(number_))
    try:
        if not is_same():
            return False
        if _libc().syscall(SYS_PIDFD_SEND_SIGNAL, fd, number, None, 0) == 0:
            return True
        number_ = ctypes.get_errno()
        if number_ == errno.ESRCH:
            return False
        raise OSError(number_, os.strerror(number_))
    finally:
        os.close(fd)


def _kill(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


@functools.cache
def _has_children_files() -> bool:
    pid = os.getpid()
    return os.path.exists(f"/proc/{pid}/task/{pid}/children")  # CONFIG_PROC_CHILDREN


def _children_by_file(pid: int) -> Iterator[int]:
    """Yield the children of every thread of ``pid``."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                yield from map(int, file.read().split())
        except (FileNotFoundError, ProcessLookupError):
            continue


def _children_by_scan() -> Callable[[int], Iterable[int]]:
    """Return a function pid -> children from one reading of the whole process table."""
    table: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := read_stat(int(entry))) is not None:
            table.setdefault(stat.ppid, []).append(stat.pid)
    return lambda pid: table.get(pid, [])


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc


def _prctl(option: int, argument: object) -> None:
    zero = ctypes.c_ulong(0)
    if _libc().prctl(option, argument, zero, zero, zero) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
