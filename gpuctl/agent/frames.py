"""Frames: the one protocol between client, agents and ranks.

A frame is a big-endian u32 header length, a JSON header, then ``payload_len`` raw bytes. The
header holds ``type``, ``generation``, ``payload_len`` and the fields of that type. Unknown types
are ignored by every reader, so that a peer one version newer or older can still be talked to.

Types: hello, secrets, arm, armed, refused, start, started, beat, event, log, exit, stop, kill,
swept, status, read_log, get_blob, put_blob, save, saved, commit, comm_id, stacks, ping.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gpuctl.errors import ProtocolError

PROTOCOL = 1
MAX_HEADER_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 4 << 20
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True)
class Frame:
    """One message. ``fields`` is JSON, ``payload`` raw bytes (logs, bundles, checkpoint parts)."""

    type: str
    fields: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""
    generation: int = 0

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, or ``default``."""
        return self.fields.get(name, default)


def encode(frame: Frame) -> bytes:
    """Return the bytes of ``frame``; asserts that it respects the caps."""
    header = {
        **frame.fields,
        "type": frame.type,
        "generation": frame.generation,
        "payload_len": len(frame.payload),
    }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    assert len(text) <= MAX_HEADER_BYTES, f"{frame.type}: a header of {len(text)} bytes"
    assert len(frame.payload) <= MAX_PAYLOAD_BYTES, f"{frame.type}: a payload of {len(frame.payload)} bytes"
    return _LENGTH.pack(len(text)) + text + frame.payload


class Decoder:
    """Bytes in, frames out; raises ProtocolError on anything that is no frame.

    Memory is bounded by one header and one payload, whatever the peer sends.
    """

    def __init__(self, *, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._buffer = bytearray()
        self._max_payload_bytes = max_payload_bytes
        self._header: dict[str, Any] | None = None
        self._wanted = _LENGTH.size

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that has not ended yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add ``data`` and yield every frame that is complete now."""
        self._buffer += data
        while len(self._buffer) >= self._wanted:
            frame = self._advance()
            if frame is not None:
                yield frame

    def _advance(self) -> Frame | None:
        """Take one step over the buffer: a header becomes known, or a frame is complete."""
        if self._header is None:
            size = _LENGTH.unpack_from(self._buffer)[0]
            if not 2 <= size <= MAX_HEADER_BYTES:
                raise ProtocolError(f"a frame header of {size} bytes")
            if len(self._buffer) < _LENGTH.size + size:
                self._wanted = _LENGTH.size + size
                return None
            self._header = _parse_header(bytes(self._buffer[_LENGTH.size : _LENGTH.size + size]))
            if self._header["payload_len"] > self._max_payload_bytes:
                raise ProtocolError(f"a frame payload of {self._header['payload_len']} bytes")
            del self._buffer[: _LENGTH.size + size]
            self._wanted = self._header["payload_len"]
            if len(self._buffer) < self._wanted:
                return None
        header, length = self._header, self._header["payload_len"]
        payload = bytes(self._buffer[:length])
        del self._buffer[:length]
        self._header, self._wanted = None, _LENGTH.size
        fields = {k: v for k, v in header.items() if k not in ("type", "generation", "payload_len")}
        return Frame(header["type"], fields, payload, header["generation"])


def _parse_header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8", "surrogatepass"))
    except (UnicodeDecodeError, ValueError, RecursionError) as exc:
        raise ProtocolError("a frame header that is not JSON") from exc
    if not isinstance(header, dict) or not isinstance(header.get("type"), str):
        raise ProtocolError("a frame header without a type")
    for name in ("generation", "payload_len"):
        value = header.setdefault(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ProtocolError(f"a frame header whose {name} is no count")
    return header
