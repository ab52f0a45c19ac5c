"""A process is named beyond doubt, signalled through that name, and never taken for another."""

import os
import signal
import subprocess
import sys

import pytest
from processes import end, fresh_tag, start_python, until

from gpuctl.agent import identity


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_a_process_is_alive_until_it_is_killed_even_as_a_zombie(sleeper):
    name = identity.identify(sleeper.pid)
    assert name is not None and identity.is_alive(name)
    assert identity.send_signal(name, signal.SIGKILL)
    until(lambda: not identity.is_alive(name))
    assert identity.identify(sleeper.pid) == name  # nobody has reaped it yet
    sleeper.wait()
    assert identity.identify(sleeper.pid) is None
    assert not identity.send_signal(name, signal.SIGKILL)


def test_a_stranger_with_the_same_pid_is_never_signalled(sleeper):
    name = identity.identify(sleeper.pid)
    for stranger in (name._replace(start_ticks=name.start_ticks - 1), name._replace(boot_id="another boot")):
        assert not identity.is_alive(stranger)
        assert not identity.send_signal(stranger, signal.SIGKILL)
    assert sleeper.poll() is None and identity.is_alive(name)


def test_a_recycled_pid_is_told_from_its_former_owner():
    # the counter of a private pid namespace is set, so that the next fork gets the same number
    code = """
import os, signal
from gpuctl.agent import identity
def child():
    pid = os.fork()
    if pid == 0:
        signal.pause()
    return pid
wrong = 0
first = child()
for _ in range(20):
    old = identity.identify(first)
    os.kill(first, signal.SIGKILL); os.waitpid(first, 0)
    deadline = __import__("time").monotonic() + 0.05
    while __import__("time").monotonic() < deadline: pass   # start ticks count 10 ms
    open("/proc/sys/kernel/ns_last_pid", "w").write(str(first - 1))
    again = child()
    assert again == first, (again, first)
    wrong += identity.send_signal(old, signal.SIGKILL) or identity.is_alive(old)
    first = again
print(wrong)
os.kill(first, signal.SIGKILL)
"""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    if os.getuid() != 0:
        unshare.insert(1, "--map-root-user")
    done = subprocess.run(unshare, capture_output=True, text=True, timeout=30)
    if "unshare" in done.stderr:
        pytest.skip(f"no pid namespace here: {done.stderr.strip()}")
    assert done.stdout.strip() == "0", done.stderr


def test_descendants_are_found_through_sessions_and_threads():
    code = """
import subprocess, threading, sys
from gpuctl.agent import identity
identity.set_subreaper()
subprocess.Popen(["sh", "-c", "(setsid sleep 600 &) ; exec sleep 600"])
t = threading.Thread(target=lambda: subprocess.Popen(["sleep", "600"]).wait(), daemon=True); t.start()
print(flush=True)
sys.stdin.read()
"""
    with fresh_tag() as tag:
        process = start_python(code, tag=tag, stdin=subprocess.PIPE)
        process.stdout.readline()
        # the shell between them has gone when all three are children
        until(lambda: len(list(identity._children_by_scan()(process.pid))) == 3)
        scanned = identity._children_by_scan()
        assert sorted(scanned(process.pid)) == sorted(identity.descendants(process.pid))
        assert all(identity.is_descendant(pid, process.pid) for pid in identity.descendants(process.pid))
        assert not identity.is_descendant(process.pid, process.pid)
        end(process)


def test_only_descendants_are_signalled_by_descent(sleeper):
    other = subprocess.Popen(["sleep", "600"])
    try:
        assert not identity.send_signal_to_descendant(other.pid, sleeper.pid, signal.SIGKILL)
        assert identity.send_signal_to_descendant(os.getpid(), sleeper.pid, signal.SIGKILL)
        sleeper.wait(5)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_the_death_signal_follows_the_forking_thread_and_not_grandchildren():
    code = """
import os, signal, sys, threading, time
from gpuctl.agent import identity
identity.set_subreaper()
identity.load_libc()
def fork_child():
    pid = os.fork()
    if pid == 0:
        identity.set_pdeathsig(signal.SIGKILL)
        grandchild = os.fork()
        print(os.getpid(), flush=True)
        signal.pause()
    sys.stdin.readline()
thread = threading.Thread(target=fork_child)
thread.start(); thread.join()
sys.stdin.read()
"""
    with fresh_tag() as tag:
        process = start_python(code, tag=tag, stdin=subprocess.PIPE)
        pids = [int(process.stdout.readline()) for _ in range(2)]
        names = [identity.identify(pid) for pid in pids]
        assert all(identity.is_alive(name) for name in names)
        process.stdin.write(b"\n")
        process.stdin.flush()
        until(lambda: sum(identity.is_alive(name) for name in names) == 1)
        assert process.poll() is None  # the process lives, only its thread has ended
        end(process)


def test_a_name_is_what_ps_shows():
    code = "from gpuctl.agent import identity\nidentity.set_name('gpuctl:r12')\nprint(flush=True)\ninput()"
    with fresh_tag() as tag:
        process = start_python(code, tag=tag, stdin=subprocess.PIPE)
        process.stdout.readline()
        with open(f"/proc/{process.pid}/comm") as file:
            assert file.read().strip() == "gpuctl:r12"
        end(process)


def test_a_zombie_leader_with_living_threads_is_not_dead():
    # the first thread ends by pthread_exit: /proc shows Z while the others work on
    code = """
import ctypes, threading, time, sys
threading.Thread(target=lambda: time.sleep(600)).start()
print(flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
    with fresh_tag() as tag:
        process = start_python(code, tag=tag)
        process.stdout.readline()
        stat = until(lambda: (s := identity.read_stat(process.pid)) and s.state == "Z" and s)
        assert not stat.is_dead
        end(process)
