"""What ranks write: floods, any bytes, huge lines. The run goes on, files are right, Ctrl-C works."""

from __future__ import annotations

import os
import signal
import time

from fault_lab import WORST_S, Run, make_plan, script, until

HOSTILE = b"\xff\xfe\x00nul \x1b]0;title\x07\x1b[2J\xc2\x9b31m \xe2\x80\xae bidi [/x] [bold]\r\n"


def finish(run: Run) -> dict:
    """Wait for the end of the command and return its outcome."""
    run.wait_for_client(time.monotonic(), 60)
    run.wait_until_gone(time.monotonic(), 5)
    return run.event("outcome", 1)


def test_any_bytes_reach_the_files_unchanged_and_the_client_as_they_are(tmp_path):
    code = f"import sys\nfor out in (sys.stdout, sys.stderr): out.buffer.write({HOSTILE!r} * 100)"
    run = Run(make_plan(tmp_path, script(tmp_path, code)))
    try:
        assert finish(run)["state"] == "done"
        for rank in range(4):
            assert run.log(rank, "out") == run.log(rank, "err") == HOSTILE * 100
        lines = [bytes.fromhex(e["line"]) for e in run.events if e["event"] == "log"]
        assert lines.count(HOSTILE.rstrip(b"\r\n")) == 200  # both streams of rank 0
    finally:
        run.close()


def test_a_50_mb_line_is_kept_whole_and_shown_in_pieces(tmp_path):
    code = "import sys\nfor _ in range(50): sys.stdout.write('x' * (1 << 20))\nsys.stdout.write('\\n')"
    run = Run(make_plan(tmp_path, script(tmp_path, code)))
    try:
        assert finish(run)["state"] == "done"
        assert len(run.log(0, "out")) == (50 << 20) + 1
        assert all(e["size"] <= 64 << 10 for e in run.events if e["event"] == "log")
    finally:
        run.close()


def test_a_flood_on_all_ranks_is_capped_and_ctrl_c_still_works(tmp_path):
    code = "import sys\nwhile True: sys.stdout.write('flood ' * 1000 + '\\n')"
    run = Run(make_plan(tmp_path, script(tmp_path, code)))
    try:
        path = run.run_dir(0).log(0, 1, "out")
        until(lambda: path.exists() and path.stat().st_size > 200 << 20, 60, "no flood")
        assert path.stat().st_blocks * 512 <= 68 << 20
        began = time.monotonic()
        os.kill(run.client.pid, signal.SIGINT)
        assert run.wait_until_gone(began) <= WORST_S
        run.wait_for_client(began)
        assert run.client.returncode == 130
        assert run.log_head(0, 100).startswith(b"flood ")
        assert sum(e["size"] for e in run.events if e["event"] == "log") < 200 << 20
        assert not [e for e in run.events if e["event"] in ("failed", "node_lost")]
    finally:
        run.close()


def test_the_last_words_of_a_rank_stand_in_its_failure(tmp_path):
    code = """
import os, sys, time
if os.environ["RANK"] == "2":
    for i in range(1000): print("line", i)
    print("the last words", file=sys.stderr)
    sys.exit(5)
time.sleep(600)
"""
    run = Run(make_plan(tmp_path, script(tmp_path, code)))
    try:
        failed = run.event("failed", 20)
        assert (failed["rank"], failed["exit_code"]) == (2, 5)
        assert failed["log_tail"][-1] == "the last words" or "line 999" in failed["log_tail"][-1]
        assert len(failed["log_tail"]) >= 20
        assert finish(run)["state"] == "failed"
    finally:
        run.close()
