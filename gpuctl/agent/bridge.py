"""The bridge: one client's end on a node. Frames on stdin and stdout, files and the agent behind.

It lives and dies with the client's connection. Until the client arms or attaches to a run it
answers by itself (status, read_log, put_blob, clean), also for runs that ended long ago; after that
it only carries bytes between the client and the agent's socket.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuctl.agent import identity
from gpuctl.agent.bootstrap import install_tree, is_intact, private_dir
from gpuctl.agent.frames import PROTOCOL, Decoder, Frame, encode
from gpuctl.agent.logtimes import offset_since, read_index, times_between
from gpuctl.agent.paths import Home, RunDir, connect_unix
from gpuctl.core.codec import from_json, to_json
from gpuctl.core.run import RunRecord, RunState
from gpuctl.errors import ProtocolError

READ_BYTES = 1 << 18
#: Starts the agent from the bundle; ``-c`` and not ``-m``, so that no PYTHONPATH leaks into ranks.
START_AGENT = (
    "import sys;sys.path[:1]=[sys.argv[1]];"
    "from gpuctl.agent.guardian import start;sys.exit(start(sys.argv[2:]))"
)


class Bridge:
    """Serves one client until it closes its end."""

    def __init__(self, home: Home, parameters: Mapping[str, Any]) -> None:
        self.home = home
        self.bundle = str(parameters["bundle"])
        self._decoder = Decoder()
        self._agent: socket.socket | None = None
        self._uploads: dict[str, Any] = {}

    def run(self) -> None:
        """Answer frames until end of file, then (after arm or attach) carry bytes."""
        self.say(Frame("hello", {"protocol": PROTOCOL, "home": str(self.home.path)}))
        while self._agent is None:
            data = os.read(0, READ_BYTES)
            if not data:
                return
            self._feed(data)
        self._carry(self._agent)

    def say(self, frame: Frame) -> None:
        """Send a frame to the client."""
        write_all(1, encode(frame))

    def _feed(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            if self._agent is not None:
                self._agent.sendall(encode(frame))  # came in the same read as the arm
                continue
            try:
                self._answer(frame)
            except (OSError, ValueError, KeyError, TypeError) as exc:
                self.say(Frame("refused", {"reasons": [f"{frame.type}: {exc}"], "request": frame.type}))

    def _answer(self, frame: Frame) -> None:
        handler = {
            "status": self._status,
            "read_log": self._read_log,
            "put_blob": self._put_blob,
            "has": self._has,
            "secrets": self._keep_secrets,
            "arm": self._arm,
            "attach": self._attach,
            "clean": self._clean,
            "ping": self._ping,
        }.get(frame.type)
        if handler is not None:
            handler(frame)

    def _ping(self, _frame: Frame) -> None:
        self.say(Frame("ping"))

    # -- runs

    def _status(self, frame: Frame) -> None:
        run_id = frame.get("run_id")
        records = [
            record
            for run_dir in self.home.run_dirs()
            if run_id in (None, run_dir.path.parent.name) and (record := read_record(run_dir)) is not None
        ]
        self.say(Frame("status", {"records": [to_json(record) for record in records[-500:]]}))

    def _arm(self, frame: Frame) -> None:
        """Start the agent of a run and hand the client over to it."""
        plan, node_rank = frame.fields["plan"], int(frame.fields["node_rank"])
        run_dir = self.home.run_dir(plan["run_id"], node_rank)
        private_dir(str(self.home.runs))
        private_dir(str(run_dir.path.parent))
        private_dir(str(run_dir.path))
        if plan.get("sync_sha256"):
            copy_tree(self.home.tree("sync", plan["sync_sha256"]), run_dir.work)
        ours, theirs = socket.socketpair()
        start_agent(self.home, self.bundle, run_dir, plan["run_id"], node_rank, theirs)
        theirs.close()
        for waiting in (self._uploads.pop("secrets", None), frame):
            if waiting is not None:
                ours.sendall(encode(waiting))
        self._agent = ours

    def _keep_secrets(self, frame: Frame) -> None:
        self._uploads["secrets"] = frame

    def _attach(self, frame: Frame) -> None:
        """Hand the client over to the agent of a run that is alive on this node."""
        run_dir = self.home.run_dir(frame.fields["run_id"], int(frame.fields["node_rank"]))
        self._agent = connect_unix(run_dir.path)
        self._agent.sendall(encode(frame))

    def _carry(self, agent: socket.socket) -> None:
        """Carry bytes both ways until either end closes."""
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        while True:
            ready, _, _ = select.select([0, agent.fileno()], [], [])
            if 0 in ready:
                data = os.read(0, READ_BYTES)
                if not data:
                    return
                agent.sendall(data)
            if agent.fileno() in ready:
                data = _receive(agent)
                if not data:
                    return
                write_all(1, data)

    # -- files

    def _has(self, frame: Frame) -> None:
        """Say which of the named trees and data files are here and intact."""
        sync = [s for s in frame.get("sync", []) if is_intact(str(self.home.tree("sync", s)), s)]
        data = [s for s in frame.get("data", []) if file_sha256(self.home.data(s)) == s]
        self.say(Frame("has", {"sync": sync, "data": data}))

    def _put_blob(self, frame: Frame) -> None:
        """Take a part of an upload; at its end verify the hash and move it into place."""
        kind, sha256 = frame.fields["kind"], frame.fields["sha256"]
        if kind not in ("sync", "data") or not _is_sha256(sha256):
            raise ValueError(f"a blob of kind {kind!r}")
        folder = private_dir(str(self.home.path / kind))
        part = Path(folder) / f"{sha256}.{os.getpid()}.part"
        with part.open("ab") as file:
            file.write(frame.payload)
        if not frame.get("is_last"):
            return
        try:
            if kind == "sync":
                install_tree(part.read_bytes(), sha256, str(self.home.tree("sync", sha256)))
            elif file_sha256(part) == sha256:
                os.replace(part, self.home.data(sha256))
            else:
                raise ValueError("the data arrived damaged")
        finally:
            part.unlink(missing_ok=True)
        self.say(Frame("put_blob", {"kind": kind, "sha256": sha256}))

    def _read_log(self, frame: Frame) -> None:
        """Send bytes of a log from an offset (negative: the last n lines)."""
        run_dir = self.home.run_dir(frame.fields["run_id"], int(frame.fields["node_rank"]))
        record = read_record(run_dir)
        generation = frame.get("generation_wanted")
        if generation is None:
            generation = record.generation if record is not None else 0
        path = log_path(run_dir, frame.fields["stream"], int(frame.get("rank", 0)), int(generation))
        offset, size = int(frame.get("offset", 0)), int(frame.get("max_bytes", READ_BYTES))
        index = read_index(path) if frame.get("with_times") or frame.get("since") is not None else []
        if frame.get("since") is not None:
            since = offset_since(index, float(frame.fields["since"]))
            offset = file_size(path) if since is None else since
        data, start = read_from(path, offset, min(size, READ_BYTES), frame.get("tail_lines"))
        fields = {
            "offset": start,
            "next_offset": start + len(data),
            "skipped_bytes": max(0, start - offset) if frame.get("tail_lines") is None else 0,
            "times": times_between(index, start, start + len(data)) if frame.get("with_times") else [],
            "generation_read": generation,
            "state": record.state.value if record is not None else None,
        }
        self.say(Frame("log", fields, data))

    def _clean(self, frame: Frame) -> None:
        """Remove finished runs (or list them): logs, bundles, data that no run needs."""
        removed, kept, freed = [], [], 0
        for run_dir in self.home.run_dirs():
            record = read_record(run_dir)
            run_id = run_dir.path.parent.name
            if record is not None and not record.state.is_final:
                kept.append(run_id)
                continue
            freed += tree_bytes(run_dir.path.parent)
            removed.append(run_id)
            if not frame.get("dry_run"):
                shutil.rmtree(run_dir.path.parent, ignore_errors=True)
        if not kept:
            freed += self._clean_trees(bool(frame.get("dry_run")))
        self.say(
            Frame("clean", {"removed": sorted(set(removed)), "kept": sorted(set(kept)), "freed_bytes": freed})
        )

    def _clean_trees(self, dry_run: bool) -> int:
        freed = 0
        for kind in ("bundles", "sync", "data"):
            folder = self.home.path / kind
            for entry in folder.iterdir() if folder.is_dir() else ():
                if entry.name == self.bundle:
                    continue  # this very bridge runs from it
                freed += tree_bytes(entry)
                if not dry_run:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        return freed


def start_agent(
    home: Home, bundle: str, run_dir: RunDir, run_id: str, node_rank: int, client: socket.socket
) -> None:
    """Start guardian and agent in a session of their own; stdio goes to ``agent.log``.

    The run id in the environment marks every process of the run, whatever becomes of its parents.
    """
    log = os.open(run_dir.path / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    fd = client.fileno()
    os.set_inheritable(fd, True)
    argv = [sys.executable, "-c", START_AGENT, str(home.tree("bundles", bundle))]
    argv += [str(fd), str(home.path), run_id, str(node_rank)]
    os.posix_spawn(
        sys.executable,
        argv,
        {**os.environ, "GPUCTL_RUN_ID": run_id},
        file_actions=[
            (os.POSIX_SPAWN_DUP2, null, 0),
            (os.POSIX_SPAWN_DUP2, log, 1),
            (os.POSIX_SPAWN_DUP2, log, 2),
        ],
        setsid=True,
        setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM],
    )
    os.close(log)
    os.close(null)


def read_record(run_dir: RunDir) -> RunRecord | None:
    """Return the record of a run's node; a run whose agent is gone without an end is LOST."""
    try:
        record = from_json(RunRecord, json.loads(run_dir.state.read_bytes()))
    except (OSError, ValueError):
        return None
    if record.state.is_final or _agent_is_alive(record):
        return record
    return replace(record, state=RunState.LOST, reason=record.reason or "the agent died")


