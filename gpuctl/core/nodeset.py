"""Node sets: ``gpu[01-04,7],host`` to a list of names and back.

Not a resolver: a name here is only text that is safe to hand to ssh. Padding is kept (``01`` and
``1`` are different hosts), the number of names is checked before any is made.

    >>> expand("gpu[01-03]")
    ['gpu01', 'gpu02', 'gpu03']
    >>> fold(["gpu01", "gpu02", "gpu03", "login"])
    'gpu[01-03],login'
"""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpuctl.errors import ConfigError

MAX_NODES = 4096
"""Names one expression may stand for: twice the largest site this could serve, small in memory."""

MAX_HOST_LENGTH = 253
"""RFC 1035 section 2.3.4, without the final dot."""

_LABEL = re.compile(r"(?!-)[A-Za-z0-9_+-]{1,63}(?<!-)")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[A-Za-z0-9_.-]{1,15})?")
_RANGE = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?", re.ASCII)
_NUMBER = re.compile(r"(?<!\d)\d{1,12}(?!\d)", re.ASCII)
_IPV4 = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}", re.ASCII)


def check_host(name: str) -> str:
    """Return ``name`` if it is a host name, an IPv4 or an IPv6 address; raise ConfigError if not.

    ``+`` and ``_`` are allowed: real ssh_config aliases have them. Nothing that a shell, ssh or
    a path treats specially is.
    """
    if len(name) <= MAX_HOST_LENGTH and (_is_name(name) or _is_ipv6(name)):
        return name
    shown = name if len(name) <= 80 else name[:77] + "..."
    raise ConfigError(
        f"{shown!r} is not a host name",
        cause=_what_is_wrong(name),
        hint="a host is letters, digits, '.', '_', '+' and '-', or an address; several are gpu[01-04],login",
    )


def expand(text: str, *, limit: int = MAX_NODES) -> list[str]:
    """Return the names of a node set in the order written, at most ``limit``.

    Raises ConfigError on a bad range, a hostile or an empty name, or too many names. A name that
    is written twice comes twice: whether that is wrong is the caller's business.
    """
    names: list[str] = []
    for pattern in _split(text):
        parts = _parse(pattern)
        if len(names) + _count(parts) > limit:
            raise ConfigError(
                f"node set {_short(text)!r} stands for more than {limit:,} hosts",
                hint="check the range for a slip of the keyboard",
            )
        names += (check_host("".join(words)) for words in itertools.product(*parts))
    return names


def fold(names: Iterable[str]) -> str:
    """Return a short node set for ``names``, in order of first appearance; duplicates are dropped.

    Names that differ in one number share a bracket: ``gpu[01-03,07]``. ``expand`` gives them back,
    the numbers of a bracket sorted.
    """
    unique = list(dict.fromkeys(names))
    shapes = Counter(shape for name in unique for shape, _ in _shapes(name))
    groups: dict[_Shape, list[str]] = {}
    for name in unique:
        shape, number = max(_shapes(name), key=lambda candidate: shapes[candidate[0]])
        groups.setdefault(shape, []).append(number)
    return ",".join(_fold_group(shape, numbers) for shape, numbers in groups.items())


@dataclass(frozen=True)
class _Shape:
    """What the names of one bracket have in common: the text around the number."""

    before: str
    after: str


@dataclass(frozen=True)
class _Range:
    """One stretch of a bracket; ``width`` is the padding its text showed."""

    first: int
    last: int
    width: int


@dataclass(frozen=True)
class _Choice:
    """What can stand at one place of a pattern, countable without making the names."""

    ranges: tuple[_Range, ...] = ()
    text: str = ""

    def __len__(self) -> int:
        return sum(r.last - r.first + 1 for r in self.ranges) if self.ranges else 1

    def __iter__(self) -> Iterator[str]:
        if not self.ranges:
            return iter((self.text,))
        return (f"{n:0{r.width}d}" for r in self.ranges for n in range(r.first, r.last + 1))


def _split(text: str) -> list[str]:
    """Split at commas outside brackets; blanks around a comma are allowed, inside a name they are not."""
    patterns, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise ConfigError(f"node set {_short(text)!r}: brackets do not match", hint="write gpu[01-04,7]")
        if char == "," and depth == 0:
            patterns.append(text[start:at].strip(" "))
            start = at + 1
    patterns.append(text[start:].strip(" "))
    if depth:
        raise ConfigError(f"node set {_short(text)!r}: brackets do not match", hint="write gpu[01-04,7]")
    if not all(patterns):
        raise ConfigError(f"node set {_short(text)!r}: an empty name", hint="remove the stray comma")
    return patterns


