"""The bundle: gpuctl's own node-side code, carried to the nodes and addressed by content hash.

All nodes of a run execute the same code, whatever is installed there. Nothing but the node side
travels: no command line, no pydantic, no paramiko.
"""

from __future__ import annotations

import functools
import io
import os
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import gpuctl
from gpuctl.agent.bootstrap import tree_hash_of

NODE_SIDE = ("__init__.py", "errors.py", "core", "agent", "trainer", "collectives")


@dataclass(frozen=True)
class Archive:
    """A zip and the tree hash of what it holds."""

    sha256: str
    data: bytes = field(repr=False)


@functools.cache
def node_bundle() -> Archive:
    """Return the bundle of this gpuctl (made once per process)."""
    package = Path(gpuctl.__file__).parent
    files = {f"gpuctl/{path.relative_to(package)}": path for path in _sources(package)}
    return make_archive(files)


def _sources(package: Path) -> Iterable[Path]:
    for name in NODE_SIDE:
        entry = package / name
        if entry.is_file():
            yield entry
        else:
            yield from (p for p in sorted(entry.rglob("*")) if p.is_file() and "__pycache__" not in p.parts)


def make_archive(files: dict[str, Path]) -> Archive:
    """Zip ``files`` (name in the archive -> path), keeping the executable bit."""
    buffer = io.BytesIO()
    contents: dict[str, bytes] = {}
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, path in sorted(files.items()):
            contents[name] = path.read_bytes()
            info = zipfile.ZipInfo(name)  # a fixed date: the same files give the same zip
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (0o700 if os.access(path, os.X_OK) else 0o600) << 16
            archive.writestr(info, contents[name])
    return Archive(tree_hash_of(contents), buffer.getvalue())
