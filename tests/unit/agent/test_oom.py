"""A rank that the OOM killer ended is told from one that somebody killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import fresh_tag

from gpuctl.agent import oom

AGENT = """
import os, sys
from gpuctl.agent import spawn
from gpuctl.agent.oom import OomWatch
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
watch = OomWatch()
if sys.argv[2] == "counter":
    os.close(watch._kmsg); watch._kmsg = None
def end_of(code):
    pid = spawn.spawn_exec([sys.executable, "-c", code], os.environ, "/", stdout_fd=1, stderr_fd=2)
    os.waitpid(pid, 0)
    return watch.explain(pid)
hungry = "x = bytearray(400 << 20)"
print(end_of("import os; os.kill(os.getpid(), 9)"))
print(end_of(hungry))
print(end_of("import os; os.kill(os.getpid(), 9)"))
print(end_of(hungry))
"""


def memory_cgroup(name: str) -> Path:
    """Make a cgroup of 100 MiB next to the own one (v1 or v2), or skip."""
    counter = oom._find_counter()
    if counter is None or counter.name == "vmstat" or os.getuid() != 0:
        pytest.skip("no memory cgroup here that may be written")
    folder = counter.parent / name
    try:
        folder.mkdir()
        limit = "memory.max" if counter.name == "memory.events" else "memory.limit_in_bytes"
        (folder / limit).write_text(str(100 << 20))
    except OSError as exc:
        pytest.skip(f"no memory cgroup can be made here: {exc}")
    return folder


@pytest.mark.parametrize("source", ["log", "counter"])
def test_the_oom_killer_is_named_with_the_limit_and_other_kills_are_not(source):
    with fresh_tag() as tag:
        folder = memory_cgroup(tag)
        try:
            command = [sys.executable, "-c", AGENT, str(folder), source]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            lines = done.stdout.splitlines()
            assert lines[0] == lines[2] == "None", done.stderr
            assert all("killed by the OOM killer (limit 100 MiB)" in line for line in (lines[1], lines[3]))
        finally:
            folder.rmdir()


def test_the_kernels_words_are_understood():
    text = (
        b"3,1,1,-;Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB, "
        b"anon-rss:2097152kB, file-rss:8kB"
    )
    found = oom.KILLED.search(text)
    assert found is not None and (found["pid"], found["rss"]) == (b"4711", b"2097152")
    old = oom.KILLED.search(b"Out of memory: Killed process 12 (a) b) total-vm:1kB")
    assert old is not None and int(old["pid"] or old["bare"]) == 12