def _agent_is_alive(record: RunRecord) -> bool:
    if record.agent_pid is None or record.boot_id is None or record.agent_start_ticks is None:
        return False
    return identity.is_alive(identity.ProcessId(record.boot_id, record.agent_pid, record.agent_start_ticks))


def log_path(run_dir: RunDir, stream: str, rank: int, generation: int) -> Path:
    """Return the file of a log stream: out, err, agent, events."""
    if stream in ("out", "err"):
        return run_dir.log(generation, rank, stream)
    if stream == "events":
        return run_dir.events
    if stream == "agent":
        return run_dir.path / "agent.log"
    raise ValueError(f"no log named {stream!r}")


def read_from(path: Path, offset: int, size: int, tail_lines: int | None) -> tuple[bytes, int]:
    """Return up to ``size`` bytes of ``path`` from ``offset``, or its last lines, and where they start."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return b"", max(0, offset)
    with os.fdopen(fd, "rb") as file:
        if tail_lines is None:
            start = _next_data(file.fileno(), offset)
            file.seek(start)
            return file.read(size), start
        end = file.seek(0, os.SEEK_END)
        start = max(0, end - size)
        file.seek(start)
        data = file.read(size)
    lines = data.splitlines(keepends=True)
    kept = b"".join(lines[-tail_lines:]) if tail_lines > 0 else b""
    return kept, start + len(data) - len(kept)


def _next_data(fd: int, offset: int) -> int:
    """Return where the bytes at or after ``offset`` begin: a log beyond its cap has a hole."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError:  # at the end of the file, or a file system that knows no holes
        return offset


