"""A training config: the YAML of ``--config``, with ``--set key=value`` on top.

Every field of ``core/training.py`` can be reached by both, under its own name (``optim.lr``). A
preset fills ``model``; keys of ``model`` change it one by one.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gpuctl.config import yaml_loader
from gpuctl.config.cluster import read_text
from gpuctl.config.yaml_loader import Document, load_document, resolve_scalar
from gpuctl.core.training import PRESETS, ModelConfig, TrainingConfig
from gpuctl.errors import ConfigError

AT_LEAST_ONE = frozenset(
    {
        *("steps", "seq_len", "global_batch", "micro_batch"),
        *("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim"),
    }
)
"""Counts: zero of them trains nothing."""


def load_training(
    path: Path | None = None, *, settings: Sequence[str] = (), text: str | None = None
) -> TrainingConfig:
    """Return the config of ``path`` (``-``: stdin) with ``settings`` (``optim.lr=1e-3``) on top, in order.

    Without a path: the defaults and the settings. Raises ConfigError with file:line or the setting.
    """
    document = Document({}, "the defaults")
    if path is not None or text is not None:
        name = str(path) if path is not None else "training config"
        document = load_document(read_text(path) if text is None and path else text or "", name)
    tree = document.value if document.value is not None else {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{document.name}: not a training config", hint="write keys: `steps: 100`")
    _check_keys(tree, TrainingConfig, (), document)
    origins: dict[yaml_loader.Path, str] = {}
    for setting in settings:
        origins[_apply(tree, setting)] = f"--set {setting}"
    return _build(tree, document, origins)


def _apply(tree: dict[str, Any], setting: str) -> yaml_loader.Path:
    """Put one ``key=value`` into the tree and return its path."""
    key, equals, value = setting.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(f"--set {setting}: not key=value", hint="write --set optim.lr=1e-3")
    cls: Any = TrainingConfig
    holder = tree
    for step, name in enumerate(path):
        fields = _fields(cls)
        if fields and name not in fields:
            raise ConfigError(f"--set {setting}: unknown key {name!r}", hint=_did_you_mean(name, fields))
        if not fields and typing.get_origin(cls) is not dict:
            raise ConfigError(
                f"--set {setting}: {path[step - 1]!r} has no keys below it",
                hint=f"write --set {'.'.join(path[:step])}={value}",
            )
        cls = fields.get(name, str)
        if step < len(path) - 1:
            inner = holder.setdefault(name, {})
            if not isinstance(inner, dict):
                raise ConfigError(
                    f"--set {setting}: {name!r} has no keys below it", hint="an earlier --set made it a value"
                )
            holder = inner
    holder[path[-1]] = value if cls is str else resolve_scalar(value)
    return path


def _check_keys(tree: Mapping[str, Any], cls: Any, path: yaml_loader.Path, document: Document) -> None:
    fields = _fields(cls)
    for key, value in tree.items():
        here = (*path, key)
        if key not in fields:
            raise ConfigError(f"{document.where(here)}: unknown key {key!r}", hint=_did_you_mean(key, fields))
        if isinstance(value, dict) and dataclasses.is_dataclass(fields[key]):
            _check_keys(value, fields[key], here, document)


def _fields(cls: Any) -> dict[str, Any]:
    """Return field name -> type of a dataclass; {} of everything else (a dict takes any key)."""
    if not dataclasses.is_dataclass(cls) or not isinstance(cls, type):
        return {}
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _did_you_mean(name: str, fields: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, fields, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(fields)}"


def _build(tree: dict[str, Any], document: Document, origins: Mapping[Any, str]) -> TrainingConfig:
    preset = tree.get("preset", "tiny")
    if preset is not None and preset not in PRESETS:
        close = difflib.get_close_matches(str(preset), PRESETS, n=1)
        raise ConfigError(
            f"{_where(('preset',), document, origins)}: there is no model {preset!r}",
            hint=f"did you mean {close[0]!r}?" if close else f"there are {', '.join(PRESETS)}",
        )
    base = PRESETS[preset] if preset is not None else ModelConfig()
    given = tree.get("model", {})
    model = {**dataclasses.asdict(base), **given} if isinstance(given, dict) else given
    value = {**tree, "model": model, "preset": preset if model == dataclasses.asdict(base) else None}
    try:
        # JSON, because pydantic's strict mode takes a dataclass from JSON but not from a dict.
        config = TypeAdapter(TrainingConfig).validate_json(json.dumps(value), strict=True)
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
        raise _value_error(tuple(error["loc"]), error["msg"], document, origins) from None
    _check_counts(config, (), document, origins)
    return config


def _check_counts(part: Any, path: yaml_loader.Path, document: Document, origins: Mapping[Any, str]) -> None:
    for name in _fields(type(part)):
        value = getattr(part, name)
        if name in AT_LEAST_ONE and value < 1:
            raise _value_error((*path, name), f"{value} is not a count", document, origins)
        _check_counts(value, (*path, name), document, origins)


def _value_error(
    path: yaml_loader.Path, message: str, document: Document, origins: Mapping[Any, str]
) -> ConfigError:
    key = ".".join(str(step) for step in path)
    return ConfigError(
        f"{_where(path, document, origins)}: {key}: {message[:1].lower()}{message[1:]}",
        hint=_example(path),
    )


def _example(path: yaml_loader.Path) -> str | None:
    value: Any = TrainingConfig()
    for step in path:
        value = getattr(value, str(step), None)
    if not path or value is None or dataclasses.is_dataclass(value):
        return None
    return f"for example {'.'.join(str(step) for step in path)}={value}"


def _where(path: yaml_loader.Path, document: Document, origins: Mapping[Any, str]) -> str:
    setting = next((origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in origins), None)
    return setting or document.where(path)
