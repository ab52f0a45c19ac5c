"""YAML as people mean it: a strict reader that remembers the line of everything.

Not a general YAML library: anchors, aliases, merge keys, tags and second documents are refused (an
alias file of 306 bytes explodes when it is walked, a merge key while it is loaded), duplicate keys
are errors (PyYAML silently keeps the last), and plain scalars follow YAML 1.2 with one more step
away from guessing: ``no``, ``0022``, ``22:22`` and ``1_0`` are the text they look like.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

import yaml

from gpuctl.errors import ConfigError

MAX_BYTES = 1_000_000
"""4,096 nodes written out one by one take less than half of this."""

MAX_DEPTH = 32

MAX_ITEMS = 4096
"""Items of a list, keys of a mapping: as many as there may be nodes."""

MAX_VALUES = 100_000
"""Values in all: 4,096 nodes with every key of their own. Keeps the worst file within a second or two."""

Value = None | bool | int | float | str | list["Value"] | dict[str, "Value"]
Path = tuple[str | int, ...]
"""Where a value stands: keys and list positions from the top."""

# libyaml reads 1 MB in a second; the pure Python scanner (a PyYAML built without it) takes twenty.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Document:
    """A YAML document with the line of every key and item, and the text of every plain scalar."""

    value: Value
    name: str
    lines: dict[Path, int] = field(default_factory=dict)
    texts: dict[Path, str] = field(default_factory=dict)
    """The text of scalars that became something else: ``1.10`` where the value is 1.1."""

    def line(self, path: Path) -> int:
        """Return the line of ``path``, or of the nearest thing around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def where(self, path: Path) -> str:
        """Return ``cluster.yaml:12``."""
        return f"{self.name}:{self.line(path)}"


def load_document(text: str, name: str) -> Document:
    """Read one YAML document; ``name`` is what messages call it. Raises ConfigError with its line."""
    _check_characters(text, name)
    _check_tabs(text, name)
    reader = _Reader(name)
    try:
        # Events, not nodes: composing would follow aliases before anybody could object.
        reader.read(yaml.parse(text, Loader=_LOADER))
    except yaml.MarkedYAMLError as exc:
        raise _syntax_error(exc, text, name) from exc
    except yaml.YAMLError as exc:
        raise ConfigError(
            f"{name} is not YAML", cause=str(exc).splitlines()[0], hint="is it a text file?"
        ) from exc
    return Document(reader.value, name, reader.lines, reader.texts)


