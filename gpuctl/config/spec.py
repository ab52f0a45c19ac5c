"""The shape of ``cluster.yaml`` for pydantic: which keys exist and what a value may be.

Not the cluster the rest of gpuctl sees (``core/cluster.py``): defaults are not merged here and node
sets not expanded. Validators say in one clause what is wrong; ``cluster.py`` adds file, line and key.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator

from gpuctl.core.cluster import PortRange
from gpuctl.core.nodeset import check_host
from gpuctl.errors import ConfigError

MAX_GPUS = 1024
"""Ranks on one node: far above CPX mode on eight MI300X (64), small enough for a slip to be caught."""

RESERVED_ENV = frozenset(
    {
        *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "ROLE_RANK"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "GPUCTL_RUN_ID", "GPUCTL_CHANNEL_FD"),
        *(f"TORCHELASTIC_{name}" for name in ("RUN_ID", "RESTART_COUNT", "MAX_RESTARTS", "ERROR_FILE")),
        "TORCHELASTIC_USE_AGENT_STORE",
    }
)
"""What gpuctl tells every rank itself; a value from a file would be wrong on all ranks but one."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Wider than useradd's [a-z_][a-z0-9_-]*: directory services have capitals, dots and realms.
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|PRIVATE_KEY)$", re.I)
_PORTS = re.compile(r"([1-9]\d{0,4})(?:-([1-9]\d{0,4}))?", re.ASCII)
MAX_PORT = 65535


_ABSENT: Any = None
"""The default of keys that may be absent, but may not be written without a value."""


