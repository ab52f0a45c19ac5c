"""Logs of a run's ranks: read from the files on each rank's node, alive or long ended, and follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpuctl.agent.frames import Frame
from gpuctl.core.run import RunState
from gpuctl.errors import UnknownRun
from gpuctl.services.nodelink import NodeLink
from gpuctl.services.runs import ASK_S, Run, open_link
from gpuctl.transports import Connection

FOLLOW_EVERY_S = 0.2
CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class LogLine:
    """One line of one rank, raw bytes without its line end."""

    rank: int
    stream: str
    data: bytes
    time: float | None = None
    """When it came (Unix time, to some 0.1 s); None when that was not asked for or is not known."""


@dataclass
class _Source:
    """One file that is read: a rank's stream on its node."""

    link: NodeLink
    node_rank: int
    rank: int
    stream: str
    offset: int | None = None
    generation: int | None = None
    rest: bytes = b""
    state: str | None = None


def select_ranks(run: Run, ranks: Sequence[int] | None, node: str | None) -> list[int]:
    """Return the ranks to show: the ones asked for, those of a node, or rank 0.

    Raises UnknownRun when the run has no such rank or node.
    """
    known = {state.rank for record in run.records for state in record.ranks}
    if node is not None:
        chosen = [
            r for record in run.records if record.host == node for r in _own_ranks(run, record.node_rank)
        ]
        if not chosen:
            hosts = ", ".join(sorted({record.host for record in run.records}))
            raise UnknownRun(f"{run.run_id} has no node {node}", cause=f"its nodes: {hosts}")
        return chosen if ranks is None else [r for r in chosen if r in ranks]
    if ranks is None:
        return [0]
    missing = [r for r in ranks if r not in known and r >= run.lead.world_size]
    if missing:
        raise UnknownRun(
            f"{run.run_id} has no rank {missing[0]}", cause=f"it has {run.lead.world_size} ranks"
        )
    return list(ranks)


def _own_ranks(run: Run, node_rank: int) -> list[int]:
    # the lead's record lists every rank; the others' their own
    record = next(r for r in run.records if r.node_rank == node_rank)
    if node_rank != 0:
        return [state.rank for state in record.ranks]
    others = {s.rank for r in run.records if r.node_rank != 0 for s in r.ranks}
    return [state.rank for state in record.ranks if state.rank not in others]


def read_logs(
    run: Run,
    connections: Mapping[str, Connection],
    ranks: Sequence[int],
    on_line: Callable[[LogLine], None],
    *,
    tail_lines: int | None = None,
    since: float | None = None,
    with_times: bool = False,
    is_following: bool = False,
    streams: Sequence[str] = ("out", "err"),
) -> RunState | None:
    """Give the lines of ``ranks`` to ``on_line``; following, until the run has ended.

    ``since`` (Unix time) leaves out what came before it. Returns the run's state as last seen.
    Raises UnknownRun when a rank's node did not answer.
    """
    links: dict[str, NodeLink] = {}
    try:
        sources = _sources(run, connections, ranks, streams, links)
        first = {"tail_lines": tail_lines, "since": since, "with_times": with_times}
        for source in sources:
            _read_more(run, source, on_line, first)
        while is_following:
            states = [source.state for source in sources]
            moved = [_read_more(run, source, on_line, {"with_times": with_times}) for source in sources]
            if not any(moved):
                if any(state is not None and RunState(state).is_final for state in states):
                    break
                time.sleep(FOLLOW_EVERY_S)
        for source in sources:
            if source.rest:
                on_line(LogLine(source.rank, source.stream, source.rest))
        return RunState(sources[0].state) if sources and sources[0].state else None
    finally:
        for link in links.values():
            link.close()


def _sources(
    run: Run,
    connections: Mapping[str, Connection],
    ranks: Sequence[int],
    streams: Sequence[str],
    links: dict[str, NodeLink],
) -> list[_Source]:
    sources = []
    for rank in ranks:
        node_rank = next((r.node_rank for r in run.records if rank in _own_ranks(run, r.node_rank)), None)
        if node_rank is None and rank == 0:
            node_rank = 0
        label = run.label_of(node_rank) if node_rank is not None else None
        if node_rank is None or label is None:
            raise UnknownRun(f"the node of rank {rank} did not answer", hint="`gpuctl status` shows which do")
        if label not in links:
            links[label] = open_link(connections[label])
        sources += [_Source(links[label], node_rank, rank, stream) for stream in streams]
    return sources


def _read_more(
    run: Run, source: _Source, on_line: Callable[[LogLine], None], options: Mapping[str, object]
) -> bool:
    """Read what is new in one file; return whether there was anything."""
    any_data = False
    while True:
        fields: dict[str, object] = {
            "run_id": run.run_id,
            "node_rank": source.node_rank,
            "rank": source.rank,
            "stream": source.stream,
            "max_bytes": CHUNK_BYTES,
            "offset": source.offset or 0,
            "with_times": options.get("with_times"),
        }
        is_first = source.offset is None
        if is_first:
            fields.update(tail_lines=options.get("tail_lines"), since=options.get("since"))
        answer = source.link.request(Frame("read_log", fields), "log", timeout_s=ASK_S)
        if source.generation is not None and answer.get("generation_read") != source.generation:
            # a restart: its files begin at 0 again
            source.generation, source.offset, source.rest = answer.get("generation_read"), 0, b""
            continue
        source.generation = answer.get("generation_read")
        source.offset, source.state = int(answer.fields["next_offset"]), answer.get("state")
        if not answer.payload:
            return any_data
        any_data = True
        _give_lines(source, answer, on_line)
        if is_first and options.get("tail_lines") is not None:
            return any_data


def _give_lines(source: _Source, answer: Frame, on_line: Callable[[LogLine], None]) -> None:
    """Cut the bytes of an answer into lines, each with the time its first byte came."""
    if answer.get("skipped_bytes"):
        said = f"[gpuctl: {answer.fields['skipped_bytes']} bytes in the middle were dropped]"
        on_line(LogLine(source.rank, source.stream, said.encode()))
        source.rest = b""
    times = [(int(offset), float(at)) for at, offset in answer.get("times", [])]
    position = int(answer.fields["offset"]) - len(source.rest)
    *lines, source.rest = (source.rest + answer.payload).split(b"\n")
    for line in lines:
        at = next((when for offset, when in reversed(times) if offset <= position), None)
        on_line(LogLine(source.rank, source.stream, line, at if at is not None else _first_time(times)))
        position += len(line) + 1


def _first_time(times: Sequence[tuple[int, float]]) -> float | None:
    return times[0][1] if times else None
