from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuctl.cli.render import Terminal, age_text, bytes_text, clean, clean_bytes, print_error
from gpuctl.errors import CheckFailed


@given(st.binary(max_size=200))
def test_no_byte_of_a_node_moves_the_cursor(data: bytes) -> None:
    text = clean_bytes(data)
    assert all(char in "\t\n" or char.isprintable() or ord(char) > 0x9F for char in text)
    text.encode()  # nothing that a stream could not write


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("[rank0] [/tmp]", "[rank0] [/tmp]"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\u202eb", "a\\u202eb"),
        ("\x9b31m", "\\x9b31m"),
        ("50%\rdone", "50%\\x0ddone"),
    ],
)
def test_what_a_node_sent_is_shown_literally(sent: str, shown: str) -> None:
    assert clean(sent) == shown


def test_an_error_has_its_three_parts(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(
        CheckFailed(
            "2 of 16 nodes cannot be used: node[07,12]",
            cause="NCCL 2.21.5 on node[07,12], 2.27.3 on the other 14\nas read from the library",
            hint="install one version everywhere, or run `gpuctl launch --exclude node[07,12]`",
        )
    )
    assert capsys.readouterr().err == (
        "error: 2 of 16 nodes cannot be used: node[07,12]\n"
        "  caused by: NCCL 2.21.5 on node[07,12], 2.27.3 on the other 14\n"
        "             as read from the library\n"
        "\n"
        "hint: install one version everywhere, or run `gpuctl launch --exclude node[07,12]`\n"
    )


def test_a_table_in_a_pipe_is_plain_and_unknown_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().table(("node", "loss"), [("gpu01", None), ("gpu02", 0)])
    assert capsys.readouterr().out == "NODE   LOSS\ngpu01  -\ngpu02  0\n"


def test_units_are_binary_and_unknown_stays_unknown() -> None:
    assert (bytes_text(80 << 30), bytes_text(1536), bytes_text(0), bytes_text(None)) == (
        "80.0 GiB", "1.5 KiB", "0 B", None,
    )  # fmt: skip
    assert (age_text(5), age_text(7200), age_text(None)) == ("5s", "2h", None)