def _parse(pattern: str) -> list[_Choice]:
    """Split one pattern into fixed text and brackets; a bracketed IPv6 address is text."""
    if pattern.startswith("[") and pattern.endswith("]") and _is_ipv6(pattern[1:-1]):
        return [_Choice(text=pattern[1:-1])]
    pieces = re.split(r"\[([^\[\]]*)\]", pattern)
    return [
        _Choice(_parse_ranges(piece, pattern)) if index % 2 else _Choice(text=piece)
        for index, piece in enumerate(pieces)
        if index % 2 or piece
    ]


def _parse_ranges(text: str, pattern: str) -> tuple[_Range, ...]:
    ranges = []
    for item in text.split(","):
        match = _RANGE.fullmatch(item.strip(" "))
        if not match:
            raise ConfigError(
                f"node set {_short(pattern)!r}: {_short(item)!r} is not a number or a range",
                hint="write gpu[01-04,7]",
            )
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise ConfigError(
                f"node set {_short(pattern)!r}: {item.strip()} counts down", hint=f"write [{last}-{first}]"
            )
        if _is_padded(last) and len(last) != len(first):
            raise ConfigError(
                f"node set {_short(pattern)!r}: {item.strip()} has two paddings",
                hint=f"write [{int(first):0{len(last)}d}-{last}]",
            )
        ranges.append(_Range(int(first), int(last), len(first) if _is_padded(first) else 0))
    return tuple(ranges)


def _count(parts: list[_Choice]) -> int:
    product = 1
    for part in parts:
        product *= len(part)
    return product


def _is_name(name: str) -> bool:
    return all(_LABEL.fullmatch(label) for label in name.split("."))


def _is_ipv6(name: str) -> bool:
    if not _IPV6.fullmatch(name):
        return False
    try:
        ipaddress.IPv6Address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _what_is_wrong(name: str) -> str:
    if not name:
        return "it is empty"
    if len(name) > MAX_HOST_LENGTH:
        return f"it has {len(name)} characters; {MAX_HOST_LENGTH} are the most a name can have"
    if name.startswith("-"):
        return "a leading '-' would be an option for ssh"
    odd = next((c for c in name if not re.match(r"[A-Za-z0-9_.+:%-]", c)), None)
    if odd is None:
        return "its dots, dashes or colons do not make a name or an address"
    return f"{odd!r} cannot stand in a host name"


def _shapes(name: str) -> list[tuple[_Shape, str]]:
    """Return each way to see ``name`` as text around a number, the likeliest first.

    The last number of the first label counts hosts more often than one of the domain does
    (``gpu01.dc2.example``); an IPv6 address is not taken apart.
    """
    found = list(_NUMBER.finditer(name)) if ":" not in name else []
    if not found:
        return [(_Shape(name, ""), "")]
    label_end = len(name) if _IPV4.fullmatch(name) else name.find(".") % (len(name) + 1)
    found.sort(key=lambda match: (match.end() > label_end, -match.start()))
    return [(_Shape(name[: m.start()], name[m.end() :]), m[0]) for m in found]


def _fold_group(shape: _Shape, numbers: list[str]) -> str:
    if len(numbers) == 1:
        return f"{shape.before}{numbers[0]}{shape.after}"
    widths: dict[int, list[int]] = {}
    padded = sorted({len(n) for n in numbers if _is_padded(n)}, reverse=True)
    for text in numbers:
        # "10" continues "08,09", but not "8,9" when both kinds are there: the widest padding that fits.
        width = len(text) if _is_padded(text) else next((w for w in padded if w <= len(text)), 0)
        widths.setdefault(width, []).append(int(text))
    ranges = ",".join(_fold_numbers(sorted(values), width) for width, values in widths.items())
    return f"{shape.before}[{ranges}]{shape.after}"


def _fold_numbers(numbers: list[int], width: int) -> str:
    stretches: list[list[int]] = []
    for number in numbers:
        if stretches and number == stretches[-1][-1] + 1:
            stretches[-1][-1] = number
        else:
            stretches.append([number, number])
    return ",".join(
        f"{first:0{width}d}" if first == last else f"{first:0{width}d}-{last:0{width}d}"
        for first, last in stretches
    )


def _is_padded(number: str) -> bool:
    return len(number) > 1 and number.startswith("0")


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
