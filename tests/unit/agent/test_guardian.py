"""When the agent is gone, however it went, nothing below it stays."""

# ruff: noqa: PTH208 (descriptors are read through /proc)

import os
import signal
import subprocess
import time

from processes import NUM_STRAYS, STRAYS, fresh_tag, start_python, tagged, until

from gpuctl.agent import identity

RUN = """
import os, signal, sys
from gpuctl.agent import guardian, identity, spawn
def run():
    identity.set_subreaper()
    print(os.getpid(), flush=True)
    spawn.spawn_exec(["sh", "-c", sys.argv[1]], os.environ, "/", stdout_fd=1, stderr_fd=2)
    signal.pause()
    return 0
sys.exit(guardian.main(run))
"""


def test_kill_9_of_the_agent_leaves_nothing_within_a_second():
    with fresh_tag() as tag:
        guard = start_python(RUN, STRAYS, tag=tag)
        agent = int(guard.stdout.readline())
        assert guard.stdout.readline() == b"ready\n"
        until(lambda: len(tagged(tag)) == NUM_STRAYS + 2)
        start = time.monotonic()
        os.kill(agent, signal.SIGKILL)
        until(lambda: not tagged(tag), 2.0)
        assert time.monotonic() - start < 1.0
        assert guard.wait(5) == -signal.SIGKILL & 0xFF


def test_the_agents_return_ends_what_it_left_and_its_code_is_passed_on():
    code = """
import os, sys
from gpuctl.agent import guardian, spawn
def run():
    command = "(setsid sleep 600 &); sleep 600"
    spawn.spawn_exec(["sh", "-c", command], os.environ, "/", stdout_fd=1, stderr_fd=2)
    return 7
sys.exit(guardian.main(run))
"""
    with fresh_tag() as tag:
        guard = start_python(code, tag=tag)
        assert guard.wait(10) == 7
        assert not tagged(tag)


def test_a_terminal_cannot_end_the_guardian():
    with fresh_tag() as tag:
        guard = start_python(RUN, "echo ready; exec sleep 600", tag=tag)
        agent = int(guard.stdout.readline())
        guard.stdout.readline()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(guard.pid, number)
        assert identity.is_alive(identity.identify(guard.pid))
        assert os.getsid(guard.pid) == guard.pid
        # the agent's own signals are not the guardian's: ignoring is not inherited
        with open(f"/proc/{agent}/status") as file:
            ignored = next(int(line.split()[1], 16) for line in file if line.startswith("SigIgn"))
        assert not ignored & (1 << signal.SIGTERM - 1)
        os.kill(agent, signal.SIGKILL)
        guard.wait(5)


def test_the_guardian_holds_no_descriptor_of_the_agent():
    read, write = os.pipe()
    with fresh_tag() as tag:
        guard = start_python(RUN, "exec sleep 600", tag=tag, pass_fds=[write], stdin=subprocess.DEVNULL)
        agent = int(guard.stdout.readline())
        os.close(write)
        until(lambda: sorted(os.listdir(f"/proc/{guard.pid}/fd")) == ["0", "1", "2"])
        assert str(write) in os.listdir(f"/proc/{agent}/fd")
        os.kill(agent, signal.SIGKILL)
        guard.wait(5)
    os.close(read)
