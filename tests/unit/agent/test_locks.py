"""One holder a lock, whoever asks and however the holder ended; a loser leaves nothing behind."""

import fcntl
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import end, fresh_tag, start_python, until

from gpuctl.agent import locks
from gpuctl.agent.locks import LockBusy, acquire, describe_holder

HOLDER = {"run": "demo-20260101-120000-abcd", "uid": os.getuid(), "pid": os.getpid(), "since": 1767268800.0}


@pytest.fixture
def directory(tmp_path) -> Path:
    return tmp_path / "locks"


def is_free(directory: Path, name: str) -> bool:
    try:
        acquire([name], HOLDER, directory).close()
    except LockBusy:
        return False
    return True


def test_a_second_launch_is_told_who_holds_the_lock(directory):
    held = acquire(["GPU-b", "GPU-a"], HOLDER, directory)
    with pytest.raises(LockBusy) as caught:
        acquire(["GPU-c", "GPU-b"], {"run": "other"}, directory)
    assert caught.value.name == "GPU-b"
    assert "GPU-b is in use: held by run demo-20260101-120000-abcd of user " in caught.value.message
    assert f"(pid {os.getpid()})" in caught.value.message
    held.close()
    acquire(["GPU-c", "GPU-b"], {"run": "other"}, directory).close()


def test_the_loser_holds_nothing_and_writes_nothing(directory):
    held = acquire(["b"], HOLDER, directory)
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(LockBusy):
        acquire(["a", "b"], {"run": "loser"}, directory)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    assert (directory / "a").read_bytes() == b""
    assert is_free(directory, "a")
    held.close()


def test_a_hundred_races_have_one_winner_each(directory):
    code = """
import sys, os
from pathlib import Path
from gpuctl.agent.locks import LockBusy, acquire
for line in sys.stdin:
    try:
        acquire([f"{line.strip()}-{i}" for i in range(3)], {"run": str(os.getpid())}, Path(sys.argv[1]))
        print("won", flush=True)
    except LockBusy as busy:
        print("lost to", busy.holder["run"], flush=True)
"""
    with fresh_tag() as tag:
        racers = [start_python(code, str(directory), tag=tag, stdin=subprocess.PIPE) for _ in range(2)]
        for round_ in range(100):
            for racer in racers:
                racer.stdin.write(f"{round_}\n".encode())
                racer.stdin.flush()
            answers = [racer.stdout.readline().decode().strip() for racer in racers]
            assert sorted(a.split()[0] for a in answers) == ["lost", "won"], answers
            winner = racers[answers.index("won")]
            assert f"lost to {winner.pid}" in answers
        for racer in racers:
            end(racer)


def test_a_lock_lives_as_long_as_the_last_process_that_inherited_it(directory):
    held = acquire(["gpu"], HOLDER, directory)
    assert not any(os.get_inheritable(fd) for fd in held.fds)
    rank = subprocess.Popen(["sleep", "600"], pass_fds=held.fds)
    held.close()
    assert not is_free(directory, "gpu")
    rank.kill()
    rank.wait()
    assert is_free(directory, "gpu")


def test_a_killed_holder_needs_no_manual_step(directory):
    code = """
import sys
from pathlib import Path
from gpuctl.agent.locks import acquire
held = acquire(["gpu"], {"run": "x"}, Path(sys.argv[1])); print(flush=True); sys.stdin.read()
"""
    with fresh_tag() as tag:
        holder = start_python(code, str(directory), tag=tag, stdin=subprocess.PIPE)
        holder.stdout.readline()
        assert not is_free(directory, "gpu")
        end(holder)
        assert is_free(directory, "gpu")


def test_a_record_of_another_boot_is_not_shown_as_the_holder(directory):
    acquire(["gpu"], HOLDER, directory).close()
    path = directory / "gpu"
    path.write_text(json.dumps({"run": "old", "boot_id": "an earlier one"}))
    assert is_free(directory, "gpu")
    path.write_text(json.dumps({"run": "old", "boot_id": "an earlier one"}))
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LockBusy) as caught:
            acquire(["gpu"], HOLDER, directory)
    assert caught.value.holder == {} and "left no record" in caught.value.message


