"""How a run's processes are ended on this node: the best of three ways that really works here.

Never by name. Each pass is short and non-blocking; the caller repeats it until nothing survives, so
that a process which forks while it is killed is caught by the next pass.

cgroup         a cgroup v2 of the run with ``cgroup.kill``: the kernel ends all of it at once, forks
               included; what had left the ranks before they were moved is swept
subreaper      every orphan below the agent becomes its child: KILL whatever descends from it
process-group  without /proc or the subreaper: KILL the ranks' process groups

Measured with a rank and three strays (own session, double fork, both): killing the leader leaves 3,
killpg 2, a walk over parents 1, the sweep 0, cgroup.kill 0.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Literal, Protocol

from gpuctl.agent import identity

Name = Literal["cgroup", "subreaper", "process-group"]
CGROUP_PREFIX = "gpuctl-"
TRIAL_LIMIT_S = 1.0
#: Passes within one call: a chain of forks is often over before the caller comes again.
MAX_PASSES = 4


class Killer(Protocol):
    """Ends what belongs to the run below the agent. ``keep``: pids (not their children) to spare."""

    name: Name

    def adopt(self, pid: int) -> None:
        """Take charge of a rank that was just started."""

    def kill_all(self, *, keep: Collection[int] = ()) -> list[int]:
        """Send SIGKILL to everything of the run that is found now; return whom it went to."""

    def survivors(self, *, keep: Collection[int] = ()) -> list[int]:
        """Return the processes of the run that still hold something (zombies do not)."""

    def close(self) -> None:
        """Give back what the method needed."""


def choose_method(run_id: str) -> Killer:
    """Return the best way to kill that works here, found by trying it on a child."""
    sweeper = _try_subreaper()
    if sweeper is None:
        return GroupKiller()
    cgroup = _try_cgroup(run_id)
    return sweeper if cgroup is None else CgroupKiller(cgroup, sweeper)


class SubreaperKiller:
    """Kills whatever descends from this process."""

    name: Name = "subreaper"

    def __init__(self) -> None:
        self._root = os.getpid()

    def adopt(self, pid: int) -> None:
        """Nothing to do: descent is enough."""

    def kill_all(self, *, keep: Collection[int] = ()) -> list[int]:
        killed: list[int] = []
        for _ in range(MAX_PASSES):
            fresh = [pid for pid in self._alive(keep) if pid not in killed]
            if not fresh:
                break
            for pid in fresh:
                if _kill_descendant(self._root, pid):
                    killed.append(pid)
        return killed

    def survivors(self, *, keep: Collection[int] = ()) -> list[int]:
        # a process that is handed to a new parent while the tree is read can be missed once, not twice
        return self._alive(keep) or self._alive(keep)

    def close(self) -> None:
        """Nothing was taken."""

    def _alive(self, keep: Collection[int]) -> list[int]:
        return [pid for pid in identity.descendants(self._root) if pid not in keep and not _is_dead(pid)]


class CgroupKiller:
    """``cgroup.kill`` on the run's own cgroup, and the sweep for what never was in it."""

    name: Name = "cgroup"

    def __init__(self, directory: Path, sweeper: SubreaperKiller) -> None:
        self.directory = directory
        self._sweeper = sweeper
        self._root = os.getpid()
        self._moves: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._mover: threading.Thread | None = None

    def adopt(self, pid: int) -> None:
        """Move ``pid`` into the run's cgroup; what it starts from then on is born there."""
        # on a thread: a move waits for an RCU grace period, 15 ms were measured, times the ranks
        if self._mover is None:
            self._mover = threading.Thread(target=self._move_all, name="cgroup", daemon=True)
            self._mover.start()
        self._moves.put(pid)

    def _move_all(self) -> None:
        while (pid := self._moves.get()) is not None:
            try:
                self._move(pid)
            except ProcessLookupError:
                pass  # it has ended already
            except OSError as exc:  # the sweep ends it all the same
                print(f"cannot move {pid} into {self.directory}: {exc.strerror}", file=sys.stderr, flush=True)

    def _move(self, pid: int) -> None:
        """Move a rank; a stranger that was given its number meanwhile is moved back at once."""
        if identity.is_descendant(pid, self._root):
            _write(self.directory / "cgroup.procs", str(pid))
            if not identity.is_descendant(pid, self._root) and not _is_dead(pid):
                _write(self.directory.parent / "cgroup.procs", str(pid))

    def kill_all(self, *, keep: Collection[int] = ()) -> list[int]:
        members = self._members()
        if members:
            with contextlib.suppress(OSError):
                _write(self.directory / "cgroup.kill", "1")
        return sorted({*members, *self._sweeper.kill_all(keep=keep)})

    def survivors(self, *, keep: Collection[int] = ()) -> list[int]:
        return sorted({*self._members(), *self._sweeper.survivors(keep=keep)})

    def close(self) -> None:
        if self._mover is not None:
            self._moves.put(None)
            self._mover.join()
            self._mover = None
        _remove_cgroup(self.directory)

    def _members(self) -> list[int]:
        """Return who is in the cgroup or below it; zombies are counted out by the kernel."""
        found: list[int] = []
        for folder, _, _ in os.walk(self.directory):
            with contextlib.suppress(OSError):
                found += map(int, (Path(folder) / "cgroup.procs").read_text().split())
        # 0: a process of another pid namespace, which cgroup.kill reaches all the same
        return [pid for pid in found if pid == 0 or not _is_dead(pid)]


