"""The strict YAML reader: traps, lines, caps, and any text at all."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuctl.config.yaml_loader import MAX_BYTES, Value, decode, load_document, resolve_scalar
from gpuctl.errors import ConfigError


def error_of(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_document(text, "c.yaml")
    return caught.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # YAML 1.1 makes False, 18, 1342, 10, True and a date of these.
        *((text, text) for text in ("no", "NO", "off", "y", "0022", "22:22", "1_0", "on", "2026-01-01", "=")),
        *(
            (text, text)
            for text in ("0x1f", "0o17", "+1", ".inf", ".nan", "1.2.3.4", "1e999", "1" * 30, "-", ".")
        ),
        *(("true", True), ("False", False), ("null", None), ("~", None), ("", None)),
        *(
            ("0", 0),
            ("-3", -3),
            ("29400", 29400),
            ("1.10", 1.1),
            ("3e-4", 3e-4),
            ("1E3", 1000.0),
            (".5", 0.5),
        ),
        ("29400-29500", "29400-29500"),
    ],
)
def test_plain_scalars_are_what_they_look_like(text: str, value: Value) -> None:
    assert resolve_scalar(text) == value
    assert type(resolve_scalar(text)) is type(value)


def test_quoted_scalars_stay_text_and_plain_numbers_keep_theirs() -> None:
    document = load_document("a: '1'\nb: 1.10\nc: \"no\"\n", "c.yaml")
    assert document.value == {"a": "1", "b": 1.1, "c": "no"}
    assert document.texts == {("b",): "1.10"}


def test_every_key_and_item_knows_its_line() -> None:
    document = load_document(
        "version: 1\n\nnodes:\n  - host: a\n    env:\n      A: 1\n  - host: b\n", "c.yaml"
    )
    assert document.where(("nodes", 0, "env", "A")) == "c.yaml:6"
    assert document.where(("nodes", 1)) == "c.yaml:7"
    assert document.where(("nodes", 1, "user")) == "c.yaml:7"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("a: 1\nb: 2\na: 3\n", "c.yaml:3: 'a' stands here for the second time", "the first is in line 1"),
        ("a: &x 1\n", "c.yaml:1: anchors (&x) are not read", "write the value out where it is used"),
        ("a: *x\n", "c.yaml:1: aliases (*x) are not read", "write the value out"),
        ("<<: {a: 1}\n", "c.yaml:1: merge keys (<<) are not read", "write the keys out, or use `defaults:`"),
        (
            "a: !!python/object:os.system x\n",
            "c.yaml:1: tags ('tag:yaml.org,2002:python/object:os.system') are not read",
            "remove it; quote a value to keep it text",
        ),
        (
            "a:\n\t- b\n",
            "c.yaml:2: indented with a tab",
            "YAML wants blanks: replace the tab by two or four",
        ),
        ("- a\n---\n- b\n", "c.yaml:2: a second document starts here", "keep one document in a file"),
        ("? [a]\n: b\n", "c.yaml:1: a key has to be a word", "look for a stray '?', '[' or '{'"),
        ("[" * 40, "c.yaml:1: nested deeper than 32", "look for brackets that are not closed"),
        ("a: b: c\n", "c.yaml:1: not YAML", "check the indentation and the colons around this line"),
        ("a: @x\n", "c.yaml:1: not YAML", "quote the value: 'like this'"),
        (
            "nodes: [{host: gpu[01-04]}]\n",
            "c.yaml:1: not YAML",
            "quote a node set inside {...}: {host: 'gpu[01-04]'}",
        ),
        ('a: "\\ud800"\n', None, None),
    ],
)
def test_what_is_refused_names_the_line_and_a_way_out(
    text: str, message: str | None, hint: str | None
) -> None:
    error = error_of(text)
    assert message is None or (error.message, error.hint) == (message, hint)


def test_an_alias_bomb_is_refused_at_its_first_anchor() -> None:
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(8)
    )
    assert error_of(bomb).message == "c.yaml:1: anchors (&a) are not read"


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "[{a: "])
def test_deep_nesting_is_an_error_not_a_recursion(opening: str) -> None:
    assert isinstance(error_of(opening * 5000), ConfigError)


def test_a_file_above_the_cap_is_refused() -> None:
    assert (
        error_of("#" * (MAX_BYTES + 1)).message
        == "c.yaml has 1,000,001 bytes; a YAML file here has at most 1,000,000"
    )


def test_bytes_that_are_not_utf8_name_their_line() -> None:
    with pytest.raises(ConfigError) as caught:
        decode(b"a: 1\nb: \xff\n", "c.yaml")
    assert caught.value.message == "c.yaml:2: not UTF-8 text"
    assert decode(b"\xef\xbb\xbfa: 1", "c.yaml") == "a: 1"


yaml_like = st.text(
    st.sampled_from(
        [*"abn:-[]{}#&*!|>'\"%@`,?~ \n\t0123456789.\\_<=", "\u2028", "\x85", "\ufeff", "\x00", "ü"]
    ),
    max_size=120,
)


@settings(deadline=None)
@given(yaml_like | st.text(max_size=120))
def test_any_text_is_a_document_or_a_config_error_within_a_second(text: str) -> None:
    started = time.monotonic()
    try:
        load_document(text, "c.yaml")
    except ConfigError as exc:
        assert exc.message.startswith("c.yaml")
    assert time.monotonic() - started < 1