def test_the_loser_waits_for_the_winners_record(directory):
    acquire(["gpu"], HOLDER, directory).close()
    (directory / "gpu").write_text("")
    code = """
import fcntl, json, sys, time
from gpuctl.agent import identity
file = open(sys.argv[1], "r+"); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); sys.stdin.readline()
file.write(json.dumps({"run": "late", "boot_id": identity.boot_id()})); file.flush(); sys.stdin.read()
"""
    with fresh_tag() as tag:
        winner = start_python(code, str(directory / "gpu"), tag=tag, stdin=subprocess.PIPE)
        winner.stdout.readline()
        winner.stdin.write(b"\n")
        winner.stdin.flush()
        with pytest.raises(LockBusy) as caught:
            acquire(["gpu"], HOLDER, directory)
        assert caught.value.holder["run"] == "late"
        end(winner)


def test_a_former_holders_record_is_gone_before_the_next_ones_is_there(directory):
    acquire(["a", "b"], {"run": "former"}, directory).close()
    other = acquire(["b"], {"run": "other"}, directory)
    with pytest.raises(LockBusy):
        acquire(["a", "b"], HOLDER, directory)  # had a for a moment: no record of its own is left
    assert (directory / "a").read_bytes() == b""
    other.close()


def test_the_directory_and_files_serve_every_user_whatever_the_umask(directory):
    before = os.umask(0o077)
    try:
        acquire(["gpu"], HOLDER, directory).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o1777
    assert stat.S_IMODE((directory / "gpu").stat().st_mode) == 0o666


@pytest.mark.skipif(os.getuid() != 0, reason="needs two users")
def test_another_user_can_take_the_lock_and_is_told_the_holder(directory):
    for parent in list(directory.parents)[:3]:
        parent.chmod(0o755)
    held = acquire(["gpu"], HOLDER, directory)
    code = f"""
import os
from pathlib import Path
from gpuctl.agent.locks import LockBusy, acquire
os.setgid(65534); os.setuid(65534)
try:
    acquire(["gpu"], {{"run": "mine"}}, Path({str(directory)!r})); print("won")
except LockBusy as busy:
    print(busy.holder["run"])
"""
    assert run(code) == HOLDER["run"]
    held.close()
    assert run(code) == "won"
    assert json.loads((directory / "gpu").read_text())["run"] == "mine"


def test_links_and_what_is_no_file_are_refused(directory, tmp_path):
    acquire(["gpu"], HOLDER, directory).close()
    target = tmp_path / "precious"
    target.write_text("keep")
    (directory / "link").symlink_to(target)
    os.mkfifo(directory / "fifo")
    for name in ("link", "fifo"):
        with pytest.raises(OSError):
            acquire([name], HOLDER, directory)
    assert target.read_text() == "keep"
    (tmp_path / "elsewhere").symlink_to(directory)
    with pytest.raises(OSError):
        acquire(["gpu"], HOLDER, tmp_path / "elsewhere")


def test_a_directory_that_others_cannot_use_is_an_error_that_names_it(directory):
    directory.mkdir(mode=0o755)
    start = time.monotonic()
    with pytest.raises(PermissionError, match="drwxrwxrwt") as caught:
        acquire(["gpu"], HOLDER, directory)
    assert caught.value.filename == str(directory)
    assert time.monotonic() - start < 2


def test_a_name_cannot_leave_the_directory(directory):
    acquire(["../escape"], HOLDER, directory).close()
    assert sorted(p.name for p in directory.iterdir()) == [".._escape"]


def test_holders_are_described_in_words():
    assert describe_holder({}) == "held by a process that left no record"
    text = describe_holder({"run": "r", "uid": 4_000_000, "pid": 7, "since": None})
    assert text == "held by run r of uid 4000000 (pid 7)"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_full_disk_does_not_take_the_lock_away(directory, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(locks.os, "pwrite", full)
    held = acquire(["gpu"], HOLDER, directory)
    monkeypatch.undo()
    assert until(lambda: not is_free(directory, "gpu"))
    held.close()
