import json
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.agent.link.computation import Computation, Kind, Rank
from perseus.agent.link.packets import (
    MAX_ITERATION,
    MAX_JSON_BYTES,
    MAX_LATENCY_BUCKET,
    MAX_OBJECTS,
    MAX_PACKET_BYTES,
    MAX_RELATIVE_WORK_PERMILLE,
    MAX_WORK,
    ComputationMark,
    Edge,
    EngineHello,
    EngineReport,
    Finish,
    HealthQuestion,
    Hello,
    Instances,
    InstancesQuestion,
    IterationMark,
    MalformedPacket,
    MarkType,
    Membership,
    Message,
    Packing,
    Registration,
    Reply,
    Saving,
    Unmarked,
    WaitMark,
    decode,
    encode,
    is_quick,
)

int32 = st.integers(0, 2**31 - 1)
int64 = st.integers(0, 2**63 - 1)
iterations = st.integers(0, MAX_ITERATION)
edges = st.sampled_from(Edge)
computations = st.builds(Computation, st.sampled_from(Kind), int32, int32)
texts = st.text(max_size=50)
identifiers = texts.filter(str.isprintable)
names = identifiers.filter(bool)
percents = st.floats(-1e6, 1e6)
amounts = st.floats(0, 1e9)
latencies = st.dictionaries(st.integers(-MAX_LATENCY_BUCKET, MAX_LATENCY_BUCKET), int32)
savings = st.builds(Saving, percents, percents)
messages: st.SearchStrategy[Message] = st.one_of(
    st.just(HealthQuestion()),
    st.builds(Hello, st.builds(Rank, names, int32, int32, int32), names, st.booleans(), int64, st.booleans()),
    st.builds(Packing, st.booleans()),
    st.builds(
        Registration,
        st.dictionaries(texts, st.one_of(texts, int32, st.lists(int32))),
        identifiers,
        identifiers,
    ),
    st.builds(Membership, identifiers),
    st.builds(Reply, st.booleans(), texts, texts, st.booleans(), st.none() | savings),
    st.builds(
        IterationMark, st.just(Edge.BEGIN), iterations, int64, st.integers(0, MAX_RELATIVE_WORK_PERMILLE)
    ),
    st.builds(
        IterationMark, st.just(Edge.END), iterations, int64, st.just(0), int32, st.integers(0, MAX_WORK)
    ),
    st.builds(ComputationMark, edges, iterations, int32, computations, int64),
    st.builds(WaitMark, edges, iterations, int64),
    st.builds(Unmarked, identifiers),
    st.builds(Finish, int64),
    st.just(InstancesQuestion()),
    st.builds(Instances, st.lists(st.dictionaries(texts, st.one_of(texts, int32, amounts, st.none())))),
    st.builds(EngineHello, identifiers, int32),
    st.builds(
        EngineReport, amounts, int32, int32, amounts, int32, int32, int32, amounts, latencies, latencies
    ),
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


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b'{"x":"' + b"0" * MAX_JSON_BYTES, f"at most {MAX_JSON_BYTES} bytes"),
        (b'{"x":[' + b"{}," * (MAX_OBJECTS + 1), f"at most {MAX_OBJECTS} objects"),
        (b"[" * 5000, "at most 4096 lists"),
        (b'{"x":[' + b'"",' * MAX_OBJECTS * 5, "quotation marks"),
    ],
)
def test_excessive_inflated_content_is_refused_before_decoding(text: bytes, problem: str) -> None:
    bomb = zlib.compress(text)
    assert len(bomb) <= MAX_PACKET_BYTES
    with pytest.raises(MalformedPacket, match=f"expected JSON of {problem}|{problem}"):
        decode(bomb)


@pytest.mark.parametrize("spec", [{"x": "0" * (MAX_JSON_BYTES + 1)}, {"x": [{}] * (MAX_OBJECTS + 1)}])
def test_packets_that_would_be_refused_are_not_encoded(spec: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="registration: expected JSON of at most"):
        encode(Registration(spec, "request", ""))


