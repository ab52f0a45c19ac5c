"""Frozen dataclasses to JSON values and back.

One codec for every contract, so that a Plan, a NodeFacts or a RunRecord means the same in a
file, in a frame and in ``--json``. Unknown keys are ignored on the way in (a client one
version older or newer can still read), missing keys take the field's default.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Return ``value`` as JSON-compatible dicts, lists and scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_json(item) for item in value]
    return value


def from_json(cls: type[T], data: Any) -> T:
    """Build a ``cls`` from what :func:`to_json` made.

    Raises ValueError when a required key is missing or a value has the wrong shape.
    """
    return typing.cast(T, _decode(cls, data, cls.__name__))


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode(hint: Any, data: Any, where: str) -> Any:
    if hint is Any or hint is object:
        return data
    origin = typing.get_origin(hint)
    if origin is typing.Union or origin is types.UnionType:
        return _decode_union(typing.get_args(hint), data, where)
    if origin is typing.Literal:
        if data not in typing.get_args(hint):
            raise ValueError(f"{where}: {data!r} is not one of {typing.get_args(hint)}")
        return data
    if origin in (tuple, list):
        return _decode_sequence(origin, typing.get_args(hint), data, where)
    if origin is dict or hint is dict:
        return _decode_dict(typing.get_args(hint), data, where)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _decode_dataclass(hint, data, where)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(data)
    return _decode_scalar(hint, data, where)


def _decode_union(options: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in options:
        return None
    problems = []
    for option in options:
        if option is type(None):
            continue
        try:
            return _decode(option, data, where)
        except ValueError as exc:
            problems.append(str(exc))
    raise ValueError(problems[0] if problems else f"{where}: {data!r}")


def _decode_sequence(origin: Any, args: tuple[Any, ...], data: Any, where: str) -> Any:
    if not isinstance(data, (list, tuple)):
        raise ValueError(f"{where}: a list was expected, not {type(data).__name__}")
    if origin is tuple and args and args[-1] is not Ellipsis:
        if len(data) != len(args):
            raise ValueError(f"{where}: {len(args)} items were expected, not {len(data)}")
        return tuple(_decode(a, d, f"{where}[{i}]") for i, (a, d) in enumerate(zip(args, data, strict=True)))
    item = args[0] if args else Any
    return origin(_decode(item, d, f"{where}[{i}]") for i, d in enumerate(data))


def _decode_dict(args: tuple[Any, ...], data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: a mapping was expected, not {type(data).__name__}")
    value_hint = args[1] if args else Any
    return {key: _decode(value_hint, item, f"{where}.{key}") for key, item in data.items()}


def _decode_dataclass(cls: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: a mapping was expected, not {type(data).__name__}")
    hints = _hints(cls)
    values = {}
    for field in dataclasses.fields(cls):
        if field.name in data:
            values[field.name] = _decode(hints[field.name], data[field.name], f"{where}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}: {field.name} is missing")
    return cls(**values)


def _decode_scalar(hint: Any, data: Any, where: str) -> Any:
    if hint is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if hint is int and isinstance(data, bool):
        raise ValueError(f"{where}: an int was expected, not bool")
    if isinstance(hint, type) and not isinstance(data, hint):
        raise ValueError(f"{where}: {hint.__name__} was expected, not {type(data).__name__}")
    return data
