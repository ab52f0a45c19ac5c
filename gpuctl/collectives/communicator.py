"""One communicator for both vendors: a ctypes binding that libnccl and librccl share.

RCCL exports the same ``nccl...`` symbols as NCCL; the file's name and the stream's type differ, and
both are a pointer here. Only what every version of both has is bound: all_to_all, gather and scatter
are grouped sends and receives (``ncclAlltoAll`` exists from NCCL 2.28 and RCCL spells it otherwise),
``ncclCommInitRankConfig`` is left out (its struct grows with every version).

It imports no torch: buffers and streams are addresses. See :mod:`gpuctl.collectives.direct` for the
engine on tensors and for how the unique id travels.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

UNIQUE_ID_BYTES = 128

DTYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "int64": 4,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
"""nccl.h; avg from 2.10."""

RESULTS = {
    1: "a CUDA or HIP call failed",
    2: "a system call failed",
    3: "internal error of the library",
    4: "invalid argument",
    5: "invalid usage",
    6: "a peer failed or the network did",
    7: "in progress",
    8: "timed out",
}
"""More codes may come (8 did, with NCCL 2.30): unknown ones are printed as numbers."""

_LIBRARY_NAME = re.compile(r"/lib[nr]ccl\.so[^/]*\Z")


class NcclError(RuntimeError):
    """A call of the library failed; ``code`` is its ncclResult_t."""

    def __init__(self, function: str, code: int, detail: str) -> None:
        what = RESULTS.get(code, "an unknown error")
        super().__init__(f"{function}: {what} (code {code})" + (f": {detail}" if detail else ""))
        self.function = function
        self.code = code
        self.detail = detail


class _UniqueId(ctypes.Structure):
    # c_ubyte, not c_char: ctypes cuts a c_char array at its first NUL
    _fields_ = (("internal", ctypes.c_ubyte * UNIQUE_ID_BYTES),)


_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_size_t
_INT = ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (ctypes.POINTER(_INT),),
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRank": (ctypes.POINTER(_POINTER), _INT, _UniqueId, _INT),
    "ncclCommDestroy": (_POINTER,),
    "ncclCommAbort": (_POINTER,),
    "ncclCommGetAsyncError": (_POINTER, ctypes.POINTER(_INT)),
    "ncclCommCount": (_POINTER, ctypes.POINTER(_INT)),
    "ncclCommUserRank": (_POINTER, ctypes.POINTER(_INT)),
    "ncclAllReduce": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclReduce": (_POINTER, _POINTER, _SIZE, _INT, _INT, _INT, _POINTER, _POINTER),
    "ncclBroadcast": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclAllGather": (_POINTER, _POINTER, _SIZE, _INT, _POINTER, _POINTER),
    "ncclReduceScatter": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclSend": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclRecv": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
}


class Library:
    """A loaded libnccl or librccl. Calls raise :class:`NcclError` unless they return 0."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._handle = ctypes.CDLL(path)
        self._handle.ncclGetErrorString.restype = ctypes.c_char_p
        self._handle.ncclGetErrorString.argtypes = (_INT,)
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._handle, name)
            function.restype = _INT
            function.argtypes = arguments
        # From 2.13 on; an older library tells less.
        self._last_error: Callable[..., bytes | None] | None = getattr(self._handle, "ncclGetLastError", None)
        if self._last_error is not None:
            self._handle.ncclGetLastError.restype = ctypes.c_char_p
            self._handle.ncclGetLastError.argtypes = (_POINTER,)

    def call(self, name: str, *arguments: Any, comm: ctypes.c_void_p | None = None) -> None:
        """Call ``name``; ctypes releases the interpreter lock meanwhile, so other threads go on."""
        code = getattr(self._handle, name)(*arguments)
        if code != 0:
            raise NcclError(name, code, self._explain(code, comm))

    def version(self) -> str:
        """Return ``2.28.3``."""
        number = _INT()
        self.call("ncclGetVersion", ctypes.byref(number))
        return format_version(number.value)

    def unique_id(self) -> bytes:
        """Return a new id. It is a bearer secret: who has it can join the communicator."""
        made = _UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made.internal)

    def _explain(self, code: int, comm: ctypes.c_void_p | None) -> str:
        texts = [self._handle.ncclGetErrorString(code)]
        if self._last_error is not None:
            texts.append(self._last_error(comm))
        return "; ".join(text.decode(errors="replace").strip() for text in texts if text)


