"""``--sync``: the user's folder as an archive addressed by its tree hash.

In a git checkout the tracked files and the untracked ones git does not ignore; elsewhere every
file. Secrets and version control never travel; what was left out is reported, not hidden.
"""

from __future__ import annotations

import fnmatch
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpuctl.errors import ConfigError
from gpuctl.services.bundle import Archive, make_archive

DEFAULT_LIMIT_BYTES = 64 << 20
#: Never carried: version control, environments, and what usually holds a secret.
EXCLUDED_FOLDERS = frozenset({".git", ".hg", ".svn", ".venv", "venv", "__pycache__", "node_modules"})
SECRET_PATTERNS = (".env", ".env.*", "*.pem", "*.key", "id_rsa*", "id_ed25519*", "id_ecdsa*", ".netrc")
GIT_S = 30.0


@dataclass(frozen=True)
class SyncedFolder:
    """What ``--sync`` will carry, and what it leaves out (with the reason)."""

    archive: Archive
    num_files: int
    size_bytes: int
    skipped: tuple[str, ...]


def pack_folder(folder: Path, *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> SyncedFolder:
    """Pack ``folder``; raises ConfigError when it is no folder, empty, or larger than the limit."""
    if not folder.is_dir():
        raise ConfigError(f"--sync: {folder} is not a folder")
    files: dict[str, Path] = {}
    skipped: list[str] = []
    for name in _git_files(folder) or _walk(folder):
        reason = _reason_to_skip(folder, name)
        if reason is None:
            files[name] = folder / name
        elif reason:
            skipped.append(f"{name} ({reason})")
    size = sum(path.stat().st_size for path in files.values())
    if not files:
        raise ConfigError(f"--sync: {folder} has no files to carry")
    if size > limit_bytes:
        raise ConfigError(
            f"--sync: {folder} holds {size >> 20} MiB, the limit is {limit_bytes >> 20} MiB",
            cause=_largest(files),
            hint="ignore what the ranks do not need in .gitignore, or raise the limit with --sync-limit",
        )
    return SyncedFolder(make_archive(files), len(files), size, tuple(skipped))


def _git_files(folder: Path) -> list[str] | None:
    """Return tracked and unignored names below ``folder``, or None outside a checkout."""
    command = ["git", "-C", str(folder), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=GIT_S, check=False, stdin=subprocess.DEVNULL
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    # a tracked file may have been deleted, and one in conflict is listed once for each side
    names = dict.fromkeys(os.fsdecode(name) for name in done.stdout.split(b"\0") if name)
    return [name for name in names if os.path.lexists(folder / name)]


def _walk(folder: Path) -> Iterable[str]:
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in EXCLUDED_FOLDERS)
        for name in sorted(names):
            yield str(Path(where, name).relative_to(folder))


def _reason_to_skip(folder: Path, name: str) -> str | None:
    """Return why a file stays behind; "" when that is not worth a word, None when it travels."""
    path = folder / name
    parts = Path(name).parts
    if any(part in EXCLUDED_FOLDERS for part in parts[:-1]):
        return ""
    if any(fnmatch.fnmatch(parts[-1], pattern) for pattern in SECRET_PATTERNS):
        return "may hold a secret"
    if path.is_symlink():
        return "a link"
    return None if path.is_file() else "no regular file"


def _largest(files: dict[str, Path]) -> str:
    ordered = sorted(files, key=lambda name: files[name].stat().st_size, reverse=True)
    return "largest: " + ", ".join(f"{name} ({files[name].stat().st_size >> 20} MiB)" for name in ordered[:3])
