"""The fork server imports once, forks ranks with what they were given and nothing else, and reports."""

# ruff: noqa: PTH115, PTH208 (descriptors are read through /proc)

import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from processes import TAG, fresh_tag, start_python, tagged, until

import gpuctl
from gpuctl.agent import identity
from gpuctl.agent.forkclient import Exited, Forked, ForkServer, Gone, ImportFailed, Ready, spawn_exec
from gpuctl.agent.frames import Decoder

ROOT = str(Path(gpuctl.__file__).parents[1])
RANK = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
PROGRAMS = """
import json, os, random, signal, sys, time
def facts(config, worker):
    fds = {name: os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{name}")}
    numpy = sys.modules["numpy"]
    print(json.dumps({"config": config, "fds": fds, "sid": os.getsid(0), "pid": os.getpid(),
        "cwd": os.getcwd(), "comm": open("/proc/self/comm").read().strip(),
        "oom": int(open("/proc/self/oom_score_adj").read()),
        "draws": [random.random(), float(numpy.random.rand())], "env": dict(os.environ),
        "listener": worker.listener_fd, "preloaded": "numpy" in sys.modules}))
    worker.done(answer=42)
def fail(config, worker):
    raise ValueError("on purpose")
def leave(config, worker):
    sys.exit(config["code"])
def wait(config, worker):
    worker.phase("waiting")
    while True: time.sleep(600)
"""


class Lab:
    """A fork server, what it said, and pipes to its ranks."""

    def __init__(self, directory: Path, tag: str, preload=("numpy",), keep_fds=()) -> None:
        (directory / "programs.py").write_text(PROGRAMS)
        (directory / "broken.py").write_text("import nothing_of_that_name")
        self.directory = directory
        self.env = {**os.environ, "PYTHONPATH": f"{ROOT}:{directory}", TAG: tag, "PYTHONUNBUFFERED": "1"}
        self.log = os.open(directory / "server.log", os.O_RDWR | os.O_CREAT)
        self.server = ForkServer.start(
            [sys.executable], self.env, preload, cwd=str(directory), stderr_fd=self.log, keep_fds=keep_fds
        )
        self.events: list[object] = []
        self.outputs: dict[int, int] = {}
        self.channels: dict[int, socket.socket] = {}

    def fork(self, rank: int, function: str, config=None, module="programs", listener_fd=None, **env: str):
        read, write = os.pipe()
        ours, theirs = socket.socketpair()
        self.outputs[rank], self.channels[rank] = read, ours
        self.server.fork(
            rank,
            env={**self.env, **RANK, "RANK": str(rank), **env},
            module=module,
            function=function,
            config=config or {},
            cwd=str(self.directory),
            stdout_fd=write,
            stderr_fd=write,
            channel_fd=theirs.fileno(),
            listener_fd=listener_fd,
        )
        os.close(write)
        theirs.close()

    def wait_for(self, kind: type, count: int = 1) -> list:
        def found() -> list:
            select.select([self.server.fileno()], [], [], 0.01)
            self.events += self.server.read_events()
            matching = [event for event in self.events if isinstance(event, kind)]
            return matching if len(matching) >= count else []

        return until(found)

    def output(self, rank: int) -> str:
        with os.fdopen(self.outputs.pop(rank), "rb") as file:
            return file.read().decode()

    def close(self) -> None:
        self.server.close()
        os.close(self.log)
        for fd in self.outputs.values():
            os.close(fd)
        for channel in self.channels.values():
            channel.close()


@pytest.fixture
def tag():
    with fresh_tag() as name:
        yield name


@pytest.fixture
def lab(tmp_path, tag):
    lab = Lab(tmp_path, tag)
    yield lab
    lab.close()