class Strict(BaseModel):
    """No unknown keys, no conversions; values stay out of pydantic's own messages."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class Wrong(ValueError):
    """What is wrong with a value, with a hint of its own."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def check_name(value: str) -> str:
    """Return ``value`` if it can name a cluster or a run: it becomes part of file names."""
    if not _NAME.fullmatch(value) or value in (".", ".."):
        raise ValueError("a name is 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    return value


def check_user(value: str) -> str:
    """Return ``value`` if it is a login name that no shell and no ssh option can misread."""
    if not _USER.fullmatch(value):
        raise ValueError("a login name is letters, digits, '_', '.', '@' and '-', without a leading '-'")
    return value


def check_env_name(value: str) -> str:
    """Return ``value`` if it is the name of an environment variable a user may set."""
    if not _ENV_NAME.fullmatch(value):
        raise ValueError("a variable's name is letters, digits and '_', without a leading digit")
    if value in RESERVED_ENV:
        raise Wrong(f"{value} is set by gpuctl, for every rank its own", hint="remove the line")
    return value


def _env_key(value: str) -> str:
    if _SECRET_NAME.search(value):
        raise Wrong(
            f"{value} looks like a secret, and a cluster file is no place for one",
            hint=f"export it where you run gpuctl and write `env_from: [{value}]`",
        )
    return check_env_name(value)


def _env_text(value: str) -> str:
    if "\0" in value:
        raise ValueError("no environment variable can hold a NUL byte")
    return value


def _one_line(value: str) -> str:
    if not value.strip():
        raise ValueError("it is empty")
    if any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise ValueError("it has to be one line without control characters")
    return value


def _node_path(value: str) -> str:
    _one_line(value)
    if "$" in value or "`" in value:
        raise Wrong("variables are not replaced, only a leading ~ is", hint="write the path out")
    if not value.startswith(("/", "~")):
        raise ValueError("a path on the node starts with / or ~/")
    return value


def _interpreter(value: str) -> str:
    _one_line(value)
    return _node_path(value) if "/" in value or "$" in value else value


def _address(value: str) -> str:
    try:
        return check_host(value)
    except ConfigError as exc:
        raise ValueError(f"it is not a host name or an address: {exc.cause}") from exc


def _port(value: int) -> int:
    if not 1 <= value <= MAX_PORT:
        raise ValueError(f"a port is 1 to {MAX_PORT}")
    return value


def _gpus(value: Any) -> Literal["auto"] | int | tuple[int, ...]:
    if value == "auto":
        return "auto"
    if _is_int(value) and 1 <= value <= MAX_GPUS:
        return int(value)
    if isinstance(value, list) and value and all(_is_int(index) and 0 <= index < MAX_GPUS for index in value):
        if len(set(value)) < len(value):
            raise ValueError("a GPU is named twice")
        return tuple(value)
    raise ValueError(f"auto, a count (1 to {MAX_GPUS}) or a list of indices is expected")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ports(value: Any) -> PortRange:
    match = _PORTS.fullmatch(str(value)) if isinstance(value, str) or _is_int(value) else None
    if not match or max(int(match[1]), int(match[2] or match[1])) > MAX_PORT:
        raise ValueError("a range of ports is expected")
    first, last = int(match[1]), int(match[2] or match[1])
    if first >= last:
        raise ValueError("a range of ports goes up and has at least two")
    return PortRange(first, last)


def _seconds(least: float) -> Callable[[Any], float]:
    def check(value: Any) -> float:
        if not (_is_int(value) or isinstance(value, float)) or not least <= value <= 86_400:
            raise ValueError(f"a number of seconds is expected, {least:g} to 86400")
        return float(value)

    return check


class NodeKeys(Strict):
    """The keys ``defaults`` and every node have in common.

    A key that is absent is None here, but a None in the file is an error: ``user:`` with nothing
    behind it is a line somebody forgot to finish.
    """

    port: Annotated[int, AfterValidator(_port)] = _ABSENT
    user: Annotated[str, AfterValidator(check_user)] = _ABSENT
    identity_file: Annotated[str, AfterValidator(_one_line)] = _ABSENT
    transport: Literal["ssh", "openssh", "local"] = _ABSENT
    gpus: Annotated[Any, PlainValidator(_gpus)] = _ABSENT
    vendor: Literal["auto", "nvidia", "amd", "cpu"] = _ABSENT
    python: Annotated[str, AfterValidator(_interpreter)] = _ABSENT
    activate: Annotated[str, AfterValidator(_one_line)] = _ABSENT
    workdir: Annotated[str, AfterValidator(_node_path)] = _ABSENT
    state_dir: Annotated[str, AfterValidator(_node_path)] = _ABSENT
    env: dict[Annotated[str, AfterValidator(_env_key)], Annotated[str, AfterValidator(_env_text)]] = Field(
        default_factory=dict
    )
    env_from: list[Annotated[str, AfterValidator(check_env_name)]] = Field(default_factory=list)


class NodeEntry(NodeKeys):
    """One item of ``nodes``: a host or a node set, and what differs from ``defaults``."""

    host: str
    address: Annotated[str, AfterValidator(_address)] = _ABSENT


class SshKeys(Strict):
    """How far a host key is trusted."""

    host_keys: Literal["strict", "accept-new"] = "strict"


class NetworkKeys(Strict):
    """Limits on what gpuctl opens on a node."""

    ports: Annotated[Any, PlainValidator(_ports)] = None


class FailureKeys(Strict):
    """The time limits of the failure detector and of a graceful stop."""

    # A beat a second: suspicion below that would be noise.
    suspect_s: Annotated[float, PlainValidator(_seconds(1))] = 3.0
    dead_s: Annotated[float, PlainValidator(_seconds(2))] = 15.0
    grace_s: Annotated[float, PlainValidator(_seconds(0))] = 30.0


class ClusterSpec(Strict):
    """The whole file."""

    version: int = 1
    name: Annotated[str, AfterValidator(check_name)] = "cluster"
    ssh: SshKeys = SshKeys()
    defaults: NodeKeys = NodeKeys()
    nodes: list[NodeEntry]
    network: NetworkKeys = NetworkKeys()
    failure: FailureKeys = FailureKeys()