def decode(raw: bytes, name: str) -> str:
    """Decode a file's bytes; raises ConfigError where they are not UTF-8."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = raw.count(b"\n", 0, exc.start) + 1
        raise ConfigError(f"{name}:{line}: not UTF-8 text", hint="save the file as UTF-8") from exc


class _Reader:
    """Builds values from parser events, one document, refusing what the module refuses."""

    def __init__(self, name: str) -> None:
        self.value: Value = None
        self.lines: dict[Path, int] = {}
        self.texts: dict[Path, str] = {}
        self._name = name
        self._events: Iterator[yaml.Event] = iter(())

    def read(self, events: Iterator[yaml.Event]) -> None:
        self._events = events
        documents = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._refuse(event, "a second document starts here", "keep one document in a file")
            elif isinstance(event, yaml.NodeEvent):
                self.value = self._node(event, ())

    def _node(self, event: yaml.Event, path: Path) -> Value:
        self.lines.setdefault(path, _line(event))
        self._check_plain(event, path)
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(path)
        assert isinstance(event, yaml.ScalarEvent)
        return self._scalar(event, path)

    def _mapping(self, path: Path) -> Value:
        mapping: dict[str, Value] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._key(event, path)
            here = (*path, key)
            if key in mapping:
                self._refuse(
                    event,
                    f"{key!r} stands here for the second time",
                    f"the first is in line {self.lines[here]}",
                )
            self.lines[here] = _line(event)
            self._check_count(event, len(mapping))
            mapping[key] = self._node(next(self._events), here)
        return mapping

    def _key(self, event: yaml.Event, path: Path) -> str:
        self._check_plain(event, path)
        if not isinstance(event, yaml.ScalarEvent):
            self._refuse(event, "a key has to be a word", "look for a stray '?', '[' or '{'")
        if event.value == "<<" and event.implicit[0]:
            self._refuse(event, "merge keys (<<) are not read", "write the keys out, or use `defaults:`")
        return str(event.value)

    def _sequence(self, path: Path) -> Value:
        items: list[Value] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._node(event, (*path, len(items))))
            self._check_count(event, len(items))
        return items

    def _scalar(self, event: yaml.ScalarEvent, path: Path) -> Value:
        text = str(event.value)
        if any("\ud800" <= char <= "\udfff" for char in text):  # "\\ud800" in quotes
            self._refuse(event, "half a character (a lone surrogate)", "write the character itself")
        if not event.implicit[0]:  # quoted: it is the text it is
            return text
        value = resolve_scalar(text)
        if not isinstance(value, str):
            self.texts[path] = text
        return value

    def _check_plain(self, event: yaml.Event, path: Path) -> None:
        anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
        if isinstance(event, yaml.AliasEvent):
            self._refuse(event, f"aliases (*{anchor}) are not read", "write the value out")
        if anchor is not None:
            self._refuse(event, f"anchors (&{anchor}) are not read", "write the value out where it is used")
        if tag is not None:
            self._refuse(
                event, f"tags ({tag[:60]!a}) are not read", "remove it; quote a value to keep it text"
            )
        if len(path) > MAX_DEPTH:
            self._refuse(event, f"nested deeper than {MAX_DEPTH}", "look for brackets that are not closed")

    def _check_count(self, event: yaml.Event, items: int) -> None:
        if items > MAX_ITEMS or len(self.lines) > MAX_VALUES:
            self._refuse(
                event, "more values than any file here needs", "fold hosts into node sets: gpu[001-128]"
            )

    def _refuse(self, event: yaml.Event, message: str, hint: str) -> NoReturn:
        raise ConfigError(f"{self._name}:{_line(event)}: {message}", hint=hint)


def resolve_scalar(text: str) -> Value:
    """Return what a plain scalar means: null, true/false, a decimal number, or its own text.

    YAML 1.2's core schema without octal, hexadecimal, infinity, signs of ``+`` and leading zeros.
    """
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
# 18 digits fit 64 bits; longer ones are serial numbers, not counts.
_INT = re.compile(r"-?(?:0|[1-9][0-9]{0,17})", re.ASCII)
_FLOAT = re.compile(
    r"-?(?:(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,30})?|\.[0-9]{1,30})(?:[eE][-+]?[0-9]{1,4})?", re.ASCII
)


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None
    return event.start_mark.line + 1


# What YAML 1.2 section 5.1 lets stand in a text; a lone surrogate is not even Unicode.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")


def _check_characters(text: str, name: str) -> None:
    body = text.removeprefix("\ufeff")
    found = _FORBIDDEN.search(body)
    if found:
        line = body.count("\n", 0, found.start()) + 1
        raise ConfigError(
            f"{name}:{line}: the character {found[0]!a} cannot stand in YAML",
            hint="remove it; is it a text file?",
        )
    size = len(text.encode())
    if size > MAX_BYTES:
        raise ConfigError(
            f"{name} has {size:,} bytes; a YAML file here has at most {MAX_BYTES:,}",
            hint="fold hosts into node sets: gpu[001-128]",
        )


def _check_tabs(text: str, name: str) -> None:
    """Refuse a tab in an indentation: YAML forbids it, and says so in words nobody understands."""
    for number, line in enumerate(text.split("\n"), start=1):
        content = line.lstrip(" \t\r")
        if content and not content.startswith("#") and "\t" in line[: len(line) - len(content)]:
            raise ConfigError(
                f"{name}:{number}: indented with a tab",
                hint="YAML wants blanks: replace the tab by two or four",
            )


def _syntax_error(exc: yaml.MarkedYAMLError, text: str, name: str) -> ConfigError:
    mark = exc.problem_mark or exc.context_mark
    if mark is None:
        return ConfigError(f"{name} is not YAML", cause=exc.problem, hint="is it a text file?")
    lines = text.split("\n")
    line = lines[mark.line].strip() if mark.line < len(lines) else ""
    hint = "check the indentation and the colons around this line"
    if "\t" in line:
        hint = "there is a tab in this line: YAML wants blanks"
    elif re.search(r":\s*[@`%*&!|>]", line) or line.count('"') % 2 or line.count("'") % 2:
        hint = "quote the value: 'like this'"
    elif "[" in line and "host" in line:
        hint = "quote a node set inside {...}: {host: 'gpu[01-04]'}"
    since = f" that begins in line {exc.context_mark.line + 1}" if exc.context_mark else ""
    context = f"{exc.context}{since}: " if exc.context else ""
    return ConfigError(f"{name}:{mark.line + 1}: not YAML", cause=f"{context}{exc.problem}", hint=hint)
