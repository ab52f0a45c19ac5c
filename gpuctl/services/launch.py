"""Launch: start the agents of a Plan, lead first, arm all or none, start, follow to the end.

The Plan is executed as it is. What is decided here is only order and deadlines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuctl.agent.frames import Frame
from gpuctl.core.cluster import labels
from gpuctl.core.codec import from_json, to_json
from gpuctl.core.nodeset import fold
from gpuctl.core.plan import NodePlan, Plan
from gpuctl.core.run import RankFailure, RunRecord, RunState
from gpuctl.errors import AgentError, CheckFailed, GpuctlError, TimeoutExpired, UnreachableError
from gpuctl.services.bundle import Archive, node_bundle
from gpuctl.services.certificate import make_certificate
from gpuctl.services.nodelink import Interpreter, NodeLink
from gpuctl.transports import Connection
from gpuctl.transports.fanout import fanout

#: Bootstrap with the bundle over a slow link; arming (checks, locks, dialling the lead).
OPEN_S = 60.0
ARM_S = 60.0
UPLOAD_S = 300.0
POLL_S = 0.1
#: After a lost stream: how often and how long the client tries to find the run again.
RECONNECT_TRIES = 3

Event = dict[str, Any]


@dataclass
class Interrupts:
    """How often the user pressed Ctrl-C; filled by a signal handler, read by the follower.

    Before the run has started there is nothing to stop gracefully: a press is KeyboardInterrupt.
    """

    count: int = 0
    is_following: bool = False

    def press(self) -> None:
        if not self.is_following:
            raise KeyboardInterrupt
        self.count += 1


@dataclass(frozen=True)
class Listener:
    """Where progress goes. ``on_log(rank, stream, line)`` gets rank 0's raw lines."""

    on_event: Callable[[Event], None] = lambda event: None
    on_log: Callable[[int, str, bytes], None] = lambda rank, stream, line: None


@dataclass(frozen=True)
class Uploads:
    """What must be on every node before the ranks start, by hash."""

    sync: Archive | None = None
    data: Archive | None = None


