"""Files keep the raw bytes, head and tail; a display gets lines; nobody who writes ever waits."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import until

from gpuctl.agent import logfile, loglines, logs
from gpuctl.agent.logfile import CappedFile
from gpuctl.agent.loglines import LineFramer, Tail
from gpuctl.agent.logs import LogPump


class Display:
    """A pump with a display that is read when the test says so."""

    def __init__(self, directory: Path, **options) -> None:
        self.directory = directory
        self.shown: list[tuple[int, str, bytes]] = []
        self.woken = threading.Event()
        self.pump = LogPump(
            lambda rank, stream, line: self.shown.append((rank, stream, line)), self.woken.set, **options
        )

    def add(self, rank: int = 0, stream: str = "out") -> int:
        read, write = os.pipe2(os.O_CLOEXEC)
        self.pump.add(rank, stream, read, self.path(rank, stream))
        return write

    def path(self, rank: int = 0, stream: str = "out") -> Path:
        return self.directory / f"rank-{rank}.{stream}"

    def wait_for(self, count: int) -> list[bytes]:
        def enough() -> bool:
            self.pump.deliver()
            return len(self.shown) >= count

        until(enough)
        return [line for _, _, line in self.shown]


@pytest.fixture
def display(tmp_path):
    display = Display(tmp_path)
    yield display
    display.pump.close(5)


def test_bytes_reach_the_file_as_they_were_and_lines_the_display(display):
    data = b"plain\n\x1b[31mred\x1b[0m \xff\xfe\0\n[/x] tag\nlast"
    write = display.add()
    os.write(write, data)
    os.close(write)
    assert display.wait_for(4) == data.split(b"\n")
    display.pump.close(5)
    assert display.path().read_bytes() == data
    assert display.path().stat().st_mode & 0o777 == 0o600


def test_a_prompt_without_an_end_is_shown_after_a_moment(display):
    write = display.add()
    os.write(write, b"waiting")
    start = time.monotonic()
    assert display.wait_for(1) == [b"waiting"]
    assert time.monotonic() - start >= logs.PARTIAL_AFTER_S * 0.9
    os.close(write)


def test_only_shown_ranks_are_framed_and_all_are_kept(display):
    first, other = display.add(0), display.add(3, "err")
    os.write(other, b"hidden\n")
    os.write(first, b"shown\n")
    assert display.wait_for(1) == [b"shown"]
    assert display.pump.tail(3, 5) == ["hidden"]
    assert [(rank, stream) for rank, stream, _ in display.shown] == [(0, "out")]
    os.close(first)
    os.close(other)


def test_the_tail_has_what_was_written_just_before_the_end(display):
    for i in range(50):
        write = display.add(i, "err")
        os.write(write, b"Traceback\n" + b"x" * 3000 + b"\nValueError: last words %d" % i)
        os.close(write)
        assert display.pump.tail(i, 1) == [f"ValueError: last words {i}"]
    assert display.pump.tail(99, 5) == []


def test_both_streams_are_in_the_tail_and_no_line_is_torn(display):
    out, err = display.add(1, "out"), display.add(1, "err")
    for write, text in ((out, b"begin "), (err, b"warning\n"), (out, b"end\n")):
        os.write(write, text)
        display.pump.tail(1, 1)  # read in this order
    assert display.pump.tail(1, 5) == ["warning", "begin end"]
    os.close(out)
    os.close(err)


def test_a_flood_stays_within_its_cap_and_keeps_head_and_tail(tmp_path):
    cap = 8 << 20
    display = Display(tmp_path, cap_bytes=cap)
    write = display.add()
    line = b"%08d " + b"x" * 90 + b"\n"
    total = 60 << 20
    with os.fdopen(write, "wb") as file:
        file.write(b"FIRST\n")
        for i in range(total // 100):
            file.write(line % i)
        file.write(b"LAST\n")
    display.pump.close(20)
    path = display.path()
    assert path.stat().st_size == 6 + total // 100 * 100 + 5
    assert path.stat().st_blocks * 512 <= cap + (2 << 20)
    with path.open("rb") as file:
        assert file.read(6 + 100).endswith(line % 0)
        file.seek(-(cap // 2), os.SEEK_END)
        tail = file.read()
    assert tail.endswith(line % (total // 100 - 1) + b"LAST\n") and b"\0" not in tail
    display.pump.deliver()
    assert display.pump.dropped_lines > 0
    assert b"lines not shown" in display.shown[-1][2]
    assert len(display.shown) <= loglines.MAX_QUEUED_LINES + 1


def test_a_writer_is_not_held_up_by_a_display_that_nobody_reads(display):
    writer = subprocess.Popen(
        [sys.executable, "-c", "for i in range(300000): print('line', i)"], stdout=(write := display.add())
    )
    os.close(write)
    assert writer.wait(20) == 0
    display.pump.close(5)
    assert display.path().read_bytes().endswith(b"line 299999\n")


def test_a_full_disk_is_said_once_and_the_writer_goes_on(tmp_path, capfd):
    # a file-size limit fails writes as a full disk does, without a file system of its own
    code = """
