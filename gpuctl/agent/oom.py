"""Was it the OOM killer? A rank that it ends looks like any other SIGKILL from outside."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

#: One record of the kernel's log; /dev/kmsg returns EINVAL for a smaller buffer (kernel, dev-kmsg).
RECORD_BYTES = 8192
KILLED = re.compile(
    rb"Killed process (?P<pid>\d+) \((?P<name>[^)]*)\).*?anon-rss:(?P<rss>\d+)kB|Killed process (?P<bare>\d+)"
)


class OomWatch:
    """Remembers the counters of this process's cgroup and the end of the kernel's log at its making."""

    def __init__(self) -> None:
        self._counter = _find_counter()
        self._before = _read_counter(self._counter)
        self._kmsg = _open_kmsg()
        self._killed: dict[int, int | None] = {}

    def explain(self, pid: int) -> str | None:
        """Return a sentence when the OOM killer ended ``pid``, None when there is no sign of it.

        The kernel's log names the process; where it may not be read, a counter that has risen in the
        cgroup is taken as the sign, and counts for one process.
        """
        by_log = self._from_log(pid)
        if by_log is not None:
            return by_log
        now = _read_counter(self._counter)
        if self._before is None or now is None or now <= self._before:
            return None
        self._before += 1
        return f"killed by the OOM killer{_limit(self._counter)}"

    def _from_log(self, pid: int) -> str | None:
        for found in KILLED.finditer(b"\n".join(self._new_records())):
            self._killed[int(found["pid"] or found["bare"])] = int(found["rss"]) if found["rss"] else None
        if pid not in self._killed:
            return None
        rss_kib = self._killed.pop(pid)
        held = "" if rss_kib is None else f", it held {rss_kib >> 10} MiB"
        if self._before is not None:
            self._before += 1
        return f"killed by the OOM killer{_limit(self._counter)}{held}"

    def _new_records(self) -> list[bytes]:
        records: list[bytes] = []
        while self._kmsg is not None:
            try:
                records.append(os.read(self._kmsg, RECORD_BYTES))
            except BlockingIOError:
                break
            except OSError as exc:
                if exc.errno != errno.EPIPE:  # EPIPE: older records were overwritten, read on
                    break
        return records


def _find_counter() -> Path | None:
    """Return the file that counts OOM kills: the own cgroup's (v2, then v1), else the machine's."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return None
    paths = {tuple(line.split(":", 2)[1].split(",")): line.split(":", 2)[2] for line in lines}
    for fields in mounts:
        dash = fields.index("-")
        kind, options = fields[dash + 1], fields[dash + 3].split(",")
        for controllers, path in paths.items():
            if kind == "cgroup2" and controllers == ("",):
                name = "memory.events"
            elif kind == "cgroup" and "memory" in controllers and "memory" in options:
                name = "memory.oom_control"
            else:
                continue
            # a container sees its own cgroup at the mount point itself
            for folder in (Path(fields[4]) / path.lstrip("/"), Path(fields[4])):
                if _read_counter(folder / name) is not None:
                    return folder / name
    return Path("/proc/vmstat")


def _read_counter(path: Path | None) -> int | None:
    if path is None:
        return None
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _limit(counter: Path | None) -> str:
    names = {"memory.events": "memory.max", "memory.oom_control": "memory.limit_in_bytes"}
    if counter is None or counter.name not in names:
        return ""
    try:
        limit = int((counter.parent / names[counter.name]).read_text())
    except (OSError, ValueError):  # "max"
        return ""
    return f" (limit {limit >> 20} MiB)" if limit < 1 << 60 else ""  # v1 says "none" as a huge number


def _open_kmsg() -> int | None:
    """Open the kernel's log at its end; None where it may not be read."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    os.lseek(fd, 0, os.SEEK_END)
    return fd
