"""The agent's parent: when the agent is gone, nothing that descends from it stays.

kill -9 of the agent alone would leave what its ranks have double-forked. The guardian is a
subreaper, so every such process becomes its child, and it ends only when the kernel says that it has
no children left. It does nothing else, so that nothing can go wrong in it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable

from gpuctl.agent import identity

IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PAUSE_S = 0.002
#: What KILL has not ended by then waits in the kernel (D state); its own death is only a matter of time.
SWEEP_LIMIT_S = 30.0


def start(arguments: list[str]) -> int:
    """Run the agent (:mod:`gpuctl.agent.main`) under this process; return the exit code."""

    def run() -> int:
        # imported after the fork: the guardian stays as small as its own few imports
        from gpuctl.agent.main import main as agent

        return agent(arguments)

    identity.set_name("gpuctl:guard")
    return main(run)


def main(run: Callable[[], int]) -> int:
    """Fork, call ``run`` in the child (the agent), sweep after it; return the exit code."""
    with contextlib.suppress(PermissionError):  # a process group's leader may not; then it is apart already
        os.setsid()
    identity.set_subreaper()
    gc.freeze()  # the two processes keep sharing these pages
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    agent = os.fork()
    if agent == 0:
        for number in IGNORED:
            signal.signal(number, signal.SIG_DFL)
        return run()
    close_descriptors()
    status = wait_for(agent)
    sweep(time.monotonic() + SWEEP_LIMIT_S)
    return os.waitstatus_to_exitcode(status) & 0xFF


def close_descriptors() -> None:
    """Close all but stdio: the client must see the agent's end of its socket close."""
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd > 2:
            with contextlib.suppress(OSError):
                os.close(fd)


def wait_for(pid: int) -> int:
    """Return the status of child ``pid`` when it has ended."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return status


def sweep(deadline: float) -> bool:
    """KILL and reap every descendant until there is none; False when the deadline came first."""
    own = os.getpid()
    while True:
        for pid in identity.descendants(own):
            with contextlib.suppress(
                PermissionError
            ):  # a set-uid program: it goes when its parents have gone
                identity.send_signal_to_descendant(own, pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True  # no child left means no descendant left: all orphans come here
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE_S)
