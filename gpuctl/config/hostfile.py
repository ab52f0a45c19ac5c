"""Hostfiles of other launchers: DeepSpeed, Open MPI (PRRTE) and MPICH, and what ``-H`` takes.

The dialects disagree on the same text: DeepSpeed refuses a line without slots and a host that comes
twice, Open MPI reads one slot and adds the duplicates up. Which one a file was read as is said in
every error. ``-H h1:8,h2`` is Horovod's and mpirun's list of hosts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gpuctl.config.cluster import STDIN, read_text
from gpuctl.config.spec import MAX_GPUS, MAX_PORT, check_user
from gpuctl.core.cluster import Cluster, NodeSpec
from gpuctl.core.nodeset import MAX_NODES, expand, fold
from gpuctl.errors import ConfigError

Dialect = Literal["DeepSpeed", "Open MPI", "MPICH", "list"]

LOOPBACK = frozenset(("localhost", "127.0.0.1", "::1"))
"""Alone in a hostfile these mean this machine: DeepSpeed and mpirun use no ssh for it either."""


@dataclass(frozen=True)
class HostLine:
    """One host of a hostfile. ``slots`` is None where the text does not say."""

    host: str
    slots: int | None = None
    user: str | None = None
    port: int | None = None
    max_slots: int | None = None
    line: int = 0


@dataclass(frozen=True)
class Hostfile:
    """What a hostfile says, and whose rules it was read by."""

    hosts: tuple[HostLine, ...]
    dialect: Dialect
    name: str = ""


def load_hostfile(text: str) -> Cluster:
    """Return the cluster of ``-H TEXT``: the path of a hostfile, ``-``, or a list ``h1:2,h2``."""
    path = Path(text)
    if "/" in text or path == STDIN or path.is_file():
        return cluster_of(parse_hostfile(read_text(path), "<stdin>" if path == STDIN else text))
    return cluster_of(parse_host_list(text))


def cluster_of(hostfile: Hostfile, name: str = "hostfile") -> Cluster:
    """Return the cluster that a hostfile describes: slots are a node's ranks."""
    is_local = len(hostfile.hosts) == 1 and hostfile.hosts[0].host in LOOPBACK
    nodes = tuple(
        NodeSpec(
            host.host,
            port=host.port,
            user=host.user,
            gpus=host.slots or "auto",
            transport="local" if is_local else "ssh",
            origin=f"{hostfile.name}:{host.line}" if host.line else hostfile.name,
        )
        for host in hostfile.hosts
    )
    return Cluster(name, nodes, origin=hostfile.name)


def parse_hostfile(text: str, name: str) -> Hostfile:
    """Parse the text of a hostfile; raises ConfigError with the line and the dialect."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
    lines = [(n, line) for n, line in lines if line and not line.startswith(("#", "//"))]
    if not lines:
        raise ConfigError(f"{name} names no host", hint="a line is `gpu01 slots=8`")
    dialect = _dialect(text, [line for _, line in lines])
    found: dict[str, HostLine] = {}
    for number, line in lines:
        where = f"{name}:{number}"
        for host in _parse_line(re.split(r"\s+[#;]", line)[0], number, where, dialect):
            if len(found) >= MAX_NODES:
                raise ConfigError(f"{where}: more than {MAX_NODES:,} hosts", hint="check the ranges")
            found[host.host] = _join(found.get(host.host), host, where, dialect)
    return Hostfile(tuple(found.values()), dialect, name)


def parse_host_list(text: str, name: str = "-H") -> Hostfile:
    """Parse ``h1:2,gpu[01-04]:8,h3``; no slots means every GPU the host has."""
    found: dict[str, HostLine] = {}
    for item in re.split(r",(?![^\[]*\])", text):
        for host in _parse_host(item.strip(), name, "list"):
            if len(found) >= MAX_NODES:
                raise ConfigError(f"{name}: more than {MAX_NODES:,} hosts", hint="check the ranges")
            found[host.host] = _join(found.get(host.host), host, name, "list")
    return Hostfile(tuple(found.values()), "list", name)


def _dialect(text: str, lines: list[str]) -> Dialect:
    """Tell the dialect by what only it has; what is left is DeepSpeed's, the strictest."""
    if re.search(r"^\s*//|\bmax[_-]slots\s*=|\b(?:port|user|username)\s*=", text, re.M):
        return "Open MPI"
    if any(re.match(r"[^\s=]+@", line) for line in lines):
        return "Open MPI"
    if all(re.fullmatch(r"[^\s:=]+:\d+(?:\s.*)?", line) for line in lines):
        return "MPICH"
    return "DeepSpeed"