def file_size(path: Path) -> int:
    """Return the size of a file, 0 when it is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def copy_tree(source: Path, target: Path) -> None:
    """Give a run its own copy of a synchronised folder: the verified one stays as it is."""
    if not source.is_dir():
        raise FileNotFoundError(f"the synchronised folder {source.name[:12]} is not on this node")
    if not target.exists():
        shutil.copytree(source, target, symlinks=True)


def file_sha256(path: Path) -> str | None:
    """Return the SHA-256 of a file, None when it is not there."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError:
        return None
    return digest.hexdigest()


def tree_bytes(path: Path) -> int:
    """Return the bytes of all files below ``path`` (a file: its own)."""
    if not path.is_dir():
        return path.lstat().st_size
    return sum(
        os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(path) for name in names
    )


def write_all(fd: int, data: bytes) -> None:
    """Write everything to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(READ_BYTES)
    except OSError:
        return b""


def _is_sha256(text: object) -> bool:
    return isinstance(text, str) and len(text) == 64 and all(c in "0123456789abcdef" for c in text)


def main(home: str, parameters: Mapping[str, Any]) -> None:
    """Serve the client on stdin and stdout; called by the bootstrap."""
    identity.set_name("gpuctl:bridge")
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        try:
            Bridge(Home(Path(home)), parameters).run()
        except ProtocolError as exc:
            print(f"gpuctl: {exc.message}", file=sys.stderr)
    # the interpreter's shutdown would flush to a pipe that may be gone
    os._exit(0)
