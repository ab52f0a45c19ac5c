"""What pydantic found wrong, in the words of a cluster file: file:line, key, what to write instead.

The values of ``env`` are never repeated: one of them may be a secret.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from gpuctl.config.spec import ClusterSpec, FailureKeys, NetworkKeys, NodeEntry, NodeKeys, SshKeys
from gpuctl.config.yaml_loader import Document, Path
from gpuctl.errors import ConfigError

# What the same thing is called elsewhere: Ansible, hostfiles, SkyPilot, ssh_config.
FOREIGN_KEYS = {
    "hosts": "nodes", "machines": "nodes", "hostname": "host", "ip": "address", "ip_address": "address",
    "slots": "gpus", "num_gpus": "gpus", "gpu": "gpus", "nproc_per_node": "gpus",
    "username": "user", "ssh_key": "identity_file", "key": "identity_file", "identityfile": "identity_file",
    "ssh_private_key": "identity_file", "environment": "env", "envs": "env", "interpreter": "python",
    "cwd": "workdir", "venv": "activate", "proxy_jump": "", "proxyjump": "", "proxy_command": "",
}  # fmt: skip

EXAMPLES = {
    "version": "version: 1", "name": "name: lab", "nodes": "- host: gpu[01-04]", "host": "- host: gpu[01-04]",
    "address": "address: 10.0.3.7", "port": "port: 2222", "user": "user: ubuntu",
    "identity_file": "identity_file: ~/.ssh/id_ed25519", "transport": "transport: ssh",
    "gpus": "gpus: 8", "vendor": "vendor: auto",
    "python": "python: ~/venv/bin/python", "activate": "activate: . ~/.profile", "workdir": "workdir: ~/work",
    "state_dir": "state_dir: /var/tmp", "env": "env: {NCCL_DEBUG: WARN}", "env_from": "env_from: [HF_TOKEN]",
    "ssh": "ssh: {host_keys: strict}", "host_keys": "host_keys: strict",
    "defaults": "defaults: {user: ubuntu}",
    "network": "network: {ports: 29400-29500}", "ports": "ports: 29400-29500",
    "failure": "failure: {suspect_s: 3, dead_s: 15, grace_s: 30}", "suspect_s": "suspect_s: 3",
    "dead_s": "dead_s: 15", "grace_s": "grace_s: 30",
}  # fmt: skip

Models = Mapping[str, type[BaseModel]]
_MODELS: Models = {
    "ssh": SshKeys,
    "defaults": NodeKeys,
    "nodes": NodeEntry,
    "network": NetworkKeys,
    "failure": FailureKeys,
}


def spec_error(exc: ValidationError, document: Document) -> ConfigError:
    """Return the error for the first wrong line; the other ones are counted and named by line."""
    # A key that is missing is most often one that is there under a wrong name: that is said first.
    errors = sorted(
        exc.errors(include_url=False),
        key=lambda error: (error["type"] == "missing", document.line(_document_path(error["loc"], document))),
    )
    lines = {document.line(_document_path(error["loc"], document)) for error in errors}
    path = _document_path(errors[0]["loc"], document)
    message, hint = _words(errors[0], path, document)
    return ConfigError(
        f"{document.where(path)}: {message}",
        cause=_other_lines(sorted(lines - {document.line(path)})),
        hint=hint or _example(path),
    )


def _other_lines(lines: list[int]) -> str | None:
    if not lines:
        return None
    if len(lines) == 1:
        return f"line {lines[0]} is wrong too"
    shown = ", ".join(str(line) for line in lines[:8])
    more = f" and {len(lines) - 8} more" if len(lines) > 8 else ""
    return f"lines {shown}{more} are wrong too"


def _example(path: Path) -> str | None:
    key = next((step for step in reversed(path) if isinstance(step, str) and step in EXAMPLES), None)
    return f"write `{EXAMPLES[key]}`" if key else None


def _document_path(loc: Path, document: Document) -> Path:
    """Drop what pydantic adds to a location (union branches, ``[key]``)."""
    path: Path = ()
    for step in loc:
        if (*path, step) not in document.lines:
            break
        path = (*path, step)
    return path


def _words(error: Any, path: Path, document: Document) -> tuple[str, str | None]:
    kind, given = error["type"], error["input"]
    key = ".".join(_printable(step) for step in path if isinstance(step, str) and step != "nodes") or "nodes"
    if kind == "extra_forbidden":
        return _unknown_key(path)
    if kind == "missing":
        missing = str(error["loc"][-1])
        return f"{missing} is missing", f"add `{EXAMPLES[missing]}`"
    if given is None:
        return f"{key} has no value", "give it one or remove the line; a lone ~ is YAML's word for nothing"
    if kind == "literal_error":
        return _not_one_of(key, given, error["ctx"]["expected"])
    if kind == "value_error":
        wrong = error["ctx"]["error"]
        return f"{key}: {_shown(path, given)}{wrong}", getattr(wrong, "hint", None)
    text = document.texts.get(path, given)
    expected = _EXPECTED.get(kind, error["msg"])
    shown = "" if "env" in path else f", not {_kind_of(given, text)}"
    hint = f"quote it: '{text}'" if kind == "string_type" and isinstance(given, (bool, int, float)) else None
    return f"{key}: {expected}{shown}", hint


_EXPECTED = {
    "string_type": "text is expected",
    "int_type": "a whole number is expected",
    "list_type": "a list is expected",
    "dict_type": "keys and values are expected",
    "model_type": "keys and values are expected",
    "model_attributes_type": "keys and values are expected",
}


def _unknown_key(path: Path) -> tuple[str, str | None]:
    key = str(path[-1])
    model = _MODELS.get(str(path[0]), ClusterSpec) if len(path) > 1 else ClusterSpec
    known = list(model.model_fields)
    message = f"unknown key {_cut(repr(key))}"
    if FOREIGN_KEYS.get(key.lower()) == "":
        return message, "write it into ~/.ssh/config: gpuctl connects as `ssh HOST` does"
    close = difflib.get_close_matches(key.lower(), known, n=1) or [FOREIGN_KEYS.get(key.lower(), "")]
    if close[0] in known:
        return message, f"did you mean {close[0]!r}?"
    place = next((name for name, other in _MODELS.items() if key in other.model_fields), None)
    if place:
        return message, f"{_cut(repr(key))} belongs under `{place}:`"
    return message, f"known here: {', '.join(known)}"


def _not_one_of(key: str, given: Any, expected: str) -> tuple[str, str | None]:
    choices = expected.replace("'", "").replace(" or ", ", ").split(", ")
    close = difflib.get_close_matches(str(given).lower(), choices, n=1)
    return (
        f"{key}: {given!r} is not one of {', '.join(choices)}",
        f"did you mean {close[0]!r}?" if close else None,
    )


def _shown(path: Path, given: Any) -> str:
    if "env" in path or isinstance(given, (dict, list)):
        return ""
    return f"{_cut(repr(given))}: "


def _kind_of(given: Any, text: Any) -> str:
    if isinstance(given, dict):
        return "keys and values"
    if isinstance(given, list):
        return "a list"
    return _cut(repr(given) if isinstance(given, str) else str(text))


def _printable(step: str) -> str:
    """Return a key as it is, or quoted when it could play tricks on a terminal."""
    return step if step.isascii() and step.isprintable() and len(step) <= 60 else _cut(repr(step))


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