@pytest.mark.parametrize(
    "text",
    [
        b'{"x":' + b"[" * 4000,
        b'{"x":' * 4000,
        b'{"version": NaN}',
        b'{"version": -Infinity}',
        b'{"version": ' + b"9" * 5000 + b"}",
        b'{"version": 2, "type": "\\u001b[31m"}',
        b'{"version": 2, "type": "hello", "job_id": "\\ud800"}',
        b'{"version": 2, "type": "hello", "job_id": ""}',
        b'{"version": 2, "type": "hello", "job_id": "' + b"j" * 257 + b'"}',
        b'{"version": 2, "type": "membership", "spec_fingerprint": "' + b"f" * 65 + b'"}',
        b'{"version": 2, "type": "membership", "spec_fingerprint": {}}',
        b"\xff\xfe{",
    ],
)
@pytest.mark.parametrize("is_deflated", [False, True])
def test_hostile_json_is_refused_with_a_printable_message(text: bytes, is_deflated: bool) -> None:
    with pytest.raises(MalformedPacket) as refused:
        decode(zlib.compress(text) if is_deflated else text)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300


def mark(mark_type: int, kind: int = 0, iteration: int = 0, version: int = 2, chunk: int = 0) -> bytes:
    return struct.pack("<BBBBiiiqq", 0x50, version, mark_type, kind, 0, chunk, 0, iteration, 0)


def saving(saved: object, margins: object) -> bytes:
    reply = json.loads(encode(Reply(True, "SAVING", is_notice=True, saving=Saving(10.0, 0.5))))
    return json.dumps(reply | {"saving": saved, "saving_margins": margins}).encode()


@pytest.mark.parametrize(
    ("packet", "text"),
    [
        (b'{"version": 1, "type": "hello"}', "hello: expected protocol version 2, found 1"),
        (
            b'{"version": 2, "type": "greeting"}',
            "expected type health, hello, engine, .*, unmarked, reply or packing, found 'greeting'",
        ),
        (b'{"version": 2}', "field 'type': expected str, found null"),
        (b'{"version": true, "type": "hello"}', "field 'version': expected int, found true"),
        (
            b'{"version": 2, "type": "hello", "job_id": "j", "pipeline": -1}',
            "field 'pipeline': expected 0 to 2147483647, found -1",
        ),
        (b'{"version": 2, "type": "reply", "ok": 1}', "field 'ok': expected bool, found 1"),
        (mark(MarkType.FINISH, version=1), "version 2, found 1"),
        (mark(9), "type 1 to 7, found 9"),
        (mark(3, kind=7), "kind 1 to 6, found 7"),
        (mark(2, chunk=2**31 - 1), f"work of 0 to {MAX_WORK} elements, found "),
        (saving([10.0], [None, None]), "'saving': expected two numbers, and two margins or none"),
        (saving([10.0, "x"], [None, None]), "'saving': expected two numbers, and two margins or none"),
        (saving([10.0, 1], [0.5]), "'saving': expected two numbers, and two margins or none"),
        (saving([10.0, 1], [0.5, "x"]), "'saving': expected two numbers, and two margins or none"),
        (mark(1, iteration=-4), "no negative field, found .*iteration -4"),
        (mark(1, iteration=2**63 - 1), "iteration 0 to 9007199254740992, found 9223372036854775807"),
        (bytes(32), "first byte 0x00"),
        (b"", "1 to 131072 bytes, found 0"),
    ],
)
def test_errors_name_the_field(packet: bytes, text: str) -> None:
    with pytest.raises(MalformedPacket, match=text):
        decode(packet)


@pytest.mark.parametrize(
    "change",
    [{"kv_usage": -1}, {"length_s": "1"}, {"ttft": {"61": 1}}, {"itl": {"x": 1}}, {"itl": {"1": -1}}],
)
def test_an_engines_report_with_an_impossible_figure_is_refused(change: dict[str, object]) -> None:
    packet = json.loads(encode(EngineReport(0.25, 1, 0, 0.1, 10, 20, 5, 0.4, {3: 1}, {-40: 20})))
    with pytest.raises(MalformedPacket, match="expected"):
        decode(json.dumps(packet | change).encode())


def test_the_longest_report_of_an_engine_is_quick_to_decode() -> None:
    buckets = dict.fromkeys(range(-MAX_LATENCY_BUCKET, MAX_LATENCY_BUCKET + 1), 100_000)
    assert is_quick(
        encode(EngineReport(0.25, 999, 999, 0.123456789012, 10**6, 10**6, 10**4, 1e5 / 3, buckets, buckets))
    )


def test_a_saving_is_one_that_older_probes_know() -> None:
    packet = json.loads(encode(Reply(True, "SAVING", is_notice=True, saving=Saving(10.0, 0.5, 0.4, 0.2))))
    assert packet["saving"] == [10.0, 0.5], "they refuse more than two numbers"
    del packet["saving_margins"]
    assert decode(json.dumps(packet).encode()) == Reply(
        True, "SAVING", is_notice=True, saving=Saving(10.0, 0.5)
    )
