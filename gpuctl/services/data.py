"""Training data on the client: the default text is made here once, any file is hashed and pushed.

Default: the source of this Python's standard library as bytes, real text that every machine has. It
is made on the client and not on the nodes: two builds of the same Python version differ.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpuctl.errors import ConfigError
from gpuctl.services.bundle import Archive

DEFAULT_TEXT_BYTES = 16 << 20
#: A file over this is not pushed: it belongs on the nodes, where ``data.path`` can name it.
PUSH_LIMIT_BYTES = 2 << 30
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class DataFile:
    """A data file of the client, addressed by its hash."""

    path: Path
    archive: Archive


def default_text(cache: Path) -> DataFile:
    """Return the default text, made on first use below ``cache``.

    Raises ConfigError when this Python came without its standard library's source.
    """
    version = ".".join(map(str, sys.version_info[:3]))
    path = cache / "data" / f"stdlib-{version}.txt"
    if not path.is_file():
        text = b"".join(_sources())[:DEFAULT_TEXT_BYTES]
        if len(text) < 1 << 20:
            raise ConfigError(
                "this Python has no standard library source to train on",
                hint="name a text with `--set data.path=FILE`",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_bytes(text)
        scratch.replace(path)
    return read_data(path)


def read_data(path: Path) -> DataFile:
    """Return the file at ``path`` with its hash; raises ConfigError when it cannot be read or is empty."""
    try:
        size = path.stat().st_size
        if size > PUSH_LIMIT_BYTES:
            raise ConfigError(
                f"{path} has {size >> 20} MiB, {PUSH_LIMIT_BYTES >> 20} MiB are pushed at most",
                hint="train on a part of it",
            )
        data = path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"cannot read the training data {path}", cause=exc.strerror) from exc
    if not data:
        raise ConfigError(f"the training data {path} is empty")
    return DataFile(path, Archive(hashlib.sha256(data).hexdigest(), data))


def _sources() -> Iterable[bytes]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS)
        for name in sorted(names):
            if name.endswith(".py"):
                yield Path(folder, name).read_bytes()
