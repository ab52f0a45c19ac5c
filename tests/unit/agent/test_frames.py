"""Frames survive any cut of the stream and refuse everything that is no frame."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuctl.agent.frames import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, Decoder, Frame, encode
from gpuctl.errors import ProtocolError

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
frames = st.builds(
    Frame,
    type=st.text(min_size=1, max_size=12),
    fields=st.dictionaries(
        st.text(max_size=8).filter(lambda k: k not in ("type", "generation", "payload_len")),
        json_values,
        max_size=4,
    ),
    payload=st.binary(max_size=300),
    generation=st.integers(0, 2**40),
)


@given(st.lists(frames, max_size=4), st.integers(1, 64))
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(sent: list[Frame], cut: int) -> None:
    data = b"".join(encode(frame) for frame in sent)
    decoder = Decoder()
    received = [f for i in range(0, len(data), cut) for f in decoder.feed(data[i : i + cut])]
    assert received == sent
    assert decoder.pending_bytes == 0


@given(st.binary(max_size=2000))
def test_random_bytes_are_frames_or_a_protocol_error(data: bytes) -> None:
    try:
        list(Decoder().feed(data))
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", MAX_HEADER_BYTES + 1),
        struct.pack(">I", 0),
        struct.pack(">I", 4) + b"null",
        struct.pack(">I", 11) + b'{"type": 1}',
        struct.pack(">I", 30) + b'{"type":"a","payload_len":-1} ',
        struct.pack(">I", 31) + b'{"type":"a","payload_len":true}',
    ],
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(Decoder().feed(data))


def test_an_announced_payload_over_the_cap_is_refused_before_it_is_read() -> None:
    header = b'{"type":"a","payload_len":%d}' % (MAX_PAYLOAD_BYTES + 1)
    with pytest.raises(ProtocolError):
        list(Decoder().feed(struct.pack(">I", len(header)) + header))


def test_deeply_nested_json_is_a_protocol_error() -> None:
    header = b'{"type":"a","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(ProtocolError):
        list(Decoder().feed(struct.pack(">I", len(header)) + header))
