"""One node's part of a run: arm, start the ranks, watch them, end them, report to the lead.

It decides nothing about other nodes: it handles the lead's frames (start, stop, kill, stacks,
comm_id) and reports started, beat, event, log, exit and swept. On the lead's own node the same
frames go through function calls.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuctl.agent import forkclient, identity
from gpuctl.agent.arming import reasons_not_to_start, working_directory
from gpuctl.agent.environment import Start, node_environment, rank_environment
from gpuctl.agent.exits import RankExit, describe, ended_by_us, last_error_line, read_error_file, signal_name
from gpuctl.agent.frames import Frame
from gpuctl.agent.kill import choose_method
from gpuctl.agent.link import Link
from gpuctl.agent.locks import LockBusy, Locks, acquire
from gpuctl.agent.logs import LogPump
from gpuctl.agent.loop import Loop, Timer
from gpuctl.agent.oom import OomWatch
from gpuctl.agent.paths import Home, RunDir
from gpuctl.agent.worker import ERROR_FILE
from gpuctl.core.codec import to_json
from gpuctl.core.hardware import Vendor
from gpuctl.core.plan import NodePlan, Plan
from gpuctl.core.run import RankState

#: Between TERM and KILL after a failure: peers are stuck in collectives, more only burns GPU time.
FAILURE_TERM_S = 0.5
#: How long KILL may take before what is left is reported as unkillable (D state).
KILL_LIMIT_S = 5.0
SWEEP_EVERY_S = 0.01
TAIL_LINES = 40


@dataclass
class Rank:
    """A rank of this node in the current generation."""

    state: RankState
    pid: int | None = None
    process: identity.ProcessId | None = None
    channel: Link | None = None
    has_exited: bool = False

    @property
    def is_alive(self) -> bool:
        return not self.has_exited


class Supervisor:
    """Owns the ranks, locks and logs of one node. Everything runs on the loop's thread."""

    def __init__(
        self,
        loop: Loop,
        plan: Plan,
        node: NodePlan,
        home: Home,
        run_dir: RunDir,
        secrets: Mapping[str, str],
        report: Callable[[Frame], None],
    ) -> None:
        self.loop = loop
        self.plan = plan
        self.node = node
        self.home = home
        self.run_dir = run_dir
        self.report = report
        self.generation = 0
        self.ranks: list[Rank] = []
        self.killer = choose_method(plan.run_id)
        self._env = node_environment(plan, node, os.environ, secrets)
        self._server: forkclient.ForkServer | None = None
        self._import_error: tuple[str, str | None] | None = None
        self._locks: Locks | None = None
        self._pump: LogPump | None = None
        self._oom = OomWatch()
        self._is_ending = False
        self._end_deadline: float | None = None
        self._timers: list[Timer] = []
        self._error: str | None = None
        self._has_swept = True

    # -- arming

    def check(self) -> list[str]:
        """Return everything that would keep the ranks from starting here."""
        return reasons_not_to_start(self.plan, self.node, self.home, self.run_dir, self._env)

    def arm(self) -> list[str]:
        """Take the locks and start the fork server; return who holds a lock already."""
        reasons = self._take_locks()
        if not reasons and self.plan.program.is_bundled:
            self._start_server()
        return reasons

    def _take_locks(self) -> list[str]:
        holder = {"run": self.plan.run_id, "uid": os.getuid(), "pid": os.getpid(), "since": time.time()}
        try:
            self._locks = acquire(self._lock_names(), holder)
        except LockBusy as busy:
            return [str(busy)]
        return []

    def _lock_names(self) -> list[str]:
        if self.node.vendor is not Vendor.CPU:
            return [gpu.uuid or f"{self.node.vendor.value}-{gpu.index}" for gpu in self.node.gpus]
        # two logical CPU nodes may share a machine when they keep their state apart
        slot = hashlib.sha256(os.fsencode(self.home.path)).hexdigest()[:8]
        return [f"cpu-{socket.gethostname()}-{slot}"]

    def _start_server(self) -> None:
        """Start the fork server at once: its import of torch overlaps the barrier."""
        program = self.plan.program
        self.run_dir.path.mkdir(parents=True, exist_ok=True)
        bundle = str(self.home.tree("bundles", self.plan.bundle_sha256 or ""))
        env = {**self._env, "PYTHONPATH": _prepend_path(bundle, self._env.get("PYTHONPATH"))}
        fd = os.open(self.run_dir.path / "forkserver.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._server = forkclient.ForkServer.start(
            [sys.executable],
            env,
            program.preload,
            cwd=str(self.run_dir.path),
            stderr_fd=fd,
            keep_fds=self._locks.fds if self._locks else (),
        )
        os.close(fd)
        self.loop.watch(self._server.fileno(), self._server_spoke)

    # -- frames from the lead

    def handle(self, frame: Frame) -> None:
        """Obey the lead; frames of an older generation are void."""
        if frame.type == "start":
            self._start(frame)
        elif frame.generation != self.generation:
            return
        elif frame.type == "stop":
            self._stop(float(frame.get("grace_s", self.plan.failure.grace_s)))
        elif frame.type == "kill":
            self.begin_end(term_s=float(frame.get("term_s", FAILURE_TERM_S)))
        elif frame.type == "stacks":
            self._dump_stacks()
        elif frame.type in ("comm_id", "save", "commit"):
            self._to_ranks(frame)

    def _to_ranks(self, frame: Frame) -> None:
        for rank in self.ranks:
            if rank.channel is not None:
                rank.channel.send(frame)

    # -- starting

    def _start(self, frame: Frame) -> None:
        self.generation = frame.generation
        self._is_ending, self._end_deadline, self._has_swept = False, None, False
        start = Start(
            frame.generation,
            frame.fields["master_addr"],
            int(frame.fields["master_port"]),
            int(frame.get("restart_count", 0)),
        )
        self.run_dir.generation(self.generation).mkdir(parents=True, exist_ok=True)
        self._pump = LogPump(on_line=self._line, wake=lambda: self.loop.call_soon(self._forward_lines))
        self.ranks = [Rank(RankState(rank, local_rank)) for local_rank, rank in enumerate(self.node.ranks)]
        if self.plan.program.is_bundled and self._server is None:
            if self._import_error is not None:
                message, traceback = self._import_error
                self.loop.call_soon(lambda: self._server_failed(message, traceback))
                return
            self._start_server()  # it died since the arming or the last generation
        listener = frame.get("listener_fd")
        # rank 0 last: it alone gets the listening socket, and the server keeps no copy (contract 9)
        for rank in reversed(self.ranks):
            self._start_rank(rank, start, listener if rank.state.rank == 0 else None)
        if not self.plan.program.is_bundled:
            self._report_started()

    def _start_rank(self, rank: Rank, start: Start, listener_fd: int | None) -> None:
        number = rank.state.rank
        env = {**self._env, **rank_environment(self.plan, self.node, rank.state.local_rank, start)}
        env[ERROR_FILE] = str(self.run_dir.error_file(self.generation, number))
        outputs = [self._output(number, stream) for stream in ("out", "err")]
        try:
            if self.plan.program.is_bundled:
                self._fork_rank(rank, env, outputs, listener_fd)
            else:
                self._exec_rank(rank, env, outputs)
        finally:
            for fd in outputs:
                os.close(fd)

    def _output(self, rank: int, stream: str) -> int:
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        assert self._pump is not None
        self._pump.add(rank, stream, read_fd, self.run_dir.log(self.generation, rank, stream))
        return write_fd

    def _fork_rank(
        self, rank: Rank, env: dict[str, str], outputs: list[int], listener_fd: int | None
    ) -> None:
        ours, theirs = socket.socketpair()
        rank.channel = Link(
            self.loop,
            ours,
            lambda _link, frame: self._rank_spoke(rank, frame),
            lambda _link, _reason: None,
        )
        assert self._server is not None and self.plan.program.module is not None
        self._server.fork(
            rank.state.rank,
            env=env,
            module=self.plan.program.module,
            config=self._bundled_config(),
            cwd=str(self.run_dir.path),
            stdout_fd=outputs[0],
            stderr_fd=outputs[1],
            channel_fd=theirs.fileno(),
            listener_fd=listener_fd,
        )
        theirs.close()

    def _bundled_config(self) -> dict[str, Any]:
        """Resolve what only the node knows: where data and checkpoints lie."""
        config = dict(self.plan.program.config)
        if self.plan.program.kind == "train":
            training = dict(config["training"])
            data = dict(training.get("data") or {})
            if data.get("digest"):
                data["path"] = str(self.home.data(data["digest"]))
            config["training"] = {**training, "data": data}
            # the run id, not the name: a second run of the same name has the same steps
            out = training.get("out")
            folder = Path(out) / self.plan.run_id if out else self.home.checkpoints(self.plan.run_id)
            config["checkpoint_dir"] = str(folder)
        config["run_id"] = self.plan.run_id
        return config

    def _exec_rank(self, rank: Rank, env: dict[str, str], outputs: list[int]) -> None:
        program = self.plan.program
        argv = [sys.executable, *program.argv] if program.kind == "script" else list(program.argv)
        if program.kind == "command" and program.argv[0] == "python":
            argv[0] = sys.executable
        workdir = str(working_directory(self.plan, self.node, self.run_dir))
        keep = self._locks.fds if self._locks else ()
        try:
            pid = forkclient.spawn_exec(
                argv, env, workdir, stdout_fd=outputs[0], stderr_fd=outputs[1], keep_fds=keep
            )
        except OSError as exc:
            error = f"cannot run {argv[0]}: {exc.strerror}"
            self.loop.call_soon(lambda: self._rank_ended(rank, exit_code=127, error=error))
            return
        self._rank_started(rank, pid)

    def _rank_started(self, rank: Rank, pid: int) -> None:
        rank.pid, rank.process = pid, identity.identify(pid)
        rank.state = replace(rank.state, pid=pid)
        self.killer.adopt(pid)

    def _report_started(self) -> None:
        self._report("started", ranks=[{"rank": r.state.rank, "pid": r.pid} for r in self.ranks])

    # -- what ranks and the fork server say

    def _server_spoke(self) -> None:
        assert self._server is not None
        for event in self._server.read_events():
            self._server_event(event)

    def _server_event(self, event: object) -> None:
        by_number = {rank.state.rank: rank for rank in self.ranks}
        if isinstance(event, forkclient.ImportFailed):
            message = f"the import failed: {event.traceback.strip().splitlines()[-1]}"
            self._import_error = (message, event.traceback)  # it may come before there are ranks to fail
            self._server_failed(message, event.traceback)
        elif isinstance(event, forkclient.Gone):
            self._server_failed("the fork server died", None)
        elif isinstance(event, forkclient.Forked):
            self._rank_started(by_number[event.rank], event.pid)
            if all(rank.pid is not None for rank in self.ranks):
                self._report_started()
        elif isinstance(event, forkclient.Exited) and event.rank in by_number:
            rank = by_number[event.rank]
            if rank.pid in (None, event.pid):
                self._reaped(rank, event.status)

    def _server_failed(self, message: str, traceback: str | None) -> None:
        if self._server is not None:
            self.loop.forget(self._server.fileno())
            self._server.close()
            self._server = None
        for rank in self.ranks:
            if rank.is_alive:
                self._rank_ended(rank, exit_code=1, error=message, traceback=traceback)

    def reap(self) -> None:
        """Collect ended children (SIGCHLD): ranks of user scripts, and orphans of any rank."""
        by_pid = {rank.pid: rank for rank in self.ranks if rank.is_alive}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in by_pid and not self.plan.program.is_bundled:
                self._reaped(by_pid[pid], status)

    def _rank_spoke(self, rank: Rank, frame: Frame) -> None:
        if frame.type == "beat":
            rank.state = replace(
                rank.state, phase=frame.get("phase"), step=_newer(frame.get("step"), rank.state.step)
            )
        elif frame.type == "event":
            self._rank_event(rank, frame)
        elif frame.type in ("comm_id", "saved", "commit"):
            self.report(
                Frame(frame.type, {**frame.fields, "rank": rank.state.rank}, frame.payload, self.generation)
            )

    def _rank_event(self, rank: Rank, frame: Frame) -> None:
        fields = frame.fields
        if fields.get("event") == "rank_done":
            rank.state = replace(rank.state, is_done=True)
            if rank.state.rank == 0 and len(fields) > 1:
                self._report("event", **{**fields, "event": "summary", "rank": 0})
            return
        if isinstance(fields.get("step"), int):
            rank.state = replace(rank.state, step=fields["step"])
        self._report("event", **{"rank": rank.state.rank, **fields})

    # -- ends of ranks

    def _reaped(self, rank: Rank, status: int) -> None:
        if rank.channel is not None and not rank.channel.is_closed:
            rank.channel.pump()  # its last words may still be in the socket
        if os.WIFSIGNALED(status):
            self._rank_ended(rank, signal_=os.WTERMSIG(status))
        else:
            self._rank_ended(rank, exit_code=os.waitstatus_to_exitcode(status))

    def _rank_ended(
        self,
        rank: Rank,
        *,
        exit_code: int | None = None,
        signal_: int | None = None,
        error: str | None = None,
        traceback: str | None = None,
    ) -> None:
        if rank.has_exited:
            return
        rank.has_exited = True
        bundled = self.plan.program.is_bundled
        name = signal_name(signal_) if signal_ is not None else None
        is_done = exit_code == 0 and (rank.state.is_done or not bundled)
        rank.state = replace(rank.state, exit_code=exit_code, signal=name, is_done=is_done)
        if rank.channel is not None:
            rank.channel.close()
        report = RankExit(rank.state.rank, self.node.host, exit_code, name, is_done, message=error or "")
        report = (
            replace(report, traceback=traceback)
            if is_done
            else self._explain(rank, report, signal_, traceback)
        )
        self._report("exit", **to_json(report))
        if not is_done and not self._is_ending:
            self.begin_end(term_s=FAILURE_TERM_S)
        elif not any(r.is_alive for r in self.ranks):
            self.begin_end(term_s=0.0)  # all done: end what they left behind

    def _explain(self, rank: Rank, report: RankExit, signal_: int | None, traceback: str | None) -> RankExit:
        error = (
            None
            if report.message
            else read_error_file(self.run_dir.error_file(self.generation, rank.state.rank))
        )
        tail = self._pump.tail(rank.state.rank, TAIL_LINES) if self._pump else []
        text = report.message or (error[0] if error else last_error_line(tail))
        message = describe(report.exit_code, report.signal, text, is_bundled=self.plan.program.is_bundled)
        is_victim = ended_by_us(
            signal_, text, was_asked=self._is_ending, was_killed=self._end_deadline is not None
        )
        if signal_ == signal.SIGKILL and not is_victim and rank.pid is not None:
            message = self._oom.explain(rank.pid) or message
        return replace(
            report,
            message=message,
            is_victim=is_victim,
            traceback=traceback or (error[1] if error else None) or None,
            tail=tuple(tail),
        )

    # -- ending

    def _stop(self, grace_s: float) -> None:
        """TERM now (bundled ranks save and leave), the kill ladder after ``grace_s``."""
        self._signal_ranks(signal.SIGTERM)
        self._timers.append(self.loop.call_later(grace_s, lambda: self.begin_end(term_s=0.0)))
        if not any(rank.is_alive for rank in self.ranks):
            self.begin_end(term_s=0.0)

    def begin_end(self, *, term_s: float) -> None:
        """TERM what runs, KILL after ``term_s``, sweep until nothing is left, report ``swept``."""
        if self._has_swept:
            self._report("swept", leftovers=[])
            return
        if self._is_ending and term_s > 0:
            return
        self._is_ending = True
        if term_s > 0:
            self._signal_ranks(signal.SIGTERM)
        self._timers.append(self.loop.call_later(term_s, self._kill))
        self._kill_when_all_exited()

    def _kill_when_all_exited(self) -> None:
        # the ranks may all be gone before the TERM time is over
        if self._end_deadline is None and not self._has_swept:
            if any(rank.is_alive for rank in self.ranks):
                self._timers.append(self.loop.call_later(SWEEP_EVERY_S, self._kill_when_all_exited))
            else:
                self._kill()

    def _kill(self) -> None:
        if self._end_deadline is None and not self._has_swept:
            self._end_deadline = time.monotonic() + KILL_LIMIT_S
            self._sweep()

    def _sweep(self) -> None:
        """KILL in passes: a process that forks while it is killed is caught by the next pass."""
        assert self._end_deadline is not None
        keep = {self._server.pid} if self._server is not None else set()
        self.killer.kill_all(keep=keep)
        self.reap()
        if self._server is not None:
            self._server_spoke()
        survivors = list(self.killer.survivors(keep=keep))
        alive = any(rank.is_alive for rank in self.ranks)
        if not survivors and not alive:
            self._swept([])
        elif time.monotonic() > self._end_deadline:
            self._swept(survivors)
        else:
            self._timers.append(self.loop.call_later(SWEEP_EVERY_S, self._sweep))

    def _swept(self, leftovers: list[int]) -> None:
        self._has_swept = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._pump is not None:
            self._pump.close(0.5)
            self._forward_lines()
        self._report("swept", leftovers=leftovers)

    def _signal_ranks(self, number: int) -> None:
        for rank in self.ranks:
            if rank.is_alive and rank.process is not None:
                identity.send_signal(rank.process, number)

    def _dump_stacks(self) -> None:
        for rank in self.ranks:
            if (
                rank.is_alive
                and rank.pid is not None
                and rank.process is not None
                and _catches_usr1(rank.pid)
            ):
                identity.send_signal(rank.process, signal.SIGUSR1)

    def close(self) -> None:
        """End the fork server and give the locks back; the ranks are gone by now."""
        if self._server is not None:
            with contextlib.suppress(ValueError, KeyError):
                self.loop.forget(self._server.fileno())
            self._server.close()
            self._server = None
        self.killer.kill_all(keep=set())
        self.killer.close()
        if self._locks is not None:
            self._locks.close()
            self._locks = None

    # -- reporting

    def beat(self) -> None:
        """Report every rank's phase and step."""
        self._report("beat", ranks=[to_json(rank.state) for rank in self.ranks])

    def _line(self, rank: int, stream: str, line: bytes) -> None:
        """Called for each framed line of rank 0: what an attached client shows."""
        self.report(Frame("log", {"rank": rank, "stream": stream}, line, self.generation))

    def _forward_lines(self) -> None:
        if self._pump is not None:
            self._pump.deliver()

    def _report(self, type_: str, /, **fields: Any) -> None:
        self.report(Frame(type_, fields, b"", self.generation))


def _newer(step: int | None, known: int | None) -> int | None:
    return known if step is None else step


def _prepend_path(first: str, rest: str | None) -> str:
    return f"{first}:{rest}" if rest else first


def _catches_usr1(pid: int) -> bool:
    """Return whether ``pid`` handles SIGUSR1: its default action would end a user's script."""
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)
