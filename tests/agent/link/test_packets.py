import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.agent.link.computation import Computation, Kind, Rank
from perseus.agent.link.packets import (
    MAX_ITERATION,
    MAX_JSON_BYTES,
    MAX_PACKET_BYTES,
    ComputationMark,
    Edge,
    Finish,
    Hello,
    IterationMark,
    MalformedPacket,
    MarkType,
    Membership,
    Message,
    Registration,
    Reply,
    decode,
    encode,
    mark_packer,
)

int32 = st.integers(0, 2**31 - 1)
int64 = st.integers(0, 2**63 - 1)
iterations = st.integers(0, MAX_ITERATION)
edges = st.sampled_from(Edge)
computations = st.builds(Computation, st.sampled_from(Kind), int32, int32)
texts = st.text(max_size=50)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Hello, st.builds(Rank, texts, int32, int32, int32), texts, st.booleans()),
    st.builds(Registration, st.dictionaries(texts, st.one_of(texts, int32, st.lists(int32))), texts, texts),
    st.builds(Membership, texts),
    st.builds(Reply, st.booleans(), texts, texts),
    st.builds(IterationMark, edges, iterations, int64),
    st.builds(ComputationMark, edges, iterations, int32, computations, int64),
    st.builds(Finish, int64),
)


@given(messages)
def test_a_message_survives_the_round_trip(message: Message) -> None:
    assert decode(encode(message)) == message


@given(
    st.one_of(
        st.binary(max_size=100), st.builds(lambda tail: b"P" + tail, st.binary(min_size=31, max_size=31))
    )
)
def test_garbage_is_refused_and_nothing_else_happens(packet: bytes) -> None:
    try:
        message = decode(packet)
    except MalformedPacket:
        return
    assert decode(encode(message)) == message


@given(messages, st.data())
def test_a_truncated_packet_is_refused(message: Message, data: st.DataObject) -> None:
    packet = encode(message)
    with pytest.raises(MalformedPacket, match=r"expected .* found|expected JSON"):
        decode(packet[: data.draw(st.integers(0, len(packet) - 1))])


def test_marks_are_small() -> None:
    mark = ComputationMark(Edge.BEGIN, 3, 1, Computation(Kind.FORWARD, 0), 12)
    assert len(encode(mark)) == 32


def test_a_registration_with_long_orders_fits_a_packet() -> None:
    computation = {"kind": 1, "microbatch": 1023, "chunk": 3}
    registration = Registration({"stages": [[computation] * 1024] * 16}, "request", "fingerprint")
    assert len(json.dumps(registration.spec)) > MAX_PACKET_BYTES
    packet = encode(registration)
    assert len(packet) <= MAX_PACKET_BYTES
    assert decode(packet) == registration


def test_a_registration_that_can_not_be_deflated_enough_is_refused() -> None:
    incompressible = "".join(f"{n * 2654435761 % 2**32:08x}" for n in range(60_000))
    with pytest.raises(ValueError, match=f"registration: expected at most {MAX_PACKET_BYTES} bytes"):
        encode(Registration({"x": incompressible}, "request", ""))


def test_a_deflated_bomb_is_refused() -> None:
    bomb = encode(Registration({"x": "0" * (MAX_JSON_BYTES + 1)}, "request", ""))
    with pytest.raises(MalformedPacket, match="truncated or exceeds"):
        decode(bomb)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"version": 1, "type": "hello"}, "hello: expected protocol version 2, found 1"),
        (
            {"version": 2, "type": "greeting"},
            "expected type hello, registration, membership or reply, found 'greeting'",
        ),
        ({"version": 2}, "field 'type': expected str, found null"),
        ({"version": True, "type": "hello"}, "field 'version': expected int, found true"),
        (
            {"version": 2, "type": "hello", "job_id": "j", "pipeline": -1},
            "field 'pipeline': expected 0 to 2147483647, found -1",
        ),
        ({"version": 2, "type": "reply", "ok": 1}, "field 'ok': expected bool, found 1"),
    ],
)
def test_json_errors_name_the_field(fields: dict[str, object], text: str) -> None:
    with pytest.raises(MalformedPacket, match=text):
        decode(json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("packet", "text"),
    [
        (mark_packer(MarkType.FINISH)(0, 0, 0, 0, 0, 0)[:1] + b"\x01" + bytes(30), "version 2, found 1"),
        (struct.pack("<BBBBiiiqq", 0x50, 2, 9, 0, 0, 0, 0, 0, 0), "type 1 to 5, found 9"),
        (struct.pack("<BBBBiiiqq", 0x50, 2, 3, 7, 0, 0, 0, 0, 0), "kind 1 to 6, found 7"),
        (struct.pack("<BBBBiiiqq", 0x50, 2, 1, 0, 0, 0, 0, -4, 0), "no negative field, found .*iteration -4"),
        (
            struct.pack("<BBBBiiiqq", 0x50, 2, 1, 0, 0, 0, 0, 2**63 - 1, 0),
            "iteration 0 to 9007199254740992, found 9223372036854775807",
        ),
        (bytes(32), "first byte 0x00"),
        (b"", "1 to 131072 bytes, found 0"),
    ],
)
def test_mark_errors_name_the_field(packet: bytes, text: str) -> None:
    with pytest.raises(MalformedPacket, match=text):
        decode(packet)