def test_ranks_that_are_asked_for_before_the_import_run_after_it(lab, tag):
    lab.fork(1, "facts", {"a": [1, None]})
    lab.fork(0, "facts", CHANGED="yes")
    exits = lab.wait_for(Exited, 2)
    assert {(e.rank, e.status) for e in exits} == {(0, 0), (1, 0)}
    assert isinstance(lab.events[0], Ready)
    forked = {e.rank: e.pid for e in lab.wait_for(Forked, 2)}
    facts = {rank: json.loads(lab.output(rank)) for rank in (0, 1)}
    for rank, fact in facts.items():
        assert fact["pid"] == fact["sid"] == forked[rank]
        assert fact["comm"] == f"gpuctl:r{rank}" and fact["preloaded"] and fact["oom"] >= 500
        assert fact["env"]["RANK"] == str(rank)
        assert fact["cwd"] == str(lab.directory)
    assert facts[1]["config"] == {"a": [1, None]}
    assert facts[0]["env"]["CHANGED"] == "yes" and "CHANGED" not in facts[1]["env"]
    assert facts[0]["draws"][0] != facts[1]["draws"][0] and facts[0]["draws"][1] != facts[1]["draws"][1]


def test_a_rank_holds_its_own_descriptors_and_no_others(tmp_path, tag):
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    listener = socket.create_server(("127.0.0.1", 0))
    strangers = {
        os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_inherited(fd)
    }
    lab = Lab(tmp_path, tag, keep_fds=[lock])
    try:
        lab.fork(1, "facts")
        lab.fork(0, "facts", listener_fd=listener.fileno())
        lab.wait_for(Exited, 2)
        inode = f"socket:[{os.fstat(listener.fileno()).st_ino}]"
        for rank in (1, 0):
            fact = json.loads(lab.output(rank))
            fds = {n: t for n, t in fact["fds"].items() if n in "012" or t not in strangers}
            pipes = [name for name, target in fds.items() if target.startswith("pipe:")]
            assert fds.pop("0") == "/dev/null" and sorted(pipes) == ["1", "2"]
            rest = [target for name, target in fds.items() if name not in pipes]
            assert str(tmp_path / "lock") in rest
            assert (inode in rest) == (rank == 0) == (fact["listener"] is not None)
            assert sum(target.startswith("socket:") for target in rest) == (2 if rank == 0 else 1)
        # the server kept no copy: the port is refused as soon as its owners are gone
        assert inode not in [_link(lab.server.pid, fd) for fd in os.listdir(f"/proc/{lab.server.pid}/fd")]
        listener.close()
    finally:
        lab.close()
        os.close(lock)


