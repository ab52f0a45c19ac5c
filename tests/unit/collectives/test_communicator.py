"""The binding by itself: which file, which version, and errors with names."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuctl.collectives.communicator import Communicator, Library, NcclError, format_version, mapped_library
from tests.distributed.standin import build_standin

MAPS = """\
55d0-55d1 r--p 00000000 08:01 1 /usr/bin/python3.11
7f00-7f01 r-xp 00000000 08:01 2 /venv/lib/python3.11/site-packages/torch/lib/libtorch_cuda.so
7f02-7f03 r-xp 00000000 08:01 3 {path}
7f04-7f05 rw-p 00000000 00:00 0
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(build_standin(tmp_path_factory.mktemp("standin")))


@pytest.mark.parametrize(
    "path",
    [
        "/venv/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2",
        "/opt/rocm/lib/librccl.so.1.0.60300",
        "/home/me/a b/torch/lib/librccl.so",
    ],
)
def test_the_copy_that_torch_mapped_is_the_one(path: str) -> None:
    assert mapped_library(MAPS.format(path=path)) == path


@pytest.mark.parametrize("path", ["/usr/lib/libnccl-net.so", "/usr/lib/librccl-anp.so", "/x/mylibnccl.so"])
def test_a_plugin_is_not_the_library(path: str) -> None:
    assert mapped_library(MAPS.format(path=path)) is None


@pytest.mark.parametrize(("number", "text"), [(2804, "2.8.4"), (20903, "2.9.3"), (22803, "2.28.3")])
def test_the_two_ways_of_counting_versions(number: int, text: str) -> None:
    assert format_version(number) == text


def test_an_id_is_used_whole(library: Library) -> None:
    first, second = library.unique_id(), library.unique_id()
    assert len(first) == 128
    assert first != second
    # The stand-in has bytes after a NUL in it and refuses an id without them.
    comm = Communicator(library, first, 1, 0)
    assert (comm.num_ranks(), comm.rank()) == (1, 0)
    comm.check()
    comm.close()
    comm.close()


def test_an_id_of_another_length_is_refused(library: Library) -> None:
    with pytest.raises(ValueError, match="128 bytes, not 5"):
        Communicator(library, b"short", 1, 0)


def test_an_error_has_the_function_the_code_and_the_librarys_words(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_FAIL", "ncclGetUniqueId:2")
    with pytest.raises(NcclError) as raised:
        library.unique_id()
    assert str(raised.value) == (
        "ncclGetUniqueId: a system call failed (code 2): stand-in error; ncclGetUniqueId was told to fail"
    )


def test_a_code_nobody_has_heard_of_is_an_error_like_any_other() -> None:
    assert str(NcclError("ncclSend", 99, "")) == "ncclSend: an unknown error (code 99)"


def test_a_library_older_than_its_last_error_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Library(build_standin(tmp_path, "-DNO_LAST_ERROR"))
    monkeypatch.setenv("STANDIN_FAIL", "ncclGetUniqueId:3")
    with pytest.raises(NcclError, match=r"internal error of the library \(code 3\): stand-in error"):
        old.unique_id()


def test_a_group_that_failed_inside_is_ended(library: Library) -> None:
    comm = Communicator(library, library.unique_id(), 1, 0)
    with pytest.raises(RuntimeError, match="ours"), comm.group():
        raise RuntimeError("ours")
    # Inside a group the stand-in would refuse this.
    comm.all_reduce(0, 0, 0, "float32", "sum", 0)
    comm.abort()
