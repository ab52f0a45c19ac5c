"""How a run's end is told: the first cause, once, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuctl.core.codec import to_json
from gpuctl.core.plan import Plan
from gpuctl.core.run import RunState
from gpuctl.errors import RunFailed
from gpuctl.services.launch import Outcome

#: Lines of a traceback that are shown; the whole of it is in the rank's log.
MAX_TRACEBACK_LINES = 25


def failure_lines(failure: Mapping[str, Any]) -> list[str]:
    """Return a failure as lines: where and what, the traceback or last lines, who else."""
    node, rank = failure.get("node"), failure.get("rank")
    where = str(node) if rank is None else f"rank {rank} on {node}"
    lines = [f"{where}: {failure.get('message')}"]
    detail = (failure.get("traceback") or "").splitlines() or list(failure.get("log_tail") or ())
    if len(detail) > MAX_TRACEBACK_LINES:
        detail = [f"... [{len(detail) - MAX_TRACEBACK_LINES} lines]", *detail[-MAX_TRACEBACK_LINES:]]
    lines += detail
    also = list(failure.get("also") or ())
    if also:
        lines.append(
            f"then also: {'; '.join(also[:3])}" + (f" and {len(also) - 3} more" if len(also) > 3 else "")
        )
    return lines


def raise_outcome(outcome: Outcome, plan: Plan) -> None:
    """Raise RunFailed for a run that did not end DONE; nothing for one that did."""
    if outcome.state in (RunState.DONE, RunState.RUNNING):
        return
    if outcome.state is RunState.STOPPED:
        raise RunFailed(f"{plan.run_id} was stopped", cause=outcome.reason)
    logs = f"`gpuctl logs {plan.run_id}`"
    if outcome.failure is None:
        raise RunFailed(
            f"{plan.run_id} {outcome.state.value}", cause=outcome.reason, hint=f"{logs} has the rest"
        )
    if outcome.failure.rank is not None:
        logs = f"`gpuctl logs {plan.run_id} --rank {outcome.failure.rank}`"
    raise RunFailed(
        f"{plan.run_id} failed",
        cause="\n".join(failure_lines(to_json(outcome.failure))),
        hint=f"{logs} has the rest",
    )
