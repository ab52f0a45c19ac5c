"""What ``gpuctl init --from FILE`` reads, told apart by content, not by name.

Hostfiles (``hostfile.py``), Slurm node lists, ``sinfo`` lines (``nodes|state|``) and the Host entries
of an ssh_config. Of an ssh_config only the names are taken: everything else about a host stays there,
where ssh finds it.
"""

from __future__ import annotations

import glob
import re
from dataclasses import dataclass
from pathlib import Path

from gpuctl.config.cluster import read_text
from gpuctl.config.hostfile import HostLine, parse_hostfile
from gpuctl.core.nodeset import check_host, expand, fold
from gpuctl.errors import ConfigError

USABLE_STATES = frozenset(("idle", "mixed", "allocated"))
"""Slurm states in which a node works; a flag behind (``+drain``, ``+reserved``) takes it away."""

MAX_INCLUDES = 64
"""ssh itself stops at a depth of 16; this many files in all is a loop or a mistake."""


@dataclass(frozen=True)
class Inventory:
    """Hosts found in a file, what kind of file it was, and what was left out and why."""

    kind: str
    hosts: tuple[HostLine, ...]
    notes: tuple[str, ...] = ()


def read_inventory(text: str, name: str, folder: Path | None = None) -> Inventory:
    """Return the hosts of ``text``; ``folder`` is where an ssh_config's relative Include looks.

    Raises ConfigError with file:line when the text is none of the kinds, or a wrong one.
    """
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("#", "//"))]
    if not lines:
        raise ConfigError(f"{name} names no host", hint="give a hostfile, a Slurm node list or an ssh_config")
    if any(re.match(r"(?:version|nodes|defaults)\s*:(?:\s|$)", line) for line in lines):
        raise ConfigError(f"{name} is a cluster file already", hint=f"use it: `gpuctl status -f {name}`")
    if any(_KEYWORD.match(line) for line in lines):
        return _from_ssh_config(text, folder)
    if all(line.count("|") >= 1 for line in lines):
        return _from_sinfo(lines, name)
    if len(lines) == 1 and re.fullmatch(r"[^\s:=@]*[\[,][^\s:=@]*", lines[0]):
        return Inventory("a Slurm node list", hosts_of(expand(lines[0])))
    hostfile = parse_hostfile(text, name)
    article = "a" if hostfile.dialect == "DeepSpeed" else "an"
    return Inventory(f"{article} {hostfile.dialect} hostfile", hostfile.hosts)


def hosts_of(names: list[str]) -> tuple[HostLine, ...]:
    """Return host lines without slots; a name that comes twice is taken once."""
    return tuple(HostLine(name) for name in dict.fromkeys(names))


_KEYWORD = re.compile(r"(?:host|match|include|hostname|identityfile)(?:\s+|\s*=\s*)(?!slots\b)\S", re.I)


def _from_sinfo(lines: list[str], name: str) -> Inventory:
    names: list[str] = []
    notes: list[str] = []
    for line in lines:
        nodes, state = (field.strip() for field in line.split("|")[:2])
        if nodes.upper() == "NODELIST":
            continue
        # A trailing mark ("*" no answer, "~" powered down) makes it another state, and an unusable one.
        if state.lower() in USABLE_STATES:
            names += expand(nodes)
        else:
            notes.append(f"left out: {nodes} is {state}")
    if not names:
        raise ConfigError(
            f"{name}: no node is {', '.join(sorted(USABLE_STATES))}",
            cause="; ".join(notes),
            hint="name nodes yourself: `gpuctl init --nodelist gpu[01-04]`",
        )
    # sinfo groups by state: the order of its lines says nothing, so the short form may sort.
    return Inventory("Slurm's sinfo", hosts_of(expand(fold(names))), tuple(notes))


def _from_ssh_config(text: str, folder: Path | None) -> Inventory:
    names: dict[str, str] = {}
    jumps: set[str] = set()
    for entry in _entries(text, folder):
        jumps |= _jump_names(entry.get("proxyjump", ""))
        for pattern in _words(entry["host"]):
            if not re.search(r"[*?!]", pattern):
                names.setdefault(pattern, entry.get("user", ""))
    kept, notes = [], []
    for name, user in names.items():
        reason = _why_not(name, user, jumps)
        notes += [f"left out: {name}, {reason}"] if reason else []
        kept += [] if reason else [name]
    if not kept:
        raise ConfigError(
            "the ssh_config names no host to run on", cause="; ".join(notes) or "it has patterns only",
            hint="name them: `gpuctl init --nodelist gpu[01-04]`",
        )  # fmt: skip
    return Inventory("an ssh_config", hosts_of(kept), tuple(notes))


def _entries(text: str, folder: Path | None) -> list[dict[str, str]]:
    """Return the Host blocks, Include files in their place; the first value of a key counts, as in ssh."""
    entries: list[dict[str, str]] = []
    current: dict[str, str] = {}
    for key, value in _settings(text, folder, [MAX_INCLUDES]):
        if key in ("host", "match"):
            current = {"host": value if key == "host" else ""}
            entries.append(current)
        elif current:
            current.setdefault(key, value)
    return entries


def _settings(text: str, folder: Path | None, budget: list[int]) -> list[tuple[str, str]]:
    settings: list[tuple[str, str]] = []
    for line in text.splitlines():
        match = re.fullmatch(r"\s*(\w+)(?:\s+|\s*=\s*)(.*?)\s*", line)
        if not match:
            continue
        key, value = match[1].lower(), match[2]
        if key != "include":
            settings.append((key, value))
            continue
        for path in _included(value, folder):
            budget[0] -= 1
            if budget[0] < 0:
                raise ConfigError(
                    f"more than {MAX_INCLUDES} files are included", hint=f"look at Include {value}"
                )
            settings += _settings(read_text(path), folder, budget)
    return settings


def _included(value: str, folder: Path | None) -> list[Path]:
    found: list[Path] = []
    for word in _words(value):
        pattern = Path(word).expanduser()
        if folder is not None or pattern.is_absolute():
            pattern = (folder or Path()) / pattern
            found += sorted(Path(path) for path in glob.glob(str(pattern)))  # noqa: PTH207 (absolute)
    return [path for path in found if path.is_file()]


def _words(text: str) -> list[str]:
    return [quoted or plain for quoted, plain in re.findall(r'"([^"]*)"|(\S+)', text)]


def _jump_names(value: str) -> set[str]:
    hops = [hop.rpartition("@")[2] for hop in value.split(",") if hop and value.lower() != "none"]
    return {re.sub(r":\d+$", "", hop.removeprefix("ssh://")) for hop in hops}


def _why_not(name: str, user: str, jumps: set[str]) -> str | None:
    if user == "git":
        return "a git server (User git)"
    if name in jumps:
        return "a jump host of others"
    try:
        check_host(name)
    except ConfigError:
        return "not a host name"
    return None