class Communicator:
    """This rank's end of a communicator.

    Every rank constructs it with the same ``unique_id``, and the call returns when all have. Calls
    are queued on ``stream`` (an address; 0 is the default stream). On a GPU the current device must
    be set before. ``close`` or ``abort`` ends it; garbage collection does not, because a destroy
    that waits for a dead peer would hang the interpreter at exit.
    """

    def __init__(self, library: Library, unique_id: bytes, num_ranks: int, rank: int) -> None:
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise ValueError(f"a unique id has {UNIQUE_ID_BYTES} bytes, not {len(unique_id)}")
        self.library = library
        self._comm: ctypes.c_void_p | None = ctypes.c_void_p()
        raw = _UniqueId.from_buffer_copy(unique_id)
        library.call("ncclCommInitRank", ctypes.byref(self._comm), num_ranks, raw, rank)

    def all_reduce(self, send: int, receive: int, count: int, dtype: str, op: str, stream: int) -> None:
        self._call("ncclAllReduce", send, receive, count, DTYPES[dtype], OPS[op], stream=stream)

    def reduce(
        self, send: int, receive: int, count: int, dtype: str, op: str, root: int, stream: int
    ) -> None:
        self._call("ncclReduce", send, receive, count, DTYPES[dtype], OPS[op], root, stream=stream)

    def broadcast(self, send: int, receive: int, count: int, dtype: str, root: int, stream: int) -> None:
        self._call("ncclBroadcast", send, receive, count, DTYPES[dtype], root, stream=stream)

    def all_gather(self, send: int, receive: int, send_count: int, dtype: str, stream: int) -> None:
        self._call("ncclAllGather", send, receive, send_count, DTYPES[dtype], stream=stream)

    def reduce_scatter(
        self, send: int, receive: int, receive_count: int, dtype: str, op: str, stream: int
    ) -> None:
        self._call("ncclReduceScatter", send, receive, receive_count, DTYPES[dtype], OPS[op], stream=stream)

    def send(self, buffer: int, count: int, dtype: str, peer: int, stream: int) -> None:
        self._call("ncclSend", buffer, count, DTYPES[dtype], peer, stream=stream)

    def receive(self, buffer: int, count: int, dtype: str, peer: int, stream: int) -> None:
        self._call("ncclRecv", buffer, count, DTYPES[dtype], peer, stream=stream)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Calls inside are started together: sends and receives of a group cannot deadlock.

        A group that failed inside is still ended, or the next one would be part of it.
        """
        self.library.call("ncclGroupStart")
        try:
            yield
        except BaseException:
            with contextlib.suppress(NcclError):
                self.library.call("ncclGroupEnd")
            raise
        self.library.call("ncclGroupEnd", comm=self._comm)

    def num_ranks(self) -> int:
        """Return how many ranks the library says there are."""
        return self._ask("ncclCommCount")

    def rank(self) -> int:
        """Return which rank the library says this is."""
        return self._ask("ncclCommUserRank")

    def check(self) -> None:
        """Raise :class:`NcclError` when something failed since, outside of any call."""
        code = self._ask("ncclCommGetAsyncError")
        if code not in (0, 7):
            raise NcclError("ncclCommGetAsyncError", code, self.library._explain(code, self._comm))

    def close(self) -> None:
        """Wait for what is queued and give everything back."""
        if self._comm is not None:
            comm, self._comm = self._comm, None
            self.library.call("ncclCommDestroy", comm)

    def abort(self) -> None:
        """End it now, whatever peers do; calls that wait in the library return an error."""
        if self._comm is not None:
            comm, self._comm = self._comm, None
            self.library.call("ncclCommAbort", comm)

    def _call(self, name: str, *arguments: int, stream: int) -> None:
        assert self._comm is not None, "the communicator is closed"
        self.library.call(name, *arguments, self._comm, stream, comm=self._comm)

    def _ask(self, name: str) -> int:
        assert self._comm is not None, "the communicator is closed"
        number = _INT()
        self.library.call(name, self._comm, ctypes.byref(number), comm=self._comm)
        return number.value


def format_version(number: int) -> str:
    """Return X.Y.Z of ncclGetVersion: X*10000+Y*100+Z from 2.9 on, X*1000+Y*100+Z before (2804)."""
    major, rest = divmod(number, 10000) if number >= 10000 else divmod(number, 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def find_library(path: str | None = None) -> Library:
    """Load ``path``, or the copy that this process has mapped already (torch's).

    A second copy beside torch's is a hazard, and the file that torch names may not be the one it
    loaded: the mapping is the truth. Raises OSError when there is none.
    """
    found = path or mapped_library(Path("/proc/self/maps").read_text())
    if found is None:
        raise OSError(
            "torch has mapped no libnccl or librccl (a CPU build, or linked in): name one by --library"
        )
    if path is not None and not os.access(path, os.R_OK):
        raise OSError(f"{path}: no such library")
    return Library(found)


def mapped_library(maps: str) -> str | None:
    """Return the path of the NCCL or RCCL in the text of ``/proc/PID/maps``."""
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and _LIBRARY_NAME.search(fields[5]):
            return fields[5]
    return None