def _parse_line(line: str, number: int, where: str, dialect: Dialect) -> list[HostLine]:
    first, *settings = re.sub(r"\s*=\s*", "=", line).split()
    values = _settings(settings, where, dialect)
    hosts = _parse_host(first, where, dialect)
    slots = values.get("slots", hosts[0].slots)
    if slots is None and dialect == "DeepSpeed":
        raise ConfigError(
            f"{where}: {first!r} has no slots (read as a DeepSpeed hostfile)",
            hint=f"write `{first} slots=8`; a plain list of hosts goes to `gpuctl init --nodelist`",
        )
    return [
        replace(
            host,
            slots=1 if slots is None else slots,
            port=values.get("port"),
            max_slots=values.get("max_slots"),
            line=number,
        )
        for host in hosts
    ]


def _settings(words: list[str], where: str, dialect: Dialect) -> dict[str, int]:
    values: dict[str, int] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = {"max-slots": "max_slots", "count": "slots", "cpu": "slots"}.get(key, key)
        if not equals or key not in _LIMITS:
            raise ConfigError(
                f"{where}: {word!r} is not understood (read as {_called(dialect)})",
                hint="a line is one host, then slots=N: `gpu01 slots=8`",
            )
        if not re.fullmatch(r"[1-9]\d{0,5}", value, re.ASCII) or int(value) > _LIMITS[key]:
            raise ConfigError(
                f"{where}: {word!r}: a number from 1 to {_LIMITS[key]} is expected", hint=f"write `{key}=8`"
            )
        values[key] = int(value)
    return values


_LIMITS = {"slots": MAX_GPUS, "max_slots": 999_999, "port": MAX_PORT}


def _parse_host(text: str, where: str, dialect: Dialect) -> list[HostLine]:
    """Parse ``[user@]host[:slots]``; an IPv6 address with slots stands in brackets."""
    user, at, rest = text.rpartition("@")
    match = re.fullmatch(r"([^:]+|.*\][^:]*):([1-9]\d{0,3})", rest, re.ASCII)
    names, slots = (match[1], match[2]) if match else (rest, None)
    try:
        hosts = expand(names)
        if at:
            check_user(user)
    except ConfigError as exc:
        raise ConfigError(
            f"{where}: {exc.message} (read as {_called(dialect)})", cause=exc.cause, hint=exc.hint
        ) from None
    except ValueError as exc:
        raise ConfigError(f"{where}: {user!r}: {exc}", hint="write user@host") from None
    if slots and int(slots) > MAX_GPUS:
        raise ConfigError(f"{where}: {slots} slots on {fold(hosts)}", hint=f"at most {MAX_GPUS} are possible")
    return [HostLine(host, int(slots) if slots else None, user or None) for host in hosts]


def _join(known: HostLine | None, host: HostLine, where: str, dialect: Dialect) -> HostLine:
    if known is None:
        return host
    if dialect in ("Open MPI", "list"):  # mpirun -H a,a is two slots on a
        return replace(known, slots=(known.slots or 1) + (host.slots or 1))
    raise ConfigError(
        f"{where}: host {host.host} is there already"
        + (f", in line {known.line}" if known.line else "")
        + f" (read as {_called(dialect)})",
        hint="remove one line; only Open MPI adds the slots of duplicates up",
    )


def _called(dialect: Dialect) -> str:
    article = "a" if dialect == "DeepSpeed" else "an"
    return "a list of hosts" if dialect == "list" else f"{article} {dialect} hostfile"