import os, resource, signal, sys, time
from pathlib import Path
from gpuctl.agent.logs import LogPump
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
shown = []
pump = LogPump(lambda *line: shown.append(line), lambda: None)
read, write = os.pipe()
pump.add(0, "out", read, Path(sys.argv[1]))
for i in range(200):
    os.write(write, b"y" * 9_999 + b"\\n")
    pump.deliver()
pump.tail(0, 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
deadline = time.monotonic() + 10
while b"could not be written" not in Path(sys.argv[1]).read_bytes() and time.monotonic() < deadline:
    os.write(write, b"room again\\n"); time.sleep(0.05)
pump.close(5); pump.deliver()
print(sum(b"cannot write" in line for _, _, line in shown))
"""
    path = tmp_path / "log"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "1", done.stderr
    assert done.stderr.count("File too large; the run goes on without its log") == 1
    assert b"bytes could not be written]\nroom again" in path.read_bytes()


@pytest.mark.skipif(os.getuid() != 0, reason="needs a small file system")
def test_a_full_file_system_loses_log_bytes_only(tmp_path):
    code = """
import os, sys
from pathlib import Path
from gpuctl.agent.logs import LogPump
shown = []
pump = LogPump(lambda *line: shown.append(line), lambda: None)
read, write = os.pipe()
pump.add(0, "out", read, Path(sys.argv[1]) / "log")
for i in range(40):
    os.write(write, b"z" * 100_000)
pump.close(5); pump.deliver()
print(any(b"No space left on device" in line for _, _, line in shown))
"""
    script = 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path), sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert done.stdout.strip() == "True", done.stderr


def test_a_50_mb_line_costs_little_memory(tmp_path):
    display = Display(tmp_path)
    write = display.add()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    block = b"w" * 65536
    for _ in range(50 << 4):
        os.write(write, block)
    os.close(write)
    display.pump.close(10)
    display.pump.deliver()
    assert all(len(line) <= loglines.MAX_LINE_BYTES for _, _, line in display.shown)
    assert display.path().stat().st_size == 50 << 20
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 64 << 10  # KiB


def test_closing_does_not_wait_for_whoever_still_holds_the_pipe(display):
    write = display.add()
    holder = subprocess.Popen(["sh", "-c", "while :; do echo still here; done"], stdout=write)
    os.close(write)
    display.wait_for(1)
    start = time.monotonic()
    display.pump.close(5)
    assert time.monotonic() - start < 2
    assert holder.wait(5) == -signal.SIGPIPE


def test_a_log_path_that_is_a_link_is_not_followed(display, tmp_path):
    target = tmp_path / "precious"
    target.write_text("keep")
    display.path().symlink_to(target)
    write = display.add()
    os.write(write, b"overwrite\n")
    os.close(write)
    display.pump.close(5)
    assert target.read_text() == "keep"


def test_no_descriptor_is_left_behind(tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    display = Display(tmp_path)
    os.close(display.add())
    os.close(display.add(1))
    display.pump.close(5)
    del display
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_bars_are_one_line_and_windows_line_ends_are_line_ends():
    framer = LineFramer()
    assert framer.feed(b" 10%\r 20%\r 30%", 0.0) == []
    assert framer.feed(b"\r 40%\r", 0.1) == []
    assert framer.feed(b"\n", 0.2) == [b" 40%"]
    assert framer.feed(b"a\r\nb\r", 0.3) == [b"a"]
    assert framer.feed(b"\nc", 0.4) == [b"b"]
    assert framer.flush() == [b"c"] and framer.flush() == []


def test_a_bar_that_never_ends_stays_small():
    framer = LineFramer()
    for i in range(10_000):
        assert framer.feed(b"%d%% |%s|\r" % (i, b"#" * 50), 0.0) == []
    assert framer.flush() == [b"9999%% |%s|" % (b"#" * 50)]


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_any_cut_of_a_stream_without_bars_gives_the_same_lines(chunks):
    chunks = [chunk.replace(b"\r", b"") for chunk in chunks]
    framer = LineFramer()
    lines = [line for chunk in chunks for line in framer.feed(chunk, 0.0)] + framer.flush()
    whole = b"".join(chunks).split(b"\n")
    assert lines == (whole[:-1] if not whole[-1] else whole)


@given(st.lists(st.tuples(st.sampled_from(["out", "err"]), st.binary(max_size=99_999)), max_size=8))
def test_a_tail_is_bounded_and_always_text(chunks):
    tail = Tail()
    for stream, data in chunks:
        tail.add(stream, data)
    assert sum(len(data) for _, data in tail.chunks) <= 2 * loglines.TAIL_BYTES
    assert all(isinstance(line, str) for line in tail.lines(20)) and len(tail.lines(20)) <= 20


def test_a_file_system_without_holes_begins_the_tail_again(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(logfile, "punch_hole", refuse)
    file = CappedFile(tmp_path / "log", cap_bytes=4 << 20)
    for i in range(64):
        assert file.write(b"%03d\n" % i + b"q" * ((1 << 20) - 5) + b"\n") is None
    file.close()
    data = (tmp_path / "log").read_bytes()
    assert data.startswith(b"000\n") and len(data) <= 5 << 20
    assert file.dropped_bytes > 50 << 20
