"""The lead: a mode of rank 0's agent that starts generations, fans failures out and ends the run.

It talks to every node's supervisor through a :class:`Member`: its own by function calls, the
others over TLS. Clients (attached launch, status, stop) hear its events.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpuctl.agent.exits import RankExit, first_cause
from gpuctl.agent.frames import Frame
from gpuctl.agent.link import Link
from gpuctl.agent.loop import Loop, Timer
from gpuctl.agent.recorder import Recorder
from gpuctl.core.codec import from_json, to_json
from gpuctl.core.plan import NodePlan, Plan
from gpuctl.core.run import RankFailure, RankState, RunState

#: After the last node answered, or this long, a generation is over whoever did not answer.
SWEPT_LIMIT_S = 8.0
#: A cut-off node ends its own ranks before dead_s is over; the lead counts it as lost a little later.
FENCE_MARGIN_S = 0.75
#: Back-off before a restart, seconds, by attempt; the last repeats.
RESTART_DELAYS_S = (1.0, 5.0, 15.0, 45.0)
#: Restarts without a new step that end the run.
MAX_FRUITLESS = 3


@dataclass
class Member:
    """One node as the lead sees it."""

    node: NodePlan
    send: Callable[[Frame], None] | None = None
    link: Link | None = None
    is_armed: bool = False
    is_lost: bool = False
    has_swept: bool = False
    has_started: bool = False
    leftovers: tuple[int, ...] = ()
    heard_at: float = field(default_factory=time.monotonic)
    is_suspect: bool = False
    ranks: tuple[RankState, ...] = ()


class Lead:
    """Decides for the run. Everything runs on the loop's thread."""

    def __init__(self, loop: Loop, plan: Plan, recorder: Recorder, on_end: Callable[[Frame], None]) -> None:
        self.loop = loop
        self.plan = plan
        self.members = {node.node_rank: Member(node) for node in plan.nodes}
        self.clients: list[Link] = []
        self.state = RunState.PREPARING
        self.generation = 0
        self.failure: RankFailure | None = None
        self.reason: str | None = None
        self.last_step: dict[str, Any] = {}
        self._recorder = recorder
        self._on_end = on_end
        self._exits: list[RankExit] = []
        self._restarts = 0
        self._fruitless = 0
        self._best_step = -1
        self._stopped_by: str | None = None
        self._is_ending = False
        self._timer: Timer | None = None

    # -- members

    def join(self, node_rank: int, send: Callable[[Frame], None], link: Link | None) -> None:
        """A node's agent is armed and connected."""
        member = self.members[node_rank]
        member.send, member.link, member.is_armed = send, link, True
        member.heard_at = time.monotonic()
        if all(m.is_armed for m in self.members.values()) and self.state is RunState.PREPARING:
            self._set_state(RunState.ARMED)

    def lost(self, node_rank: int, reason: str) -> None:
        """A node's link closed, or it was silent for too long."""
        member = self.members[node_rank]
        if member.is_lost or self.state.is_final:
            return
        member.is_lost = True
        member.has_swept = True  # nobody is left there to say so; its own agent or guardian sweeps
        if member.link is not None:
            member.link.close("declared lost")
        if not self._is_ending or not self._exits:
            self.event("node_lost", node=member.node.host, message=reason)
            self._exits.append(RankExit(None, member.node.host, message=reason))
        if self.state in (RunState.RUNNING, RunState.ARMED, RunState.STOPPING, RunState.RESTARTING):
            self._end_generation()
        self._conclude_when_swept()

    def hear(self, node_rank: int, frame: Frame) -> None:
        """Handle a frame of a node's supervisor; those of an older generation are void."""
        member = self.members[node_rank]
        member.heard_at = time.monotonic()
        if member.is_suspect:
            member.is_suspect = False
            self.event("warning", message=f"{member.node.host} answers again", node=member.node.host)
        if frame.generation != self.generation or member.is_lost:
            return
        handler = {
            "beat": self._on_beat,
            "started": self._on_started,
            "event": self._on_event,
            "log": self._on_log,
            "exit": self._on_exit,
            "swept": self._on_swept,
            "comm_id": self._on_comm_id,
            "stop": self._on_stop,
        }.get(frame.type)
        if handler is not None:
            handler(member, frame)

    def check_silence(self) -> None:
        """Declare nodes suspect after suspect_s and lost after dead_s of silence."""
        now, limits = time.monotonic(), self.plan.failure
        for rank, member in self.members.items():
            silent = now - member.heard_at
            if member.link is None or member.is_lost or not member.is_armed:
                continue
            if silent > limits.dead_s + FENCE_MARGIN_S:
                self.lost(rank, f"no heartbeat for {silent:.0f} s")
            elif silent > limits.suspect_s and not member.is_suspect:
                member.is_suspect = True
                self.event(
                    "warning",
                    message=f"{member.node.host} has been silent for {silent:.0f} s",
                    node=member.node.host,
                )

    def forgive(self, seconds: float) -> None:
        """Do not count ``seconds`` in which this process itself stood still as the nodes' silence."""
        for member in self.members.values():
            member.heard_at += seconds

    # -- starting

    def start(self) -> None:
        """Start the first generation; the caller saw every node armed."""
        assert all(m.is_armed for m in self.members.values())
        self._start_generation()

    def _start_generation(self) -> None:
        self._is_ending = False
        self._exits = []
        for member in self.members.values():
            member.has_swept = member.has_started = False
            member.ranks = ()
        try:
            listener = self._listen()
        except OSError as exc:
            self._finish(RunState.FAILED, f"no port for the rendezvous: {exc}")
            return
        fields = {
            "master_addr": self.master_address,
            "master_port": listener.getsockname()[1],
            "restart_count": self._restarts,
        }
        self._set_state(RunState.RUNNING)
        self.event(
            "started",
            schema_version=1,
            name=self.plan.name,
            world_size=self.plan.world_size,
            nodes=[m.node.host for m in self.members.values()],
            strategy=self.plan.strategy,
            restart_count=self._restarts,
            **{k: fields[k] for k in ("master_addr", "master_port")},
        )
        if not self.plan.program.is_bundled:
            listener.close()  # the script's rank 0 binds it itself: torch's env:// store knows no other way
        for rank, member in self.members.items():
            local = (
                {"listener_fd": listener.fileno()}
                if rank == self.plan.lead and listener.fileno() >= 0
                else {}
            )
            self._send(member, Frame("start", {**fields, **local}, b"", self.generation))
        # any other holder of the descriptor would keep a dead store's port accepting
        listener.close()

    @property
    def master_address(self) -> str:
        return self.plan.master_addr or self.plan.lead_node.address

    def _listen(self) -> socket.socket:
        """Bind the store's socket to the chosen private address, on a port of the range."""
        family = socket.AF_INET6 if ":" in self.master_address else socket.AF_INET
        if self.plan.master_port is not None:
            candidates = [self.plan.master_port]
        elif self.plan.ports is not None:
            candidates = list(range(self.plan.ports.first, self.plan.ports.last + 1))
        else:
            candidates = [0]
        return bind_first(family, self.master_address, candidates)

    # -- what members say

    def _on_started(self, member: Member, frame: Frame) -> None:
        member.has_started = True
        self.event(
            "phase",
            phase="started",
            node=member.node.host,
            node_rank=member.node.node_rank,
            ranks=frame.get("ranks"),
        )

    def _on_beat(self, member: Member, frame: Frame) -> None:
        with contextlib.suppress(ValueError):
            member.ranks = tuple(from_json(RankState, r) for r in frame.get("ranks", []))

    def _on_event(self, member: Member, frame: Frame) -> None:
        fields = dict(frame.fields)
        name = str(fields.pop("event", "warning"))
        if name == "step":
            self.last_step = fields
        self.event(name, node=member.node.host, **{k: v for k, v in fields.items() if k != "node"})

    def _on_log(self, member: Member, frame: Frame) -> None:
        if frame.get("rank") == 0:
            self._to_clients(frame)

    def _on_comm_id(self, _member: Member, frame: Frame) -> None:
        for member in self.members.values():
            self._send(member, Frame("comm_id", frame.fields, frame.payload, self.generation))

    def _on_stop(self, member: Member, frame: Frame) -> None:
        """A node asks to leave: its agent was sent TERM, as before a preemption."""
        self.stop(self.plan.failure.grace_s, f"{frame.get('by', 'the agent')} on {member.node.host}")

    def _on_exit(self, _member: Member, frame: Frame) -> None:
        try:
            ended = from_json(RankExit, frame.fields)
        except ValueError:
            return
        self._exits.append(ended)
        if not ended.is_done:
            self._end_generation()
        elif self.plan.exit_grace_s is not None and self._timer is None and not self._all_exited():
            self._timer = self.loop.call_later(self.plan.exit_grace_s, self._exit_grace_over)

    def _all_exited(self) -> bool:
        return len(self._exits) >= self.plan.world_size

    def _exit_grace_over(self) -> None:
        if not self._all_exited() and not self._is_ending:
            done = sorted(e.rank for e in self._exits if e.rank is not None)
            left = sorted(set(range(self.plan.world_size)) - set(done))
            node = self.plan.node_of(left[0])
            waited = f"{self.plan.exit_grace_s:g} s after rank {done[0]} had exited with 0"
            message = f"rank {left[0]} still ran {waited}"
            self._exits.append(RankExit(left[0], node.host, message=message))
            self._end_generation()

    def _on_swept(self, member: Member, frame: Frame) -> None:
        member.has_swept = True
        member.leftovers = tuple(frame.get("leftovers", ()))
        if member.leftovers:
            self.event(
                "warning",
                node=member.node.host,
                message=f"{member.node.host}: processes {list(member.leftovers)} cannot be killed; reboot it",
            )
        self._conclude_when_swept()

    # -- ending

    def _end_generation(self) -> None:
        """The fan-out: every node ends its ranks now."""
        if self._is_ending:
            return
        self._is_ending = True
        if self._timer is not None:
            self._timer.cancel()
        for member in self.members.values():
            if not member.is_lost:
                self._send(member, Frame("kill", {}, b"", self.generation))
        self._timer = self.loop.call_later(SWEPT_LIMIT_S, self._conclude)

    def _conclude_when_swept(self) -> None:
        if all(m.has_swept for m in self.members.values()) and not self.state.is_final:
            self._conclude()

    def _conclude(self) -> None:
        """A generation is over: done, stopped, failed, or tried again."""
        if self.state.is_final or self.state is RunState.PREPARING:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        cause = first_cause(self._exits)
        if self._stopped_by is not None:
            self._finish(RunState.STOPPED, f"stopped by {self._stopped_by}")
        elif cause is None and self._all_exited():
            self._finish(RunState.DONE, "every rank is done")
        else:
            self._failed(
                cause or RankFailure(self.plan.lead_node.host, 0, "the generation ended without a cause")
            )

    def _failed(self, cause: RankFailure) -> None:
        self.failure = cause
        again = self._may_restart()
        self.event("failed", final=not again, **to_json(cause))
        if not again:
            self._finish(RunState.FAILED, f"{cause.where}: {cause.message}")
            return
        delay = RESTART_DELAYS_S[min(self._restarts, len(RESTART_DELAYS_S) - 1)]
        self._restarts += 1
        self._set_state(RunState.RESTARTING)
        self.event("restarting", attempt=self._restarts, max_restarts=self.plan.max_restarts, delay_s=delay)
        self.generation += 1
        self._timer = self.loop.call_later(delay, self._restart)

    def _may_restart(self) -> bool:
        step = int(self.last_step.get("step", -1))
        self._fruitless = 0 if step > self._best_step else self._fruitless + 1
        self._best_step = max(step, self._best_step)
        everyone = not any(m.is_lost or m.leftovers for m in self.members.values())
        return everyone and self._restarts < self.plan.max_restarts and self._fruitless < MAX_FRUITLESS

    def _restart(self) -> None:
        self._timer = None
        self._start_generation()

    def stop(self, grace_s: float, by: str) -> None:
        """Ask every rank to save and leave; end them after ``grace_s``."""
        if self.state.is_final:
            return
        self._stopped_by = self._stopped_by or by
        if self.state in (RunState.PREPARING, RunState.ARMED, RunState.RESTARTING):
            self._finish(RunState.STOPPED, f"stopped by {by}")
            return
        self._set_state(RunState.STOPPING)
        for member in self.members.values():
            self._send(member, Frame("stop", {"grace_s": grace_s}, b"", self.generation))

    def kill(self, by: str) -> None:
        """End every rank now."""
        if self.state.is_final:
            return
        self._stopped_by = self._stopped_by or by
        if self.state in (RunState.PREPARING, RunState.ARMED, RunState.RESTARTING):
            self._finish(RunState.STOPPED, f"stopped by {by}")
            return
        self._set_state(RunState.STOPPING)
        for member in self.members.values():
            self._send(member, Frame("kill", {"term_s": 0.0}, b"", self.generation))

    def abandon(self, reason: str) -> None:
        """Nobody will start this run: the client went away, or a node refused."""
        if self.state in (RunState.PREPARING, RunState.ARMED):
            self._finish(RunState.STOPPED, reason)

    def _finish(self, state: RunState, reason: str) -> None:
        self.reason = reason
        self._set_state(state)
        if state in (RunState.DONE, RunState.STOPPED):
            self.event(state.value, message=reason, step=self.last_step.get("step"))
        fields = {
            "state": state.value,
            "reason": reason,
            "failure": to_json(self.failure),
            "last_step": self.last_step,
        }
        frame = Frame("end", fields, b"", self.generation)
        for member in self.members.values():
            if member.link is not None and not member.is_lost:
                member.link.send(frame)
        self._on_end(frame)  # writes the end down, then tells the clients

    # -- telling

    def event(self, name: str, /, **fields: Any) -> None:
        """Write an event down and tell the clients (contract 4)."""
        event = {
            "event": name,
            "run": self.plan.run_id,
            "generation": self.generation,
            "time": time.time(),
            **fields,
        }
        self._recorder.event(event)
        self._to_clients(Frame("event", event, b"", self.generation))

    def stacks(self) -> None:
        """Ask every node for its ranks' stacks (they land in the rank's stderr log)."""
        for member in self.members.values():
            self._send(member, Frame("stacks", {}, b"", self.generation))

    @property
    def waiting_for(self) -> str | None:
        """Say who holds the others up, while not every rank has come as far as the first."""
        if self.state is not RunState.RUNNING:
            return None
        ranks = [r for m in self.members.values() for r in m.ranks]
        if len(ranks) < self.plan.world_size:
            absent = [m.node.host for m in self.members.values() if not m.has_started]
            return f"ranks on {', '.join(absent)} to start" if absent else None
        behind = sorted(r.rank for r in ranks if r.phase in (None, "store", "init") and r.exit_code is None)
        if not behind or not self.plan.program.is_bundled:
            return None
        first = min(
            (r for r in ranks if r.rank in behind), key=lambda r: ("", "store", "init").index(r.phase or "")
        )
        return f"rank {first.rank} ({first.phase or 'starting'})"

    def ranks(self) -> tuple[RankState, ...]:
        """Every rank of the run, as last reported."""
        return tuple(sorted((r for m in self.members.values() for r in m.ranks), key=lambda r: r.rank))

    def _set_state(self, state: RunState) -> None:
        self.state = state

    def _send(self, member: Member, frame: Frame) -> None:
        if member.send is not None and not member.is_lost:
            member.send(frame)

    def _to_clients(self, frame: Frame) -> None:
        for client in list(self.clients):
            client.send(frame)


def bind_first(family: socket.AddressFamily, address: str, ports: list[int]) -> socket.socket:
    """Listen on the first free port of ``ports``; raises the last OSError when none is.

    The address is bound, never the wildcard: torch's store has no authentication.
    """
    problem: OSError | None = None
    for port in ports:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if port:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, port))
            sock.listen(4096)
            return sock
        except OSError as exc:
            sock.close()
            problem = OSError(exc.errno, f"{address}:{port or 'any port'}: {os.strerror(exc.errno or 0)}")
    assert problem is not None
    raise problem
