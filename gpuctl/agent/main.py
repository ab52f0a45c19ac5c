"""The agent of one node and one run: starts armed, ends when the run has ended and is written down.

Started by the bridge through ``guardian.start`` with ``FD HOME RUN_ID NODE_RANK``, where FD is
the socket to the first client. It listens on the run directory's unix socket for further clients
(status, stop, attach), and on one TLS socket for the other agents when it is the lead.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuctl.agent import identity
from gpuctl.agent.frames import PROTOCOL, Frame
from gpuctl.agent.lead import Lead, bind_first
from gpuctl.agent.link import Link
from gpuctl.agent.loop import Loop
from gpuctl.agent.paths import Home, RunDir, listen_unix
from gpuctl.agent.recorder import Recorder, write_atomically
from gpuctl.agent.supervisor import Supervisor
from gpuctl.core.codec import from_json, to_json
from gpuctl.core.plan import NodePlan, Plan
from gpuctl.core.run import RankFailure, RunRecord, RunState

if TYPE_CHECKING:
    import ssl

BEAT_S = 1.0
#: Signs of life go out, and silence is judged, several times a beat: how long a node was silent is then
#: known to a fraction of a second, on both sides of a cut link.
PING_S = 0.2
#: The ranks of a cut-off node are gone this long before dead_s is over: 0.2 s of TERM, KILL, one ping.
FENCE_S = 0.6
#: An armed node whose client neither starts the run nor goes away.
ARMED_LIMIT_S = 300.0
HANDSHAKE_S = 10.0
#: Connections that have not proved the run's certificate yet; more are refused at once.
MAX_UNPROVEN = 16
DRAIN_S = 1.0


class Agent:
    """Wires the supervisor, the lead (on rank 0's node) and the clients to one loop."""

    def __init__(self, first_client: socket.socket, home: Home, run_dir: RunDir) -> None:
        self.loop = Loop()
        self.home = home
        self.run_dir = run_dir
        self.clients: list[Link] = []
        self.secrets: dict[str, str] = {}
        self.supervisor: Supervisor | None = None
        self.lead: Lead | None = None
        self.lead_link: Link | None = None
        self.recorder = Recorder(run_dir)
        self.record: RunRecord | None = None
        self._created_at: float | None = None
        self._node: NodePlan | None = None
        self._tls = ("", "")
        self._has_started = False
        self._is_leaving = False
        self._unproven: set[Link] = set()
        self._listeners: list[socket.socket] = []
        self._server_context: ssl.SSLContext | None = None
        self._arming_client = self._add_client(first_client)

    def run(self) -> int:
        """Serve until the run has ended; return the exit code of the process."""
        self._take_signals()
        self._listen(listen_unix(self.run_dir.path), self._accept_client)
        self.loop.call_later(ARMED_LIMIT_S, self._armed_too_long)
        self.loop.call_later(BEAT_S, self._beat)
        self._ping_due = time.monotonic()
        self._ping()
        self.loop.run()
        return 0

    def _take_signals(self) -> None:
        read, write = socket.socketpair()
        for end in (read, write):
            end.setblocking(False)
        self._signals = (read, write)  # kept open for as long as the agent lives
        signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: None)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        self.loop.watch(read.fileno(), lambda: self._signalled(read))

    def _signalled(self, read: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            numbers = read.recv(4096)
            if signal.SIGTERM in numbers and self.supervisor is not None:
                self._report(Frame("stop", {"by": "SIGTERM to the agent"}, b"", self.supervisor.generation))
        if self.supervisor is not None:
            self.supervisor.reap()

    # -- clients

    def _listen(self, sock: socket.socket, accept: Any) -> None:
        sock.setblocking(False)
        self._listeners.append(sock)
        self.loop.watch(sock.fileno(), lambda: accept(sock))

    def _accept_client(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            sock, _ = listener.accept()
            if peer_uid(sock) in (os.getuid(), 0):
                self._add_client(sock)
            else:
                sock.close()

    def _add_client(self, sock: socket.socket) -> Link:
        link = Link(self.loop, sock, self._client_spoke, self._client_left)
        self.clients.append(link)
        return link

    def _client_left(self, link: Link, _reason: str) -> None:
        if link in self.clients:
            self.clients.remove(link)
        if self.lead is not None and link in self.lead.clients:
            self.lead.clients.remove(link)
        if link is self._arming_client and not self._has_started and not self._is_leaving:
            self._abandon("the client went away before the start")

    def _client_spoke(self, link: Link, frame: Frame) -> None:
        handler = {
            "secrets": self._on_secrets,
            "arm": self._on_arm,
            "join": self._on_join,
            "start": self._on_start,
            "stop": self._on_stop,
            "kill": self._on_kill,
            "attach": self._on_attach,
            "status": self._on_status,
            "stacks": self._on_stacks,
            "ping": self._on_ping,
        }.get(frame.type)
        if handler is not None:
            handler(link, frame)

    def _on_ping(self, link: Link, _frame: Frame) -> None:
        link.send(Frame("ping"))

    def _on_secrets(self, _link: Link, frame: Frame) -> None:
        self.secrets.update({str(k): str(v) for k, v in frame.get("values", {}).items()})

    # -- arming

    def _on_arm(self, link: Link, frame: Frame) -> None:
        if self.supervisor is not None or link is not self._arming_client:
            return
        try:
            plan = from_json(Plan, frame.fields["plan"])
            node = plan.nodes[int(frame.fields["node_rank"])]
        except (ValueError, KeyError, IndexError) as exc:
            self._refuse([f"the plan cannot be read: {exc}"])
            return
        self._node, self._created_at = node, frame.get("created_at")
        write_atomically(self.run_dir.plan, _json(to_json(plan)))
        self.record = self._first_record(plan, node, bool(frame.get("is_detached")))
        self.supervisor = Supervisor(
            self.loop, plan, node, self.home, self.run_dir, self.secrets, self._report
        )
        self.record = replace(self.record, kill_method=self.supervisor.killer.name)
        self._tls = (str(frame.get("certificate", "")), str(frame.get("key", "")))
        reasons = self.supervisor.check()
        if not reasons and node.node_rank == plan.lead:
            # only the lead locks now: of two launches on the same nodes exactly one gets past here
            reasons = self.supervisor.arm()
        if reasons:
            self._refuse(reasons)
        elif node.node_rank == plan.lead:
            self._arm_lead(plan, node)
        else:
            self._arming_client.send(Frame("checked"))

    def _on_join(self, link: Link, frame: Frame) -> None:
        """The second half of arming on every node but the lead: lock, and dial the lead."""
        if self.supervisor is None or self.lead_link is not None or link is not self._arming_client:
            return
        reasons = self.supervisor.arm()
        if reasons:
            self._refuse(reasons)
            return
        assert self._node is not None
        self._join_lead(self.supervisor.plan, self._node, frame)

    def _first_record(self, plan: Plan, node: NodePlan, is_detached: bool) -> RunRecord:
        mine = identity.identify(os.getpid())
        return RunRecord(
            run_id=plan.run_id,
            name=plan.name,
            cluster=plan.cluster,
            state=RunState.PREPARING,
            node_rank=node.node_rank,
            host=node.host,
            num_nodes=len(plan.nodes),
            world_size=plan.world_size,
            strategy=plan.strategy,
            program=" ".join(plan.program.argv) or plan.program.kind,
            uid=os.getuid(),
            user=user_name(),
            created_at=self._created_at,
            agent_pid=os.getpid(),
            agent_start_ticks=mine.start_ticks if mine else None,
            boot_id=mine.boot_id if mine else None,
            is_detached=is_detached,
        )

    def _refuse(self, reasons: list[str]) -> None:
        self._arming_client.send(Frame("refused", {"reasons": reasons}))
        self._leave(RunState.FAILED, "; ".join(reasons))

    def _arm_lead(self, plan: Plan, node: NodePlan) -> None:
        self.lead = Lead(self.loop, plan, self.recorder, self._run_ended)
        self.lead.clients.append(self._arming_client)
        assert self.supervisor is not None
        self.lead.join(node.node_rank, self.supervisor.handle, None)
        port = None
        if len(plan.nodes) > 1:
            try:
                port = self._listen_for_agents(plan, node)
            except OSError as exc:
                self._refuse([f"cannot listen for the other agents: {exc}"])
                return
        self._set_state(self.lead.state)
        self._arming_client.send(Frame("armed", {"address": node.address, "port": port}))

    def _listen_for_agents(self, plan: Plan, node: NodePlan) -> int:
        from gpuctl.agent import tls

        self._server_context = tls.context(*self._tls, str(self.run_dir.path), is_server=True)
        family = socket.AF_INET6 if ":" in node.address else socket.AF_INET
        # the store takes its port from the front of the range, the agents theirs from its end
        ports = [0] if plan.ports is None else list(range(plan.ports.last, plan.ports.first - 1, -1))
        sock = bind_first(family, node.address, ports)
        self._listen(sock, self._accept_agent)
        return int(sock.getsockname()[1])

    def _accept_agent(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        if len(self._unproven) >= MAX_UNPROVEN or self._server_context is None:
            sock.close()
            return
        sock.setblocking(False)
        wrapped = self._server_context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        link = Link(self.loop, wrapped, self._agent_spoke, self._agent_left, handshake_s=HANDSHAKE_S)
        self._unproven.add(link)

    def _agent_spoke(self, link: Link, frame: Frame) -> None:
        assert self.lead is not None
        rank = next((r for r, m in self.lead.members.items() if m.link is link), None)
        if rank is not None:
            self.lead.hear(rank, frame)
            self._set_state(self.lead.state)
        elif frame.type == "hello":
            self._agent_joined(link, frame)

    def _agent_joined(self, link: Link, frame: Frame) -> None:
        """Take an agent that proved the certificate; one that joined already keeps its place."""
        assert self.lead is not None
        self._unproven.discard(link)
        rank = frame.get("node_rank")
        member = self.lead.members.get(rank) if isinstance(rank, int) else None
        wrong = frame.get("run_id") != self.lead.plan.run_id or frame.get("protocol") != PROTOCOL
        if member is None or member.is_armed or wrong:
            link.close("not an agent of this run")
            return
        link.name = member.node.host
        keep_alive(link.sock)
        self.lead.join(member.node.node_rank, link.send, link)
        self._set_state(self.lead.state)
        link.send(Frame("hello", {"protocol": PROTOCOL, "run_id": self.lead.plan.run_id}))

    def _agent_left(self, link: Link, reason: str) -> None:
        self._unproven.discard(link)
        if self.lead is None:
            return
        for rank, member in self.lead.members.items():
            if member.link is link:
                self.lead.lost(rank, f"the agent on {member.node.host} died ({reason})")
                self._set_state(self.lead.state)

    def _join_lead(self, plan: Plan, node: NodePlan, frame: Frame) -> None:
        from gpuctl.agent import tls

        address, port = frame.fields["lead_address"], int(frame.fields["lead_port"])
        context = tls.context(*self._tls, str(self.run_dir.path), is_server=False)
        try:
            # blocking is right here: nothing else can happen on this node before it is joined
            raw = socket.create_connection((address, port), timeout=HANDSHAKE_S)
        except OSError as exc:
            why = exc.strerror or exc
            self._refuse([f"the lead {plan.lead_node.host} cannot be reached at {address}:{port}: {why}"])
            return
        keep_alive(raw)
        raw.setblocking(False)
        sock = context.wrap_socket(raw, do_handshake_on_connect=False)
        self.lead_link = Link(self.loop, sock, self._lead_spoke, self._lead_left, handshake_s=HANDSHAKE_S)
        hello = Frame("hello", {"protocol": PROTOCOL, "run_id": plan.run_id, "node_rank": node.node_rank})
        self.lead_link.when_ready(lambda link: link.send(hello))

    # -- the lead's word, on the other nodes

    def _lead_spoke(self, _link: Link, frame: Frame) -> None:
        assert self.supervisor is not None
        if frame.type == "hello":
            self._set_state(RunState.ARMED)
            self._arming_client.send(Frame("armed", {}))
        elif frame.type == "end":
            self._run_ended(frame)
        else:
            if frame.type == "start":
                self._has_started = True
                self._set_state(RunState.RUNNING)
            elif frame.type == "stop":
                self._set_state(RunState.STOPPING)
            self.supervisor.handle(frame)

    def _lead_left(self, _link: Link, reason: str) -> None:
        if self._is_leaving:
            return
        if not self._has_started:
            self._refuse([f"the lead went away: {reason}"])
            return
        self._fence(f"the lead's node is lost: {reason}")

    def _fence(self, reason: str) -> None:
        """End the own ranks: nobody can tell this node any more whether the run goes on."""
        assert self.supervisor is not None
        if self.record is not None and self.record.state is RunState.LOST:
            return
        self._lost_reason = reason
        self._set_state(RunState.LOST, reason=reason)
        self.supervisor.begin_end(term_s=0.2)

    def _report(self, frame: Frame) -> None:
        """Carry a supervisor's report to the lead."""
        if self.lead is not None:
            assert self._node is not None
            node_rank, lead = self._node.node_rank, self.lead
            self.loop.call_soon(lambda: self._hear_own(lead, node_rank, frame))
        elif self.record is not None and self.record.state is RunState.LOST:
            if frame.type == "swept":
                self._leave(RunState.LOST, self.record.reason or "the lead's node is lost")
        elif self.lead_link is not None:
            self.lead_link.send(frame)

    def _hear_own(self, lead: Lead, node_rank: int, frame: Frame) -> None:
        lead.hear(node_rank, frame)
        self._set_state(lead.state)

    # -- what clients ask for

    def _on_start(self, link: Link, _frame: Frame) -> None:
        if self.lead is None or self._has_started:
            return
        absent = [m.node.host for m in self.lead.members.values() if not m.is_armed]
        if absent:
            link.send(Frame("refused", {"reasons": [f"not armed: {', '.join(absent)}"]}))
            return
        self._has_started = True
        self.lead.start()
        self._set_state(self.lead.state)

    def _on_stop(self, _link: Link, frame: Frame) -> None:
        if self.lead is not None:
            self.lead.stop(float(frame.get("grace_s", self.lead.plan.failure.grace_s)), str(frame.get("by")))
            self._set_state(self.lead.state)

    def _on_kill(self, _link: Link, frame: Frame) -> None:
        if self.lead is not None:
            self.lead.kill(str(frame.get("by")))
            self._set_state(self.lead.state)

    def _on_attach(self, link: Link, _frame: Frame) -> None:
        if self.lead is not None and link not in self.lead.clients:
            self.lead.clients.append(link)

    def _on_stacks(self, _link: Link, _frame: Frame) -> None:
        if self.lead is not None:
            self.lead.stacks()

    def _on_status(self, link: Link, _frame: Frame) -> None:
        self._refresh()
        link.send(Frame("status", {"record": to_json(self.record)}))

    # -- time

    def _beat(self) -> None:
        if self._is_leaving:
            return
        self.loop.call_later(BEAT_S, self._beat)
        if self.supervisor is not None:
            self.supervisor.beat()
        self._refresh()

    def _ping(self) -> None:
        """Give a sign of life to the peers, and judge their silence."""
        if self._is_leaving:
            return
        now = time.monotonic()
        self._forgive(now - self._ping_due)
        self._ping_due = now + PING_S
        self.loop.call_later(PING_S, self._ping)
        if self.lead is not None:
            for member in self.lead.members.values():
                if member.link is not None and not member.is_lost:
                    member.link.send(Frame("ping", {}, b"", self.lead.generation))
            self.lead.check_silence()
            self._set_state(self.lead.state)
        elif self.lead_link is not None and self._has_started:
            assert self.supervisor is not None
            self.lead_link.send(Frame("ping", {}, b"", self.supervisor.generation))
            silent = now - self.lead_link.heard_at
            # fenced before the lead declares this node dead: never two nodes that believe in themselves
            if silent > self.supervisor.plan.failure.dead_s - FENCE_S:
                self._fence(f"no heartbeat from the lead for {silent:.0f} s")

    def _forgive(self, late_s: float) -> None:
        """This process stood still (stopped, starved): what came meanwhile lies unread, it is no silence."""
        if late_s < BEAT_S:
            return
        if self.lead is not None:
            self.lead.forgive(late_s)
        if self.lead_link is not None:
            self.lead_link.heard_at += late_s

    def _armed_too_long(self) -> None:
        if not self._has_started:
            self._abandon(f"not started within {ARMED_LIMIT_S:.0f} s")

    def _abandon(self, reason: str) -> None:
        if self.lead is not None:
            self.lead.abandon(reason)
        else:
            self._leave(RunState.STOPPED, reason)

    # -- the record and the end

    def _refresh(self) -> None:
        """Bring the record up to date and write it."""
        if self.record is None or self.supervisor is None or self._is_leaving:
            return
        ranks = self.lead.ranks() if self.lead is not None else ()
        own = tuple(rank.state for rank in self.supervisor.ranks)
        self.record = replace(self.record, ranks=ranks or own, generation=self.supervisor.generation)
        if self.lead is not None:
            step = self.lead.last_step
            self.record = replace(
                self.record,
                step=step.get("step"),
                loss=step.get("loss"),
                waiting_for=self.lead.waiting_for,
                failure=self.lead.failure,
                reason=self.lead.reason,
            )
        self._write_record()

    def _set_state(self, state: RunState, *, reason: str | None = None) -> None:
        if self.record is not None and self.record.state is not state and not self._is_leaving:
            self.record = replace(self.record, state=state, reason=reason or self.record.reason)
            self._write_record()

    def _write_record(self) -> None:
        assert self.record is not None
        self.record = replace(self.record, updated_at=time.time())
        self.recorder.state(self.record)

    def _run_ended(self, frame: Frame) -> None:
        failure = frame.get("failure")
        if self.record is not None:
            if self.lead is not None:
                self._refresh()
            step = frame.get("last_step") or {}
            self.record = replace(
                self.record,
                failure=from_json(RankFailure, failure) if failure else None,
                step=step.get("step"),
                loss=step.get("loss"),
            )
        self._leave(RunState(frame.fields["state"]), str(frame.get("reason")), frame)

    def _leave(self, state: RunState, reason: str, end: Frame | None = None) -> None:
        """Write the final record, let the peers read what was sent, stop the loop."""
        if self._is_leaving:
            return
        if self.record is not None:
            own = tuple(r.state for r in self.supervisor.ranks) if self.supervisor is not None else ()
            ranks = (self.lead.ranks() if self.lead is not None else ()) or own
            self.record = replace(
                self.record, state=state, reason=reason, ended_at=time.time(), ranks=ranks, waiting_for=None
            )
            self._write_record()
        self._is_leaving = True
        if self.supervisor is not None:
            self.supervisor.close()
        # clients learn of the end only when it is on the disk: `status` right after must know it
        self.recorder.close(DRAIN_S)
        if self.lead is not None and end is not None:
            for client in list(self.lead.clients):
                client.send(end)
        for listener in self._listeners:
            self.loop.forget(listener.fileno())
            listener.close()
        with contextlib.suppress(OSError):
            os.unlink(self.run_dir.path / "tls.pem")
        if not self._has_started:
            self._leave_no_trace()
        self._stop_when_drained(time.monotonic() + DRAIN_S)

    def _leave_no_trace(self) -> None:
        """Remove a run that never started: the client was told why."""
        shutil.rmtree(self.run_dir.path, ignore_errors=True)
        with contextlib.suppress(OSError):  # another node's part of it may lie there too
            self.run_dir.path.parent.rmdir()

    def _stop_when_drained(self, deadline: float) -> None:
        links = list(self.clients)
        if self.lead_link is not None:
            links.append(self.lead_link)
        if self.lead is not None:
            links += [m.link for m in self.lead.members.values() if m.link is not None]
        if all(link.is_drained for link in links) or time.monotonic() > deadline:
            with contextlib.suppress(OSError):
                os.unlink(self.run_dir.path / "sock")
            self.loop.stop()
        else:
            self.loop.call_later(0.01, lambda: self._stop_when_drained(deadline))


def peer_uid(sock: socket.socket) -> int:
    """Return the uid at the other end of a unix socket."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", data)[1])


def keep_alive(sock: socket.socket) -> None:
    """Small frames leave at once, and a dead peer is noticed by the kernel too."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def user_name() -> str:
    """Return the name of this process's user, or its number where it has none."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _json(value: Any) -> str:
    import json

    return json.dumps(value)


def main(arguments: list[str]) -> int:
    """Run the agent: ``FD HOME RUN_ID NODE_RANK``; called below the guardian (``guardian.start``)."""
    fd, home_path, run_id, node_rank = arguments
    home = Home(Path(home_path))
    run_dir = home.run_dir(run_id, int(node_rank))
    identity.set_name("gpuctl:agent")
    identity.set_subreaper()
    return Agent(socket.socket(fileno=int(fd)), home, run_dir).run()