def test_last_words_and_the_error_file_of_a_failing_rank(lab, tmp_path):
    lab.fork(0, "fail", TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
    (end,) = lab.wait_for(Exited)
    assert os.waitstatus_to_exitcode(end.status) == 1
    assert "ValueError: on purpose" in lab.output(0)
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert (
        message["message"] == "ValueError: on purpose"
        and "programs.py" in message["extraInfo"]["py_callstack"]
    )


def test_a_program_that_cannot_be_imported_is_the_ranks_error(lab):
    lab.fork(0, "run", module="broken")
    (end,) = lab.wait_for(Exited)
    assert os.waitstatus_to_exitcode(end.status) == 1
    assert "nothing_of_that_name" in lab.output(0)


@pytest.mark.parametrize(("code", "seen"), [(3, 3), (256, 1), (-1, 255), (0, 0)])
def test_exit_codes_arrive_and_multiples_of_256_are_no_success(lab, code, seen):
    lab.fork(0, "leave", {"code": code})
    (end,) = lab.wait_for(Exited)
    assert os.waitstatus_to_exitcode(end.status) == seen


def test_done_is_heard_on_the_channel(lab):
    lab.fork(0, "facts")
    lab.wait_for(Exited)
    frames = list(Decoder().feed(lab.channels[0].recv(1 << 16)))
    assert frames[-1].fields == {"event": "rank_done", "answer": 42}


def test_a_failed_import_is_told_with_its_traceback(tmp_path, tag):
    lab = Lab(tmp_path, tag, preload=["json", "broken"])
    try:
        (failed,) = lab.wait_for(ImportFailed)
        assert "nothing_of_that_name" in failed.traceback
        lab.wait_for(Gone)
    finally:
        lab.close()


def test_kill_9_of_a_rank_is_reported_within_a_moment(lab):
    lab.fork(0, "wait")
    (forked,) = lab.wait_for(Forked)
    start = time.monotonic()
    os.kill(forked.pid, signal.SIGKILL)
    (end,) = lab.wait_for(Exited)
    assert os.WTERMSIG(end.status) == signal.SIGKILL and end.pid == forked.pid
    assert time.monotonic() - start < 1.0


def test_kill_9_of_the_server_ends_its_ranks_and_is_seen(lab, tag):
    for rank in (1, 0):
        lab.fork(rank, "wait")
    lab.wait_for(Forked, 2)
    os.kill(lab.server.pid, signal.SIGKILL)
    lab.wait_for(Gone)
    until(lambda: not tagged(tag), 2.0)
    lab.fork(0, "wait")  # asking a dead server is no error of its own
    assert lab.server.read_events() == []


def test_closing_ends_the_server_and_reaps_it(lab, tag):
    lab.wait_for(Ready)
    pid = lab.server.pid
    lab.server.close()
    assert identity.identify(pid) is None and not tagged(tag)


def test_a_large_environment_and_config_arrive_whole(lab):
    config = {"text": "x" * 3_000_000}
    lab.fork(0, "leave", {**config, "code": 5})
    (end,) = lab.wait_for(Exited)
    assert os.waitstatus_to_exitcode(end.status) == 5


def test_exec_gives_a_session_default_signals_and_the_environment(tmp_path, tag):
    read, write = os.pipe()
    script = """
        echo $VALUE; pwd; cat /proc/self/oom_score_adj
        grep -E "SigIgn|SigBlk" /proc/self/status; readlink /proc/self/fd/0"""
    env = {**os.environ, "VALUE": "$(touch x)", TAG: tag}
    pid = spawn_exec(["sh", "-c", script], env, str(tmp_path), stdout_fd=write, stderr_fd=write)
    os.close(write)
    with os.fdopen(read) as file:
        value, cwd, oom, ignored, blocked, stdin = file.read().splitlines()
    assert (value, cwd, stdin) == ("$(touch x)", str(tmp_path), "/dev/null")
    ours = ~(
        3 << 31
    )  # the C library keeps signals 32 and 33 to itself, as whoever started the tests left them
    assert int(oom) >= 500
    assert [int(mask.split()[1], 16) & ours for mask in (ignored, blocked)] == [0, 0]
    os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("argv", "cwd", "name"),
    [
        (["nonesuch-xyz"], "/", "nonesuch-xyz"),
        (["true"], "/nowhere", "/nowhere"),
        (["/etc/passwd"], "/", "/etc/passwd"),
    ],
)
def test_what_cannot_be_executed_is_an_error_with_its_path(argv, cwd, name):
    before = os.listdir("/proc/self/fd"), identity.descendants(os.getpid())
    with pytest.raises(OSError) as caught:
        spawn_exec(argv, dict(os.environ), cwd, stdout_fd=1, stderr_fd=2)
    assert str(caught.value.filename).endswith(name) and caught.value.errno
    # no zombie either; other suites' children (a session's lab) may be there and are not ours to reap
    assert (os.listdir("/proc/self/fd"), identity.descendants(os.getpid())) == before


def test_an_execd_rank_dies_with_the_agent(tag):
    code = """
import os, signal
from gpuctl.agent.spawn import spawn_exec
print(spawn_exec(["sleep", "600"], os.environ, "/", stdout_fd=2, stderr_fd=2), flush=True)
signal.pause()
"""
    agent = start_python(code, tag=tag)
    rank = identity.identify(int(agent.stdout.readline()))
    agent.kill()
    until(lambda: not identity.is_alive(rank), 2.0)
    agent.communicate()


def _is_inherited(fd: str) -> bool:
    try:
        return int(fd) > 2 and os.get_inheritable(int(fd))
    except OSError:
        return False


def _link(pid: int, fd: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return ""
