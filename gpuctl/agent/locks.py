"""Locks on GPUs (and on a CPU node's slot) among all users of one machine.

A lock is a kernel flock on a file of a sticky, world-writable directory. It lives as long as any
process that holds its descriptor, so ranks inherit it: a lock outlives a dead agent exactly as long as
a rank does, a reboot frees it, and nothing ever has to be called stale. The record inside only says
who holds it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuctl.agent import identity
from gpuctl.errors import CheckFailed

DIRECTORY = Path("/var/tmp/gpuctl-locks")
MAX_RECORD_BYTES = 4096
#: The winner writes its record right after its last lock: the loser gives it this long to appear.
RECORD_WAIT_S = 0.2


class LockBusy(CheckFailed):
    """Somebody else holds one of the locks."""

    def __init__(self, name: str, holder: Mapping[str, Any]) -> None:
        super().__init__(f"{name} is in use: {describe_holder(holder)}")
        self.name = name
        self.holder = dict(holder)


class Locks:
    """Locks that are held. ``fds`` are not inheritable unless whoever spawns makes them so."""

    def __init__(self, fds: Sequence[int]) -> None:
        self.fds = tuple(fds)

    def close(self) -> None:
        """Let go; a process that inherited a descriptor goes on holding its lock."""
        # never LOCK_UN: it would unlock for the ranks too, they share the open file
        for fd in self.fds:
            os.close(fd)
        self.fds = ()


def acquire(names: Sequence[str], holder: Mapping[str, Any], directory: Path = DIRECTORY) -> Locks:
    """Take all of ``names`` or none, at once. Raises LockBusy, or OSError with the path.

    ``holder`` (run, uid, pid, since) is what a loser is told.
    """
    folder = _open_directory(directory)
    fds: list[int] = []
    try:
        for name in sorted(set(names)):
            fds.append(_open_lock(folder, name, directory))
            if not _try_flock(fds[-1]):
                raise LockBusy(name, _read_holder(fds[-1]))
        record = {**holder, "boot_id": identity.boot_id()}
        for fd in fds:
            _write_record(fd, record)
    except BaseException:
        Locks(fds).close()
        raise
    finally:
        os.close(folder)
    return Locks(fds)


def describe_holder(holder: Mapping[str, Any]) -> str:
    """Return the holder in words: ``held by run X of user U since 12:00 (pid 7)``."""
    if "run" not in holder:
        return "held by a process that left no record"
    since = holder.get("since")
    when = "" if since is None else time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(since))
    return f"held by run {holder['run']} of {_user(holder.get('uid'))}{when} (pid {holder.get('pid')})"


def _open_directory(path: Path) -> int:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
        os.chmod(path, 0o1777)  # mkdir's mode goes through the umask
    for _ in _retries():
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        mode = os.fstat(fd).st_mode
        if mode & 0o1007 == 0o1007:
            return fd
        os.close(fd)  # its maker is between mkdir and chmod, or it is not ours to use
    raise PermissionError(errno.EPERM, f"has mode {stat.filemode(mode)}, not drwxrwxrwt", str(path))


def _open_lock(folder: int, name: str, directory: Path) -> int:
    """Open or make the file ``name``; raises OSError when it is a link or no regular file."""
    file_name = name.replace("/", "_")
    for _ in _retries():
        try:
            fd = _open_or_make(folder, file_name)
            break
        except (FileNotFoundError, FileExistsError, PermissionError):
            continue  # made or removed meanwhile, or its maker is between open and fchmod
    else:
        raise PermissionError(errno.EACCES, "cannot be opened", str(directory / file_name))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is no regular file", str(directory / file_name))
    return fd


def _open_or_make(folder: int, name: str) -> int:
    # O_NONBLOCK: somebody may have put a fifo there
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        # without O_CREAT first: fs.protected_regular forbids it on another user's file in a sticky folder
        return os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        os.fchmod(fd, 0o666)  # any user of the machine may lock it, and say so in it
        return fd


def _try_flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)  # whoever it names has gone
    return True


def _write_record(fd: int, record: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a full disk does not take the lock away
        os.pwrite(fd, json.dumps(record).encode()[:MAX_RECORD_BYTES], 0)


def _read_holder(fd: int) -> dict[str, Any]:
    """Return the record of the present holder; an older holder's record does not count."""
    for _ in _retries():
        try:
            record = json.loads(os.pread(fd, MAX_RECORD_BYTES, 0))
        except (OSError, ValueError):
            continue
        if isinstance(record, dict) and record.get("boot_id") == identity.boot_id():
            return record
    return {}


def _retries() -> Iterator[None]:
    """Come round for RECORD_WAIT_S, at least once."""
    deadline = time.monotonic() + RECORD_WAIT_S
    while True:
        yield
        if time.monotonic() > deadline:
            return
        time.sleep(0.005)


def _user(uid: object) -> str:
    if not isinstance(uid, int):
        return "an unknown user"
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"uid {uid}"
