"""What --sync carries and leaves behind; the default text and its hash."""

from __future__ import annotations

import hashlib
import io
import subprocess
import zipfile
from pathlib import Path

import pytest

from gpuctl.agent.bootstrap import install_tree, is_intact, tree_hash
from gpuctl.errors import ConfigError
from gpuctl.services.data import default_text, read_data
from gpuctl.services.sync import pack_folder


def test_a_checkout_gives_tracked_and_unignored_files_but_no_secrets(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for name in ("train.py", "new.py", "ignored.log", ".env", "key.pem"):
        (tmp_path / name).write_text(name)
    (tmp_path / ".gitignore").write_text("*.log\n")
    subprocess.run(["git", "-C", str(tmp_path), "add", "train.py"], check=True)
    packed = pack_folder(tmp_path)
    names = zipfile.ZipFile(io.BytesIO(packed.archive.data)).namelist()
    assert sorted(names) == [".gitignore", "new.py", "train.py"]
    assert {text.split()[0] for text in packed.skipped} == {".env", "key.pem"}


def test_a_folder_over_the_limit_names_its_largest_files(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"0" * (3 << 20))
    with pytest.raises(ConfigError) as caught:
        pack_folder(tmp_path, limit_bytes=1 << 20)
    assert "weights.bin (3 MiB)" in str(caught.value.cause)


def test_an_archive_arrives_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from/a.py").write_text("x = 1\n")
    archive = pack_folder(tmp_path / "from").archive
    target = tmp_path / "to" / archive.sha256
    target.parent.mkdir()
    with pytest.raises(ValueError):
        install_tree(archive.data, "0" * 64, str(target))
    assert list(target.parent.iterdir()) == []
    install_tree(archive.data, archive.sha256, str(target))
    assert is_intact(str(target), archive.sha256)
    (target / "a.py").write_text("x = 2\n")
    assert not is_intact(str(target), archive.sha256)


def test_a_member_that_would_leave_the_folder_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("../evil.py", "x")
    with pytest.raises(ValueError):
        install_tree(buffer.getvalue(), "0" * 64, str(tmp_path / "tree"))
    assert not (tmp_path / "evil.py").exists()


def test_byte_code_does_not_change_a_trees_hash(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = tree_hash(str(tmp_path))
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__/a.pyc").write_bytes(b"1")
    assert tree_hash(str(tmp_path)) == before


def test_the_default_text_is_made_once_and_hashed(tmp_path: Path) -> None:
    first = default_text(tmp_path)
    assert len(first.archive.data) > 1 << 20
    assert hashlib.sha256(first.archive.data).hexdigest() == first.archive.sha256
    assert default_text(tmp_path) == first


def test_data_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read_data(tmp_path / "nothing")
