"""The first cause is found among victims, and a rank's end is put into one line."""

import json
import signal
from pathlib import Path

import pytest

from gpuctl.agent.exits import RankExit, describe, ended_by_us, first_cause, last_error_line, read_error_file


def test_a_signal_comes_before_the_peers_that_lost_their_connection() -> None:
    reset = RankExit(2, "b", exit_code=1, message="RuntimeError: Connection closed by peer [10.0.0.1]:4711")
    killed = RankExit(1, "a", signal="SIGKILL", message="killed by SIGKILL")
    cause = first_cause([reset, killed])
    assert cause is not None and (cause.rank, cause.signal, cause.exit_code) == (1, "SIGKILL", None)
    assert cause.also == ("rank 2 on b: RuntimeError: Connection closed by peer [10.0.0.1]:4711",)


def test_ranks_that_gpuctl_ended_are_never_the_cause_nor_listed() -> None:
    raised = RankExit(3, "b", exit_code=1, message="ValueError: boom")
    ended = RankExit(0, "a", signal="SIGTERM", is_victim=True, message="killed by SIGTERM")
    cause = first_cause([ended, raised])
    assert cause is not None and cause.rank == 3 and cause.also == ()


def test_a_connection_error_is_the_cause_when_nothing_else_happened() -> None:
    lost = RankExit(2, "b", exit_code=1, message="RuntimeError: Connection reset by peer")
    cause = first_cause([lost])
    assert cause is not None and cause.rank == 2


def test_ranks_that_are_done_are_no_failure() -> None:
    assert first_cause([RankExit(0, "a", exit_code=0, is_done=True)]) is None


def test_an_exit_with_zero_before_done_is_named_for_bundled_programs() -> None:
    assert describe(0, None, None, is_bundled=True) == "exited with code 0 before it was done"
    assert describe(7, None, None, is_bundled=False) == "exited with code 7"


def test_the_exception_line_is_taken_from_a_traceback_in_the_log() -> None:
    tail = ["step 3", "Traceback (most recent call last):", '  File "a.py", line 1', "ValueError: [/x] no"]
    assert last_error_line(tail) == "ValueError: [/x] no"
    assert last_error_line(["step 3"]) is None


def test_torch_elastics_error_file_is_read_and_garbage_is_none(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    assert read_error_file(path) is None
    path.write_text("[]")
    assert read_error_file(path) is None
    text = {
        "message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "Traceback", "timestamp": "1"}}
    }
    path.write_text(json.dumps(text))
    assert read_error_file(path) == ("ValueError: x", "Traceback")


@pytest.mark.parametrize(
    "signal_, error, was_asked, was_killed, expected",
    [
        (signal.SIGKILL, None, True, False, False),
        (signal.SIGKILL, None, True, True, True),
        (signal.SIGTERM, None, True, False, True),
        (signal.SIGTERM, None, False, False, False),
        (signal.SIGSEGV, None, True, True, False),
        (None, None, True, False, True),
        (None, "ValueError: boom", True, False, False),
        (None, "RuntimeError: Connection closed by peer", True, False, True),
        (None, "ValueError: boom", False, False, False),
    ],
)
def test_what_gpuctl_did_not_do_is_a_ranks_own_whoever_was_seen_first(
    signal_: int | None, error: str | None, was_asked: bool, was_killed: bool, expected: bool
) -> None:
    assert ended_by_us(signal_, error, was_asked=was_asked, was_killed=was_killed) is expected
