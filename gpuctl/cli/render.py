"""What the terminal shows: the only module that prints, and the only importer of rich.

stdout is data, stderr is progress, warnings, errors and hints. Text that came from a node is cleaned of
escape sequences here and never goes through rich's markup: it eats ``[rank0]`` and fails on ``[/x]``.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuctl.errors import GpuctlError

MAX_LINE_CHARS = 65_536
# C0 but tab and newline, DEL, C1, line separators, and the characters that reorder what is read (UAX #9)
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    """Return ``text`` with every control character made visible; long lines are cut.

    Lone surrogates (bytes that were no UTF-8) become ``\\xNN``.
    """
    if len(text) > MAX_LINE_CHARS:
        text = f"{text[:MAX_LINE_CHARS]}... [{len(text) - MAX_LINE_CHARS} more characters]"
    text = _UNPRINTABLE.sub(lambda m: _escaped(m[0]), text)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def clean_bytes(data: bytes) -> str:
    """Return a log line for the terminal; bytes that are no UTF-8 become ``\\xNN``."""
    return clean(data.decode("utf-8", "backslashreplace"))


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def print_error(error: GpuctlError) -> None:
    """Print ``error:``, ``  caused by:``, a blank line and ``hint:`` to stderr."""
    lines = [f"error: {error.message}"]
    if error.cause:
        first, *rest = error.cause.strip().splitlines() or [""]
        lines += [f"  caused by: {first}", *(f"             {line}" for line in rest)]
    if error.hint:
        lines += ["", f"hint: {error.hint}"]
    print("\n".join(clean(line) for line in lines), file=sys.stderr)


class Terminal:
    """The two streams of a command."""

    def __init__(
        self,
        *,
        is_json: bool = False,
        no_color: bool = False,
        is_quiet: bool = False,
        is_verbose: bool = False,
    ) -> None:
        self.is_json = is_json
        self.is_quiet = is_quiet
        self.is_verbose = is_verbose
        plain = no_color or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        self.has_color = not plain and sys.stdout.isatty()

    def json(self, document: Mapping[str, Any]) -> None:
        """Print one JSON document, or one line of a stream."""
        print(json.dumps(document), flush=True)

    def data(self, text: str = "") -> None:
        """Print a line of the answer."""
        print(clean(text), flush=True)

    def note(self, text: str) -> None:
        """Print a line of progress, unless quiet."""
        if not self.is_quiet:
            print(clean(text), file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Print a warning."""
        print(clean(f"warning: {text}"), file=sys.stderr, flush=True)

    def raw(self, data: bytes, stream: str = "out") -> None:
        """Print a log line of a rank to the stream it came from."""
        target: IO[str] = sys.stderr if stream == "err" else sys.stdout
        print(clean_bytes(data), file=target, flush=True)

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str | None = None
    ) -> None:
        """Print a table: aligned columns in a pipe, with rules on a terminal."""
        cells = [["-" if cell is None else clean(str(cell)) for cell in row] for row in rows]
        if title:
            print(clean(title))
        if sys.stdout.isatty():
            self._rich_table(columns, cells)
            return
        widths = [max(len(str(c)), *(len(row[i]) for row in cells), 0) for i, c in enumerate(columns)]
        for line in ([c.upper() for c in columns], *cells):
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        sys.stdout.flush()

    def _rich_table(self, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for column in columns:
            table.add_column(Text(column), overflow="fold")
        for row in cells:
            table.add_row(*(Text(cell) for cell in row))
        Console(no_color=not self.has_color, highlight=False, markup=False).print(table)


def bytes_text(size: int | None) -> str | None:
    """Return ``80 GiB`` for a number of bytes; None stays None."""
    if size is None:
        return None
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def count_text(number: int, noun: str) -> str:
    """Return ``1 node`` or ``4 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def age_text(seconds: float | None) -> str | None:
    """Return ``3m`` or ``2d`` for a time span."""
    if seconds is None:
        return None
    for limit, divisor, unit in ((60, 1, "s"), (3600, 60, "m"), (86400, 3600, "h")):
        if seconds < limit:
            return f"{max(0, seconds) / divisor:.0f}{unit}"
    return f"{seconds / 86400:.0f}d"
