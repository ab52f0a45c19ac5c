"""Runs on the nodes: list them, find one by what the user typed, stop it, clean up after it.

The nodes are the truth: everything here works from any machine with the same cluster file.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuctl.agent.frames import Frame
from gpuctl.core.cluster import NodeSpec
from gpuctl.core.codec import from_json
from gpuctl.core.run import RunRecord, RunState
from gpuctl.errors import AgentError, TimeoutExpired, UnknownRun, UnreachableError
from gpuctl.services.nodelink import Interpreter, NodeLink
from gpuctl.transports import Connection
from gpuctl.transports.fanout import GroupResult, fanout

ASK_S = 15.0
#: What a stop may take beyond its grace: the kill ladder's limits and the way there and back.
STOP_MARGIN_S = 15.0


@dataclass(frozen=True)
class Run:
    """One run, put together from what its nodes say."""

    run_id: str
    records: tuple[RunRecord, ...]
    labels: tuple[str, ...]
    """For each record, the connection it came from."""

    @property
    def lead(self) -> RunRecord:
        """Return the record of the lead's node, or of the lowest node that answered."""
        return min(self.records, key=lambda r: r.node_rank)

    @property
    def state(self) -> RunState:
        """Return the lead's word; without it, LOST once every other node is final."""
        if self.lead.node_rank == 0 or not self.lead.state.is_final:
            return self.lead.state
        return self.lead.state if self.lead.state is not RunState.DONE else RunState.LOST

    def label_of(self, node_rank: int) -> str | None:
        """Return the connection label of a node of this run."""
        for record, label in zip(self.records, self.labels, strict=True):
            if record.node_rank == node_rank:
                return label
        return None


@dataclass(frozen=True)
class StopResult:
    """What ``stop`` found and did."""

    run_id: str
    state: RunState
    reason: str | None
    was_finished: bool
    elapsed_s: float


@dataclass(frozen=True)
class CleanResult:
    """What was (or would be) removed on one node."""

    removed: tuple[str, ...]
    kept: tuple[str, ...]
    freed_bytes: int


def interpreter(spec: NodeSpec) -> Interpreter:
    """Return how Python is started on a node of the cluster file."""
    return Interpreter(spec.python or "python3", spec.activate, spec.state_dir)


def open_link(connection: Connection) -> NodeLink:
    """Open a bridge on a node."""
    return NodeLink.open(connection, interpreter(connection.node), timeout_s=ASK_S)


def ask(connection: Connection, frame: Frame, reply: str) -> Frame:
    """Ask a node one question."""
    link = open_link(connection)
    try:
        return link.request(frame, reply, timeout_s=ASK_S)
    finally:
        link.close()


def list_runs(connections: Mapping[str, Connection]) -> tuple[list[Run], GroupResult[list[RunRecord]]]:
    """Return all runs the nodes know, newest first, and the answers by node (failures are data)."""

    def records_of(connection: Connection) -> list[RunRecord]:
        answer = ask(connection, Frame("status"), "status")
        return [from_json(RunRecord, record) for record in answer.get("records", [])]

    group = fanout(connections, records_of, timeout_s=ASK_S + 15)
    by_id: dict[str, list[tuple[RunRecord, str]]] = {}
    seen: set[tuple[str, int]] = set()
    for label, records in group.values().items():
        for record in records:
            # nodes that share a disk, or a machine, report the same record twice
            if (record.run_id, record.node_rank) not in seen:
                seen.add((record.run_id, record.node_rank))
                by_id.setdefault(record.run_id, []).append((record, label))
    runs = [
        Run(run_id, tuple(record for record, _ in pairs), tuple(label for _, label in pairs))
        for run_id, pairs in by_id.items()
    ]
    return sorted(runs, key=lambda run: (run.lead.created_at or 0.0, run.run_id), reverse=True), group


