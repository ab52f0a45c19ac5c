"""Do one thing on many nodes at once: bounded, each with its own deadline, partial failure is data."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gpuctl.core.nodeset import fold
from gpuctl.errors import AnswerError, GpuctlError, TimeoutExpired, UnknownAnswer

T = TypeVar("T")
R = TypeVar("R")
LIMIT = 64


@dataclass(frozen=True)
class NodeResult(Generic[R]):
    """What one node answered, or why it did not."""

    name: str
    value: R | None = None
    error: GpuctlError | None = None
    elapsed_s: float = 0.0


@dataclass(frozen=True)
class GroupResult(Generic[R]):
    """All answers, in the order of the question."""

    results: Mapping[str, NodeResult[R]] = field(default_factory=dict)

    def values(self) -> dict[str, R]:
        """Return the answers of the nodes that answered."""
        return {n: r.value for n, r in self.results.items() if r.error is None}  # type: ignore[misc]

    @property
    def failures(self) -> dict[str, GpuctlError]:
        """Return the error of each node that did not."""
        return {name: r.error for name, r in self.results.items() if r.error is not None}

    def folded(self) -> list[tuple[str, GpuctlError]]:
        """Return the errors with identical ones folded under a node set."""
        groups: dict[str, tuple[list[str], GpuctlError]] = {}
        for name, error in self.failures.items():
            text = _without(name, error)
            groups.setdefault(text, ([], error))[0].append(name)
        return [(fold(names), error) for names, error in groups.values()]

    def raise_for_failures(self, what: str) -> None:
        """Raise one error that names every failed node; nothing when none failed.

        The exit code is that of the worst kind: a node that could not be asked beats a bad answer.
        """
        failed = self.folded()
        if not failed:
            return
        if len(self.failures) == 1 and len(self.results) == 1:
            raise next(iter(self.failures.values()))
        lines = []
        for names, error in failed:
            text = _without(next(n for n, e in self.failures.items() if e is error), error)
            lines.append(f"{names}: {text}" + (f": {_last_line(error.cause)}" if error.cause else ""))
        is_answer = all(isinstance(error, AnswerError) for _, error in failed)
        kind = type(failed[0][1]) if len(failed) == 1 else (AnswerError if is_answer else UnknownAnswer)
        num, total = len(self.failures), len(self.results)
        raise kind(
            f"{num} of {total} nodes: {what}",
            cause="\n".join(lines),
            hint=next((error.hint for _, error in failed if error.hint), None),
        )


def fanout(
    items: Mapping[str, T],
    fn: Callable[[T], R],
    *,
    timeout_s: float,
    limit: int = LIMIT,
    on_result: Callable[[NodeResult[R]], None] | None = None,
) -> GroupResult[R]:
    """Call ``fn`` for every item, at most ``limit`` at once, and collect what comes back.

    A call that takes longer than ``timeout_s`` from its own start becomes TimeoutExpired; its thread
    is a daemon, so that a node which hangs never keeps the process from leaving. This is the
    boundary where an exception becomes that node's result; bugs of ours are raised again.
    """
    todo: queue.SimpleQueue[tuple[str, T]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[str, R | None, BaseException | None]] = queue.SimpleQueue()
    for item in items.items():
        todo.put(item)
    started: dict[str, float] = {}
    results: dict[str, NodeResult[R]] = {}

    def work() -> None:
        while True:
            try:
                name, item = todo.get_nowait()
            except queue.Empty:
                return
            started[name] = time.monotonic()
            try:
                done.put((name, fn(item), None))
            except Exception as exc:  # the fan-out boundary
                done.put((name, None, exc))

    for i in range(min(limit, len(items))):
        threading.Thread(target=work, name=f"fanout-{i}", daemon=True).start()
    while len(results) < len(items):
        for result in _collect(done, started, results, timeout_s):
            results[result.name] = result
            if on_result is not None:
                on_result(result)
    return GroupResult({name: results[name] for name in items})


def _collect(
    done: queue.SimpleQueue[tuple[str, R | None, BaseException | None]],
    started: Mapping[str, float],
    results: Mapping[str, NodeResult[R]],
    timeout_s: float,
) -> list[NodeResult[R]]:
    """Wait for the next answer or deadline and return what is known now."""
    running = {name: at for name, at in list(started.items()) if name not in results}
    wait = (
        min((at + timeout_s for at in running.values()), default=time.monotonic() + 0.05) - time.monotonic()
    )
    try:
        name, value, problem = done.get(timeout=max(0.001, min(wait, 0.2)))
    except queue.Empty:
        now = time.monotonic()
        late = [name for name, at in running.items() if now - at >= timeout_s]
        return [
            NodeResult(
                name, error=TimeoutExpired(f"{name}: no answer within {timeout_s:.0f} s"), elapsed_s=timeout_s
            )
            for name in late
        ]
    if name in results:
        return []  # it answered after its deadline
    elapsed = time.monotonic() - started[name]
    if problem is not None and not isinstance(problem, GpuctlError):
        raise problem
    return [NodeResult(name, value, problem, elapsed)]


def _without(name: str, error: GpuctlError) -> str:
    """Return the message without the node's name in front: identical causes fold."""
    return error.message.removeprefix(f"{name}: ")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