@dataclass(frozen=True)
class Outcome:
    """How ``launch`` ended. ``state`` is RUNNING for a detached run that was left to itself."""

    run_id: str
    state: RunState
    reason: str | None = None
    failure: RankFailure | None = None
    was_interrupted: bool = False
    last_step: dict[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """Return the exit code of ``launch`` (design, "What ends what")."""
        if self.was_interrupted:
            return 130
        return 0 if self.state in (RunState.DONE, RunState.RUNNING) else 1


@dataclass(frozen=True)
class Reach:
    """How to get at the nodes: a connection for each node_rank, and how to make another."""

    connections: Mapping[int, Connection]
    reconnect: Callable[[int], Connection]


def launch(
    plan: Plan,
    reach: Reach,
    *,
    secrets: Mapping[int, Mapping[str, str]] | None = None,
    uploads: Uploads = Uploads(),
    listener: Listener = Listener(),
    interrupts: Interrupts | None = None,
    is_detached: bool = False,
) -> Outcome:
    """Execute ``plan`` and return how it ended; a detached run is left once it has started.

    ``secrets`` are the values of each node's ``env_from`` (node_rank -> name -> value).

    Raises CheckFailed when a node refused (nothing was started anywhere), UnreachableError,
    AgentError, TimeoutExpired; KeyboardInterrupt when interrupted before the start.
    """
    assert plan.bundle_sha256 == node_bundle().sha256, "the plan was made for another bundle"
    interrupts = interrupts or Interrupts()
    links = _open_links(plan, reach)
    try:
        _upload(links, uploads)
        _arm(plan, links, secrets or {}, is_detached)
        interrupts.is_following = True
        links[plan.lead].send(Frame("start"))
        return _Follower(plan, reach, links, listener, interrupts, is_detached).follow()
    finally:
        # a link that closes before the start takes its agent along: all or none
        for link in links.values():
            link.close()


def interpreter_of(node: NodePlan) -> Interpreter:
    """Return how Python is started on a planned node."""
    return Interpreter(node.python, node.activate, node.state_dir)


def _open_links(plan: Plan, reach: Reach) -> dict[int, NodeLink]:
    def open_one(node: NodePlan) -> NodeLink:
        return NodeLink.open(reach.connections[node.node_rank], interpreter_of(node), timeout_s=OPEN_S)

    named = dict(zip(labels([n.host for n in plan.nodes]), plan.nodes, strict=True))
    group = fanout(named, open_one, timeout_s=OPEN_S + 5)
    values = group.values()
    opened = {node.node_rank: values[label] for label, node in named.items() if label in values}
    try:
        group.raise_for_failures("cannot run the agent")
    except GpuctlError:
        for link in opened.values():
            link.close()
        raise
    return opened


def _upload(links: Mapping[int, NodeLink], uploads: Uploads) -> None:
    blobs = {"sync": uploads.sync, "data": uploads.data}
    wanted: dict[str, Archive] = {kind: archive for kind, archive in blobs.items() if archive is not None}
    if not wanted:
        return

    def upload_one(link: NodeLink) -> None:
        has = link.request(
            Frame("has", {kind: [archive.sha256] for kind, archive in wanted.items()}),
            "has",
            timeout_s=UPLOAD_S,
        )
        for kind, archive in wanted.items():
            if archive.sha256 not in has.get(kind, []):
                link.upload(kind, archive, timeout_s=UPLOAD_S)

    named = dict(zip(labels([link.host for link in links.values()]), links.values(), strict=True))
    group = fanout(named, upload_one, timeout_s=UPLOAD_S)
    group.raise_for_failures("cannot carry the files over")


def _arm(
    plan: Plan, links: Mapping[int, NodeLink], secrets: Mapping[int, Mapping[str, str]], is_detached: bool
) -> None:
    """The barrier: every node checks at once, the lead locks first, then all others lock and join it."""
    certificate = make_certificate(plan.run_id) if len(plan.nodes) > 1 else None
    base = {"plan": to_json(plan), "created_at": time.time(), "is_detached": is_detached}
    if certificate is not None:
        base.update(certificate=certificate.certificate, key=certificate.key)
    names = labels([n.host for n in plan.nodes])
    nodes = dict(zip(names, plan.nodes, strict=True))

    def check_one(node: NodePlan) -> Frame:
        link = links[node.node_rank]
        if secrets.get(node.node_rank):
            link.send(Frame("secrets", {"values": dict(secrets[node.node_rank])}))
        reply = "armed" if node.node_rank == plan.lead else "checked"
        return link.request(Frame("arm", {**base, "node_rank": node.node_rank}), reply, timeout_s=ARM_S)

    checked = fanout(nodes, check_one, timeout_s=ARM_S + 5)
    if checked.failures:
        raise _not_armed(plan, checked.failures)
    lead = checked.values()[names[plan.lead]]
    join = Frame("join", {"lead_address": lead.get("address"), "lead_port": lead.get("port")})

    def join_one(node: NodePlan) -> Frame:
        return links[node.node_rank].request(join, "armed", timeout_s=ARM_S)

    others = {name: node for name, node in nodes.items() if node.node_rank != plan.lead}
    joined = fanout(others, join_one, timeout_s=ARM_S + 5)
    if joined.failures:
        raise _not_armed(plan, joined.failures)


def _not_armed(plan: Plan, problems: Mapping[str, GpuctlError]) -> GpuctlError:
    """Return one error for all nodes that refused; exit code 1 for a refusal, 3 for a lost node."""
    folded: dict[str, list[str]] = {}
    for name, exc in problems.items():
        text = exc.message.removeprefix(f"{name}: ")
        folded.setdefault(f"{text}: {exc.cause}" if exc.cause else text, []).append(name)
    refused = all(isinstance(exc, AgentError) for exc in problems.values())
    kind = CheckFailed if refused else UnreachableError
    hint = None
    if any("--sync" in text for text in folded):
        hint = "carry the folder over with `--sync`, or set `workdir:` in the cluster file"
    elif any("held by run" in text for text in folded):
        hint = "`gpuctl status` shows the run that holds it, `gpuctl stop RUN` ends it"
    return kind(
        f"{len(problems)} of {len(plan.nodes)} nodes cannot start; nothing was started",
        cause="\n".join(f"{fold(names)}: {text}" for text, names in folded.items()),
        hint=hint,
    )


class _Follower:
    """Follows an attached run: events, rank 0's lines, Ctrl-C, a lost connection."""

    def __init__(
        self,
        plan: Plan,
        reach: Reach,
        links: dict[int, NodeLink],
        listener: Listener,
        interrupts: Interrupts,
        is_detached: bool,
    ) -> None:
        self.plan = plan
        self.reach = reach
        self.links = links
        self.lead = links[plan.lead]
        self.listener = listener
        self.interrupts = interrupts
        self.is_detached = is_detached
        self._handled = 0
        self._started_nodes: set[str] = set()

    def follow(self) -> Outcome:
        """Return how the run ended; of a detached one, once every rank is there."""
        while True:
            self._obey_interrupts()
            try:
                frame = self.lead.receive(POLL_S)
            except TimeoutExpired:
                continue
            except (AgentError, UnreachableError) as exc:
                outcome = self._find_again(exc)
                if outcome is not None:
                    return outcome
                continue
            if frame.type == "event":
                self._on_event({**frame.fields, "generation": frame.generation})
                if self.is_detached and self._all_started():
                    return Outcome(self.plan.run_id, RunState.RUNNING)
            elif frame.type == "log":
                self.listener.on_log(int(frame.get("rank", 0)), str(frame.get("stream")), frame.payload)
            elif frame.type == "end":
                return self._outcome(frame)
            elif frame.type == "refused":
                raise CheckFailed("the run did not start", cause="\n".join(frame.get("reasons", [])))

    def _on_event(self, event: Event) -> None:
        self.listener.on_event(event)
        if event.get("event") == "phase" and event.get("phase") == "started":
            self._started_nodes.add(str(event.get("node_rank")))
            if self._all_started():
                self._leave_the_others()

    def _all_started(self) -> bool:
        return len(self._started_nodes) == len(self.plan.nodes)

    def _leave_the_others(self) -> None:
        """Once every node has started, only the lead is listened to."""
        for node_rank, link in self.links.items():
            if node_rank != self.plan.lead:
                link.close()

    def _outcome(self, frame: Frame) -> Outcome:
        failure = frame.get("failure")
        return Outcome(
            self.plan.run_id,
            RunState(frame.fields["state"]),
            frame.get("reason"),
            from_json(RankFailure, failure) if failure else None,
            was_interrupted=self._handled > 0,
            last_step=frame.get("last_step") or {},
        )

    def _obey_interrupts(self) -> None:
        """First Ctrl-C: save and leave; second: end now; third: the client goes, agents finish."""
        if self.interrupts.count <= self._handled:
            return
        self._handled = self.interrupts.count
        if self._handled >= 3:
            raise KeyboardInterrupt
        if self._handled == 1:
            self.lead.send(Frame("stop", {"grace_s": self.plan.failure.grace_s, "by": "Ctrl-C"}))
            self.listener.on_event({"event": "stopping", "grace_s": self.plan.failure.grace_s})
        else:
            self.lead.send(Frame("kill", {"by": "Ctrl-C"}))
            self.listener.on_event({"event": "killing"})

    def _find_again(self, problem: GpuctlError) -> Outcome | None:
        """The stream ended: the agent died, or only the way to it. None: attached again."""
        self.lead.close()
        last: GpuctlError = problem
        for attempt in range(RECONNECT_TRIES):
            try:
                connection = (
                    self.reach.connections[self.plan.lead]
                    if attempt == 0
                    else self.reach.reconnect(self.plan.lead)
                )
                link = NodeLink.open(connection, interpreter_of(self.plan.lead_node), timeout_s=10.0)
                record = _record_of(link, self.plan)
                if record is None or record.state.is_final:
                    link.close()
                    return self._ended_without_us(record)
                link.send(Frame("attach", {"run_id": self.plan.run_id, "node_rank": self.plan.lead}))
                self.lead = link
                self.listener.on_event({"event": "warning", "message": "connection lost and found again"})
                return None
            except (AgentError, UnreachableError, TimeoutExpired) as exc:
                last = exc
        raise UnreachableError(
            f"the connection to {self.plan.lead_node.host} is lost; the run goes on without this client",
            cause=last.cause or last.message,
            hint=f"`gpuctl logs -f {self.plan.run_id}` follows it, `gpuctl stop {self.plan.run_id}` ends it",
        )

    def _ended_without_us(self, record: RunRecord | None) -> Outcome:
        if record is not None and record.state is not RunState.LOST:
            return Outcome(
                self.plan.run_id,
                record.state,
                record.reason,
                record.failure,
                was_interrupted=self._handled > 0,
            )
        host = self.plan.lead_node.host
        failure = RankFailure(host, None, f"the lead agent on {host} died")
        event = {"event": "failed", "run": self.plan.run_id, "final": True, **to_json(failure)}
        self.listener.on_event(event)
        return Outcome(self.plan.run_id, RunState.LOST, failure.message, failure)


def _record_of(link: NodeLink, plan: Plan) -> RunRecord | None:
    answer = link.request(Frame("status", {"run_id": plan.run_id}), "status", timeout_s=10.0)
    records = [from_json(RunRecord, r) for r in answer.get("records", [])]
    return next((r for r in records if r.node_rank == plan.lead), None)
