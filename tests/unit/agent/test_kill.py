"""What is left of a rank and its strays by each method, on real processes."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from processes import NUM_STRAYS, STRAYS, fresh_tag, start_python, tagged, until

from gpuctl.agent import kill

#: The agent's part: start a rank with strays, end it all by the method, say how and how fast.
AGENT = """
import json, os, sys, time
from gpuctl.agent import identity, kill, spawn
name, tag, strays = sys.argv[1:]
killer = kill.choose_method(tag)
if name == "subreaper":
    killer.close(); killer = kill._try_subreaper()
elif name == "process-group":
    killer.close(); killer = kill.GroupKiller()
read, write = os.pipe()
pid = spawn.spawn_exec(["sh", "-c", strays], os.environ, "/", stdout_fd=write, stderr_fd=2)
killer.adopt(pid)
os.read(read, 100)
def sessions():
    found = set()
    for child in identity.descendants(os.getpid()):
        try: found.add(os.getsid(child))
        except ProcessLookupError: pass
    return found
while len(sessions()) < 3: time.sleep(0.01)  # the rank's, and those of its two strays with setsid
bystander = os.fork()
if bystander == 0:
    time.sleep(60); os._exit(0)
start = time.monotonic()
def reap():
    try:
        while os.waitpid(-1, os.WNOHANG)[0]: pass
    except ChildProcessError: pass
while time.monotonic() - start < 5:
    killer.kill_all(keep={bystander}); reap()
    if not killer.survivors(keep={bystander}): break
    time.sleep(0.002)
took = time.monotonic() - start
spared = identity.identify(bystander) is not None
os.kill(bystander, 9); os.waitpid(bystander, 0)
reap()
killer.close()
rest = identity.descendants(os.getpid())
print(json.dumps({"name": killer.name, "took": took, "spared": spared, "rest": rest}))
"""


def end_strays(name: str, tag: str) -> dict:
    agent = start_python(AGENT, name, tag, STRAYS, tag=tag)
    out, _ = agent.communicate(timeout=30)
    assert agent.returncode == 0
    return json.loads(out)


def test_the_subreaper_sweep_leaves_nothing_and_spares_what_it_is_told_to():
    with fresh_tag() as tag:
        answer = end_strays("subreaper", tag)
        assert answer["name"] == "subreaper" and answer["spared"] and not answer["rest"]
        assert not tagged(tag)
        assert answer["took"] < 1.0


def test_cgroup_kill_leaves_nothing_and_removes_its_cgroup():
    killer = kill.choose_method("trial")
    killer.close()
    if killer.name != "cgroup":
        pytest.skip("no cgroup v2 here into which a child can be moved")
    with fresh_tag() as tag:
        answer = end_strays("cgroup", tag)
        assert answer["name"] == "cgroup" and answer["spared"] and not answer["rest"]
        assert not tagged(tag)
        assert not list(kill.own_cgroup().glob(f"*{tag}*"))


def test_a_stranger_is_never_moved_into_the_runs_cgroup():
    killer = kill.choose_method("stranger")
    try:
        if killer.name != "cgroup":
            pytest.skip("no cgroup v2 here into which a child can be moved")
        killer.adopt(os.getppid())
        own = subprocess.Popen(["sleep", "600"])
        killer.adopt(own.pid)
        until(lambda: killer.directory.name in Path(f"/proc/{own.pid}/cgroup").read_text())
        assert killer.directory.name not in Path(f"/proc/{os.getppid()}/cgroup").read_text()
        assert own.pid in killer.kill_all()
        own.wait(5)
    finally:
        killer.close()


def test_process_groups_leave_what_took_a_session_of_its_own():
    with fresh_tag() as tag:
        assert end_strays("process-group", tag)["name"] == "process-group"
        left = tagged(tag)
        assert 0 < len(left) < NUM_STRAYS


def test_a_chain_of_forks_does_not_outrun_the_sweep():
    # every link forks its successor and ends: no pid lives longer than some hundred microseconds
    chain = "import os, time\nwhile True:\n    if os.fork(): os._exit(0)\n    time.sleep(0.0005)"
    code = f"""
import os, sys, time
from gpuctl.agent import identity, kill
killer = kill._try_subreaper()
for _ in range(2):
    if os.fork() == 0:
        exec({chain!r})
time.sleep(0.2)
start = time.monotonic()
while time.monotonic() - start < 8:
    killer.kill_all()
    try:
        while os.waitpid(-1, os.WNOHANG)[0]: pass
    except ChildProcessError: break
print(time.monotonic() - start)
"""
    with fresh_tag() as tag:
        agent = start_python(code, tag=tag)
        out, _ = agent.communicate(timeout=30)
        until(lambda: not tagged(tag), 2.0)
        assert float(out) < 8


def test_the_empty_cgroup_of_a_killed_agent_is_removed_by_the_next():
    parent = kill.own_cgroup()
    killer = kill.choose_method("stale")
    killer.close()
    if killer.name != "cgroup":
        pytest.skip("no cgroup v2 here into which a child can be moved")
    stale = parent / f"{kill.CGROUP_PREFIX}run-4194304"  # above the largest pid
    stale.mkdir()
    kill.choose_method("next").close()
    assert not stale.exists()
