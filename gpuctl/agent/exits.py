"""How a rank ended, and which of several ends was the cause.

Pure values: the supervisor makes :class:`RankExit`, the lead picks the first cause from them.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuctl.core.run import RankFailure

#: Texts of a rank that died because a peer had gone: never the cause while another explanation is there.
VICTIM = re.compile(
    r"connection (was )?(reset|closed|refused|aborted)|closed by peer|broken pipe|recvBytes|sendBytes"
    r"|DistNetworkError|DistStoreError|gloo|ncclRemoteError|ncclSystemError|NCCL (communicator|error)"
    r"|store.*(timed? ?out|timeout)|socketProgress",
    re.IGNORECASE,
)
MAX_TRACEBACK_CHARS = 32_768


@dataclass(frozen=True)
class RankExit:
    """One rank's end (``rank`` null: a node's). ``is_victim``: gpuctl had asked for the end already."""

    rank: int | None
    node: str
    exit_code: int | None = None
    signal: str | None = None
    is_done: bool = False
    is_victim: bool = False
    message: str = ""
    traceback: str | None = None
    tail: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        return self.node if self.rank is None else f"rank {self.rank} on {self.node}"


def ended_by_us(signal_: int | None, error: str | None, *, was_asked: bool, was_killed: bool) -> bool:
    """Return whether gpuctl ended a rank: it asked with TERM, and KILL went out if ``was_killed``.

    Of a rank that failed and a peer that noticed, the peer's end is often seen first, and then all are
    asked to end. A signal that was not sent yet, and an ``error`` that does not speak of a lost peer, are
    the rank's own all the same.
    """
    if not was_asked:
        return False
    if signal_ == signal.SIGKILL:
        return was_killed
    if signal_ is not None:
        return signal_ == signal.SIGTERM
    return error is None or VICTIM.search(error) is not None


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9; ``signal 77`` for what has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_error_file(path: Path) -> tuple[str, str] | None:
    """Return (message, traceback) of torch elastic's error.json, or None when there is none."""
    try:
        with path.open("rb") as file:
            message = json.loads(file.read(1 << 20))["message"]
        if isinstance(message, str):  # torch elastic writes a bare text for a signal
            return message, ""
        return str(message["message"]), str(message["extraInfo"]["py_callstack"])[-MAX_TRACEBACK_CHARS:]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def describe(exit_code: int | None, signal_: str | None, error: str | None, *, is_bundled: bool) -> str:
    """Return one line for a rank's end."""
    if signal_ is not None:
        return f"killed by {signal_}"
    if error:
        return error.strip().splitlines()[0][:500]
    if exit_code == 0 and is_bundled:
        return "exited with code 0 before it was done"
    return f"exited with code {exit_code}"


def last_error_line(tail: Sequence[str]) -> str | None:
    """Return the exception line that a Python traceback in ``tail`` ends with, if there is one."""
    lines = (last_traceback(tail) or "").splitlines()[1:]
    return next((line for line in lines if line and not line[0].isspace()), None)


def last_traceback(tail: Sequence[str]) -> str | None:
    """Return the last Python traceback in ``tail`` to its end, None when there is none."""
    for i in range(len(tail) - 1, -1, -1):
        if tail[i].startswith("Traceback (most recent call last)"):
            return "\n".join(tail[i:])
    return None


def first_cause(exits: Sequence[RankExit]) -> RankFailure | None:
    """Return the failure to show: the earliest that is nobody's victim, the others folded.

    ``exits`` is in order of arrival. Own signals and errors come before texts that only say that a
    peer had gone, and those before the ranks that gpuctl ended itself.
    """
    failures = [e for e in exits if not e.is_done]
    if not failures:
        return None
    ordered = sorted(failures, key=_guilt)
    cause = ordered[0]
    return RankFailure(
        node=cause.node,
        rank=cause.rank,
        message=cause.message,
        signal=cause.signal,
        exit_code=cause.exit_code,
        traceback=cause.traceback or last_traceback(cause.tail),
        also=tuple(f"{e.where}: {e.message}" for e in ordered[1:] if not e.is_victim),
        log_tail=cause.tail,
    )


def _guilt(failure: RankExit) -> int:
    if failure.is_victim:
        return 2
    return 1 if failure.signal is None and VICTIM.search(failure.message) else 0
