"""known_hosts as OpenSSH reads it (sshd(8), SSH_KNOWN_HOSTS FILE FORMAT), tolerant of what it cannot use.

Hashed names, ``[host]:port``, ``*`` and ``?`` patterns, negation, ``@revoked``; ``@cert-authority`` is
recognised and explained, not honoured. A line that cannot be read never hides the others.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import fnmatch
import hashlib
import hmac
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Verdict(Enum):
    """What known_hosts says of a key."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


@dataclass(frozen=True)
class Entry:
    """One line: ``marker`` is "", "@revoked" or "@cert-authority"."""

    marker: str
    names: str
    key_type: str
    key: bytes
    origin: str
    """``/home/u/.ssh/known_hosts:12``"""


@dataclass(frozen=True)
class Answer:
    """The verdict and the line it rests on."""

    verdict: Verdict
    entry: Entry | None = None
    has_authority: bool = False


def read_known_hosts(paths: Iterable[str]) -> list[Entry]:
    """Return the entries of all files that exist, in order."""
    entries = []
    for path in paths:
        try:
            lines = Path(path).read_text(errors="replace").splitlines()
        except OSError:
            continue
        for number, line in enumerate(lines, 1):
            entry = _parse(line, f"{path}:{number}")
            if entry is not None:
                entries.append(entry)
    return entries


def _parse(line: str, origin: str) -> Entry | None:
    words = line.split()
    if not words or words[0].startswith("#"):
        return None
    marker = words.pop(0) if words[0].startswith("@") else ""
    if len(words) < 3:
        return None
    try:
        key = base64.b64decode(words[2], validate=True)
    except (binascii.Error, ValueError):
        return None
    return Entry(marker, words[0], words[1], key, origin)


def check(entries: Sequence[Entry], name: str, key_type: str, key: bytes) -> Answer:
    """Return what the entries say of ``name`` (``host``, ``[host]:port`` or an alias) showing ``key``.

    A different key of the same type is CHANGED; a host that is only known by other types is too,
    since the types it is known by were offered first.
    """
    mine = [entry for entry in entries if matches(entry.names, name)]
    for entry in entries:
        if entry.marker == "@revoked" and entry.key == key and matches(entry.names, name):
            return Answer(Verdict.REVOKED, entry)
    plain = [entry for entry in mine if entry.marker == ""]
    for entry in plain:
        if entry.key == key:
            return Answer(Verdict.KNOWN, entry)
    if plain:
        same_type = [entry for entry in plain if entry.key_type == key_type]
        return Answer(Verdict.CHANGED, (same_type or plain)[0])
    return Answer(Verdict.UNKNOWN, has_authority=any(e.marker == "@cert-authority" for e in mine))


def known_types(entries: Sequence[Entry], name: str) -> list[str]:
    """Return the key types ``name`` is known by: they are asked for first."""
    found = [e.key_type for e in entries if e.marker == "" and matches(e.names, name)]
    return list(dict.fromkeys(found))


def matches(names: str, name: str) -> bool:
    """Return whether the names field of a line means ``name``."""
    if names.startswith("|1|"):
        return _matches_hash(names, name)
    found = False
    for pattern in names.lower().split(","):
        negated = pattern.startswith("!")
        if _matches_pattern(pattern.removeprefix("!"), name.lower()):
            if negated:
                return False
            found = True
    return found


def _matches_pattern(pattern: str, name: str) -> bool:
    # only * and ? are wild here: brackets belong to [host]:port
    escaped = pattern.replace("[", "[[]")
    return fnmatch.fnmatchcase(name, escaped)


def _matches_hash(names: str, name: str) -> bool:
    try:
        _, _, salt, digest = names.split("|")
        made = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
        return hmac.compare_digest(made, base64.b64decode(digest))
    except (ValueError, binascii.Error):
        return False


def fingerprint(key: bytes) -> str:
    """Return ``SHA256:...`` as ssh prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


def append(path: Path, name: str, key_type: str, key: bytes) -> None:
    """Add one line under a lock, unless another process just did. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if check(read_known_hosts([str(path)]), name, key_type, key).verdict is Verdict.KNOWN:
            return
        text = file.read()
        start = b"" if not text or text.endswith(b"\n") else b"\n"
        file.write(start + f"{name} {key_type} {base64.b64encode(key).decode()}\n".encode())
