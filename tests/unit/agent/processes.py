"""Real processes for the tests of the agent: strays that escape, and a search that finds them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from gpuctl.agent import identity

T = TypeVar("T")
TAG = "GPUCTL_RUN_ID"
#: A rank with what ranks leave behind: own sessions, double forks, a stopped child, one that ignores TERM.
STRAYS = """
setsid sleep 600 &
(setsid sleep 600 &)
(sleep 600 &)
sh -c 'trap "" TERM HUP INT; while :; do sleep 600; done' &
sleep 600 & kill -STOP $!
echo ready
exec sleep 600
"""
NUM_STRAYS = 7  # with the rank, and the shell that waits for its own sleep


def until(what: Callable[[], T], timeout_s: float = 10.0) -> T:
    """Return the first true answer; fail after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = what()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.005)


def tagged(tag: str) -> list[int]:
    """Return every process that still runs and was started with ``tag`` in its environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environ = (entry / "environ").read_bytes()
        except OSError:
            continue
        stat = identity.read_stat(int(entry.name))
        if f"{TAG}={tag}".encode() in environ.split(b"\0") and stat is not None and not stat.is_dead:
            found.append(int(entry.name))
    return found


@contextmanager
def fresh_tag() -> Iterator[str]:
    """Yield a tag, and end whatever still carries it afterwards."""
    tag = f"test-{uuid.uuid4().hex[:12]}"
    try:
        yield tag
    finally:
        for pid in tagged(tag):
            process = identity.identify(pid)
            if process is not None:
                identity.send_signal(process, signal.SIGKILL)


def start_python(code: str, *arguments: str, tag: str = "", **options: object) -> subprocess.Popen[bytes]:
    """Start ``code`` in an interpreter of its own; its stdout is a pipe."""
    env = {**os.environ, TAG: tag}
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        [sys.executable, "-c", code, *arguments], env=env, stdout=subprocess.PIPE, **options
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill ``process`` and do not wait for who else holds its pipes."""
    process.kill()
    process.wait(5)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