class GroupKiller:
    """Kills the process groups of the ranks: each leads a session of its own."""

    name: Name = "process-group"

    def __init__(self) -> None:
        self._groups: set[int] = set()

    def adopt(self, pid: int) -> None:
        self._groups.add(pid)

    def kill_all(self, *, keep: Collection[int] = ()) -> list[int]:
        return [group for group in sorted(self._groups - set(keep)) if _kill_group(group, signal.SIGKILL)]

    def survivors(self, *, keep: Collection[int] = ()) -> list[int]:
        # a group that is empty now is never asked for again: its number may come to mean a stranger's
        self._groups = {group for group in self._groups if _kill_group(group, 0)}
        return sorted(self._groups - set(keep))

    def close(self) -> None:
        self._groups.clear()


def _try_subreaper() -> SubreaperKiller | None:
    try:
        identity.set_subreaper()
    except OSError:
        return None
    return SubreaperKiller() if identity.read_stat(os.getpid()) is not None else None


def _try_cgroup(run_id: str) -> Path | None:
    """Make a cgroup, move a child into it, kill it there; None where any of it does not work.

    A writable directory proves nothing: the move also needs the common ancestor, and cgroup.kill
    needs Linux 5.14.
    """
    parent = own_cgroup()
    if parent is None:
        return None
    directory = parent / f"{CGROUP_PREFIX}{run_id}-{os.getpid()}"
    try:
        _remove_stale(parent)
        directory.mkdir()
    except OSError:
        return None
    if (directory / "cgroup.kill").exists() and _kills_a_child(directory):
        return directory
    _remove_cgroup(directory)
    return None


def own_cgroup() -> Path | None:
    """Return this process's directory in the cgroup v2 hierarchy, None where there is none."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        path = next(line[3:] for line in lines if line.startswith("0::"))
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except (OSError, StopIteration):
        return None
    for fields in mounts:
        if fields[fields.index("-") + 1] == "cgroup2":
            root, mount_point = fields[3], fields[4]
            inside = os.path.relpath(path, root) if root != "/" else path.lstrip("/")
            directory = Path(mount_point) / inside
            return directory if ".." not in inside and directory.is_dir() else None
    return None


def _kills_a_child(directory: Path) -> bool:
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(write_fd)
        select.select([read_fd], [], [], 2 * TRIAL_LIMIT_S)
        os._exit(0)
    try:
        _write(directory / "cgroup.procs", str(pid))
        if directory.name not in Path(f"/proc/{pid}/cgroup").read_text():
            return False
        _write(directory / "cgroup.kill", "1")
        return _ends_by_kill(pid)
    except OSError:
        return False
    finally:
        os.close(read_fd)
        os.close(write_fd)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _ends_by_kill(pid: int) -> bool:
    deadline = time.monotonic() + TRIAL_LIMIT_S
    while time.monotonic() < deadline:
        done = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if done is not None:
            return done.si_status == signal.SIGKILL
        time.sleep(0.001)
    return False


def _remove_stale(parent: Path) -> None:
    """Remove the empty cgroups of agents that were killed."""
    for directory in parent.glob(f"{CGROUP_PREFIX}*-*"):
        pid = directory.name.rpartition("-")[2]
        if pid.isdigit() and identity.read_stat(int(pid)) is None:
            with contextlib.suppress(OSError):  # somebody still runs in it
                directory.rmdir()


def _remove_cgroup(directory: Path) -> None:
    for folder, _, _ in os.walk(directory, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def _kill_descendant(root: int, pid: int) -> bool:
    try:
        return identity.send_signal_to_descendant(root, pid, signal.SIGKILL)
    except PermissionError:
        return False  # a set-uid program; its cgroup or its parents' end reaches it


def _kill_group(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _is_dead(pid: int) -> bool:
    stat = identity.read_stat(pid)
    return stat is None or stat.is_dead


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
