"""A run: its id, its states, and the record that a node keeps of it."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from datetime import datetime

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}-\d{8}-\d{6}-[0-9a-f]{4}\Z")


class RunState(str, enum.Enum):
    """Where a run is; the last four are final."""

    PREPARING = "preparing"
    ARMED = "armed"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"

    @property
    def is_final(self) -> bool:
        return self in _FINAL


_FINAL = frozenset({RunState.DONE, RunState.FAILED, RunState.STOPPED, RunState.LOST})


def make_run_id(name: str, now: datetime, token: str) -> str:
    """Return ``NAME-YYYYMMDD-HHMMSS-xxxx`` (``token``: four hex digits).

    Raises ValueError when ``name`` could not be a file name on a node.
    """
    run_id = f"{name}-{now:%Y%m%d-%H%M%S}-{token}"
    if not RUN_NAME.match(name) or not RUN_ID.match(run_id):
        raise ValueError(f"{name!r} is not a run name: letters, digits, '.', '_' and '-', 64 at most")
    return run_id


@dataclass(frozen=True)
class RankState:
    """One rank as its agent last saw it."""

    rank: int
    local_rank: int
    pid: int | None = None
    phase: str | None = None
    """store, init, first_step, step, save; None before the rank spoke."""
    step: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    is_done: bool = False


@dataclass(frozen=True)
class RankFailure:
    """Why a run failed. ``rank`` is null when a whole node was lost, ``exit_code`` when signalled."""

    node: str
    rank: int | None
    message: str
    signal: str | None = None
    exit_code: int | None = None
    traceback: str | None = None
    also: tuple[str, ...] = ()
    """The other failures of the same generation, folded."""
    log_tail: tuple[str, ...] = ()
    """The last lines the rank wrote."""

    @property
    def where(self) -> str:
        """Return ``rank 3 on gpu01``, or the node alone."""
        return self.node if self.rank is None else f"rank {self.rank} on {self.node}"


@dataclass(frozen=True)
class RunRecord:
    """``state.json`` of one node of a run: what ``status`` answers from, alive or not."""

    run_id: str
    name: str
    cluster: str
    state: RunState
    node_rank: int
    host: str
    num_nodes: int
    world_size: int
    generation: int = 0
    strategy: str | None = None
    program: str = ""
    uid: int | None = None
    user: str | None = None
    created_at: float | None = None
    """Unix time of the client at launch, seconds."""
    updated_at: float | None = None
    ended_at: float | None = None
    agent_pid: int | None = None
    agent_start_ticks: int | None = None
    boot_id: str | None = None
    kill_method: str | None = None
    ranks: tuple[RankState, ...] = ()
    step: int | None = None
    loss: float | None = None
    waiting_for: str | None = None
    failure: RankFailure | None = None
    reason: str | None = None
    """Why the run ended as it did, one line."""
    is_detached: bool = False
    schema_version: int = 1