def find_run(text: str, runs: Sequence[Run], cluster: str) -> Run:
    """Return the run ``text`` means: an id, a unique prefix, a name (its newest), or ``latest``.

    ``runs`` is newest first. Raises UnknownRun.
    """
    for run in runs:
        if run.run_id == text:
            return run
    own = [run for run in runs if run.lead.cluster == cluster] or list(runs)
    if text == "latest" and own:
        return own[0]
    named = [run for run in own if run.lead.name == text]
    if named:
        return named[0]
    matches = [run for run in runs if run.run_id.startswith(text)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UnknownRun(
            f"{text} could be any of {len(matches)} runs",
            cause=", ".join(run.run_id for run in matches[:5]),
            hint="type more of the id",
        )
    raise UnknownRun(f"no run {text} on these nodes", hint="`gpuctl status -a` lists them")


def attach(run: Run, connections: Mapping[str, Connection]) -> NodeLink:
    """Return a link to the lead agent of a live run; raises AgentError when it is gone."""
    label = run.label_of(0)
    if label is None:
        raise AgentError(f"the lead of {run.run_id} is on a node that did not answer")
    link = open_link(connections[label])
    link.send(Frame("attach", {"run_id": run.run_id, "node_rank": 0}))
    return link


def stop_run(
    run: Run, connections: Mapping[str, Connection], *, grace_s: float, is_forced: bool, by: str
) -> StopResult:
    """Stop a run and wait until it has ended; stopping a finished run succeeds and says so.

    Raises TimeoutExpired when it has not ended ``grace_s`` plus a margin later.
    """
    began = time.monotonic()
    if run.state.is_final:
        return StopResult(run.run_id, run.state, run.lead.reason, True, 0.0)
    link = attach(run, connections)
    try:
        link.send(Frame("kill", {"by": by}) if is_forced else Frame("stop", {"grace_s": grace_s, "by": by}))
        end = link.wait_for("end", timeout_s=(0.0 if is_forced else grace_s) + STOP_MARGIN_S)
    except AgentError:
        # it ended while we were attaching: what it wrote down is the answer
        runs, _ = list_runs(connections)
        found = find_run(run.run_id, runs, run.lead.cluster)
        if not found.state.is_final:
            raise
        return StopResult(run.run_id, found.state, found.lead.reason, True, time.monotonic() - began)
    except TimeoutExpired as exc:
        raise TimeoutExpired(
            f"{run.run_id} has not ended yet", cause=exc.cause, hint=f"`gpuctl stop --force {run.run_id}`"
        ) from exc
    finally:
        link.close()
    return StopResult(
        run.run_id, RunState(end.fields["state"]), end.get("reason"), False, time.monotonic() - began
    )


def live_record(run: Run, connections: Mapping[str, Connection]) -> dict[str, Any] | None:
    """Return the lead agent's own, newest record of a live run; None when it cannot be asked."""
    try:
        link = attach(run, connections)
    except (AgentError, UnreachableError, TimeoutExpired):
        return None
    try:
        answer: dict[str, Any] | None = link.request(Frame("status"), "status", timeout_s=ASK_S).get("record")
        return answer
    except (AgentError, UnreachableError, TimeoutExpired):
        return None
    finally:
        link.close()


def request_stacks(run: Run, connections: Mapping[str, Connection]) -> None:
    """Have every rank that can write its stacks to its stderr log."""
    link = attach(run, connections)
    try:
        link.send(Frame("stacks"))
        link.request(Frame("ping"), "ping", timeout_s=ASK_S)
    finally:
        link.close()


def clean(connections: Mapping[str, Connection], *, is_dry_run: bool) -> GroupResult[CleanResult]:
    """Remove finished runs and what only they needed, on every node."""

    def clean_one(connection: Connection) -> CleanResult:
        answer = ask(connection, Frame("clean", {"dry_run": is_dry_run}), "clean")
        return CleanResult(
            tuple(answer.get("removed", ())), tuple(answer.get("kept", ())), int(answer.get("freed_bytes", 0))
        )

    return fanout(connections, clean_one, timeout_s=120.0)
