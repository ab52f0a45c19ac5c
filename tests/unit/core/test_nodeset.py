"""Node sets: recorded Slurm expressions, hostile names, and expand(fold(x)) == x."""

from __future__ import annotations

import csv
import string
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuctl.core.nodeset import MAX_NODES, check_host, expand, fold
from gpuctl.errors import ConfigError

FIXTURES = Path(__file__).parents[2] / "fixtures"
RECORDED = list(csv.DictReader((FIXTURES / "slurm/nodelists.tsv").open(), delimiter="\t"))

# Every byte a shell, ssh or a path treats specially, alone and around a name that would be fine.
METACHARACTERS = "\0\t\n\r !\"#$&'()*,/:;<=>?@[\\]^`{|}~\x7f\x1b\u202e"
HOSTILE = [
    *(
        "-oProxyCommand=x",
        "-",
        "--",
        "$(x)",
        "`x`",
        "a;b",
        "a|b",
        "a&&b",
        "../x",
        "/etc",
        ".",
        "..",
        "~",
        "a b",
    ),
    *(f"{char}gpu" for char in METACHARACTERS),
    *(f"gpu{char}" for char in METACHARACTERS),
    *(f"g{char}u" for char in METACHARACTERS if char not in ",:"),
    *(f"$({char})" for char in METACHARACTERS),
    *(f"a{char}{char}b" for char in METACHARACTERS if char != ":"),
    *("", "a..b", ".a", "a.", "a-", "-a", "a.-b", "a-.b", "é", "gpu\u0661", "x" * 64, "a." * 127 + "a"),
    *("::1::", "1:2", "fe80::1%", "fe80::1%$(x)", "[::1", "[::1]x", "10.0.0.1:22", "user@host", "host\u200b"),
]


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: row["expression"])
def test_recorded_slurm_expressions_expand_as_slurm_does(row: dict[str, str]) -> None:
    names = expand(row["expression"])
    assert (len(names), names[0], names[-1]) == (int(row["count"]), row["first"], row["last"])
    assert sorted(expand(fold(names))) == sorted(names)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu[01-04,7],host", ["gpu01", "gpu02", "gpu03", "gpu04", "gpu7", "host"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("a[1-2]b[3-4]", ["a1b3", "a1b4", "a2b3", "a2b4"]),
        ("gpu[1-2].lab.example", ["gpu1.lab.example", "gpu2.lab.example"]),
        ("10.0.0.[8-10]", ["10.0.0.8", "10.0.0.9", "10.0.0.10"]),
        ("[::1],fe80::1%eth0", ["::1", "fe80::1%eth0"]),
        ("a, b", ["a", "b"]),
        ("a,a", ["a", "a"]),
        ("tunnel+gpu1,under_score", ["tunnel+gpu1", "under_score"]),
    ],
)
def test_expand(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["gpu01", "gpu02", "gpu03", "login"], "gpu[01-03],login"),
        (["gpu08", "gpu09", "gpu10"], "gpu[08-10]"),
        (["gpu8", "gpu9", "gpu10"], "gpu[8-10]"),
        (["gpu1", "gpu01"], "gpu[1,01]"),
        (["gpu3", "gpu1", "gpu3"], "gpu[1,3]"),
        (["gpu1-ib0", "gpu2-ib0"], "gpu[1-2]-ib0"),
        (["gpu1.dc2.example", "gpu2.dc2.example"], "gpu[1-2].dc2.example"),
        (["n1.dc1.example", "n1.dc2.example"], "n1.dc[1-2].example"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]"),
        (["::1", "::2"], "::1,::2"),
        (["gpu7"], "gpu7"),
        ([], ""),
    ],
)
def test_fold(names: list[str], text: str) -> None:
    assert fold(names) == text


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_host(name)
    assert caught.value.hint
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    "name", ["-oProxyCommand=x", "$(x)", "gpu[1-2];x", "gpu[01-02", "gpu]", "a,,b", "gpu[]", ""]
)
def test_hostile_node_sets_are_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand(name)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n[9-1]", "node set 'n[9-1]': 9-1 counts down"),
        ("n[1-x]", "node set 'n[1-x]': '1-x' is not a number or a range"),
        ("n[01-010]", "node set 'n[01-010]': 01-010 has two paddings"),
        ("n[1-999999999]", "node set 'n[1-999999999]' stands for more than 4,096 hosts"),
        ("n[1-65]x[1-64]", "node set 'n[1-65]x[1-64]' stands for more than 4,096 hosts"),
    ],
)
def test_bad_ranges_say_which_entry_and_why(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand(text)
    assert caught.value.message == message


def test_a_huge_range_is_refused_before_any_name_is_made() -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError):
        expand(",".join(["n[0-999999999999][0-999999999999]"] * 50))
    assert time.monotonic() - started < 0.5


def test_the_cap_is_exact() -> None:
    assert len(expand(f"n[1-{MAX_NODES}]")) == MAX_NODES
    with pytest.raises(ConfigError):
        expand(f"n[1-{MAX_NODES}],x")


labels = st.text(string.ascii_lowercase + string.digits + "-_+", min_size=1, max_size=12).filter(
    lambda text: not text.startswith("-") and not text.endswith("-")
)
hosts = st.lists(labels, min_size=1, max_size=3).map(".".join)


@settings(deadline=None)
@given(st.lists(hosts, max_size=30))
def test_expand_gives_back_what_fold_was_given(names: list[str]) -> None:
    assert not names or sorted(expand(fold(names))) == sorted(set(names))


@settings(deadline=None)
@given(st.text(max_size=200) | st.text("gpu[]0123456789-, .:%", max_size=60))
def test_any_text_is_a_list_of_safe_names_or_a_config_error(text: str) -> None:
    try:
        names = expand(text)
    except ConfigError:
        return
    assert 0 < len(names) <= MAX_NODES
    assert all(check_host(name) == name and name[0] != "-" for name in names)
