"""Neither kills nor malformed messages lose anything; `make torture-coordinator` does more of both. Nor does
broken HTTP/2."""

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from google.protobuf.descriptor import Descriptor
from structlog.testing import capture_logs

from benchmarks.load.http2 import OPENING, frame, literal
from tests.service.grpc_fakes import connected_to, make_settings, running_here
from tests.torture import malformed_messages as messages
from tests.torture.coordinator import torture
from tests.torture.malformed import SHARES, torture_malformed

KILLS = 2
MESSAGES = 3000
"""So many that the coordinator collects all its garbage while they come: its memory is compared."""


@pytest.mark.slow("a coordinator is killed and started again while dozens of agents train")
@pytest.mark.timeout(300)
def test_nothing_acknowledged_is_lost_and_no_version_is_reused(tmp_path: Path) -> None:
    outcome = torture(tmp_path, str(tmp_path / "jobs.db"), KILLS, 0)
    assert outcome.problems == []
    assert outcome.kill_count == KILLS
    assert outcome.states == ["JOB_STATE_PLANNED"]
    assert outcome.batch_count > 0
    assert outcome.version_count > 0


@pytest.mark.slow("a coordinator's process, and hundreds of messages that end its streams")
@pytest.mark.nightly("minutes; each parser of untrusted input has its own tests, and is fuzzed")
@pytest.mark.timeout(1200)
def test_malformed_messages_change_nothing(tmp_path: Path) -> None:
    outcome = torture_malformed(tmp_path, MESSAGES, 0)
    assert outcome.problems == []
    assert outcome.sent == {kind: round(MESSAGES * share) for kind, share in SHARES.items()}
    assert outcome.iteration_count > 0
    assert {"INVALID_FIELD", "MALFORMED_MESSAGE"} <= set(outcome.ends)


def test_every_field_of_every_request_is_set_to_its_bounds() -> None:
    def value(message: object, path: messages.Path) -> object:
        for field in path:
            message = getattr(message, field.name)
        return message

    for kind in messages.unary_methods().values():
        made = list(messages.at_bounds(partial(messages.valid, kind)))
        for path in messages.paths(cast(Descriptor, kind.DESCRIPTOR)):
            field = path[-1]
            if field.message_type is None and not any(each.is_repeated for each in path):
                values = {repr(value(message, path)) for message in made}
                assert values >= {repr(extreme) for extreme in messages.extremes(field)}, field.full_name


def headers(stream: int, path: str = "/perseus.v1.AgentService/Connect", extra: bytes = b"") -> bytes:
    """A frame that begins a call."""
    block = b"\x83\x86" + literal(b":path", path.encode()) + literal(b":authority", b"localhost")
    block += literal(b"te", b"trailers") + literal(b"content-type", b"application/grpc")
    return frame(1, 4, stream, block + extra)


CALL = OPENING + headers(1)
MESSAGE = b"\x00\x00\x00\x00\x02\x0a\x00"
"""A message of two bytes, and before it that it is not compressed, and its length."""
DROPPED_CALLS = b"".join(headers(n) + frame(3, 0, n, bytes(4)) for n in range(1, 80, 2))
UNARY_CALL = OPENING + headers(1, "/perseus.v1.JobService/ListJobs")
BROKEN = {
    "another protocol": b"\x16\x03\x01\x02\x00\x01 no HTTP/2",
    "half a frame": CALL[:-3],
    "no message": UNARY_CALL + frame(0, 1, 1, b""),
    "half a message": CALL + frame(0, 1, 1, MESSAGE[:-1]),
    "two messages for one": UNARY_CALL + frame(0, 1, 1, 2 * MESSAGE),
    "a message of 4 GiB": CALL + frame(0, 0, 1, b"\x00\xff\xff\xff\xff"),
    "a message that is not compressed as it says": CALL + frame(0, 1, 1, b"\x01" + MESSAGE[1:]),
    "a frame of 16 MiB": CALL + b"\xff\xff\xff" + frame(0, 1, 1, MESSAGE)[3:],
    "data without a call": OPENING + frame(0, 1, 1, MESSAGE),
    "headers that can't be decoded": OPENING + frame(1, 5, 1, b"\xff" * 100),
    "headers without an end": OPENING + frame(1, 0, 1, b"\x83") + 20 * frame(9, 0, 1, b"\x86"),
    "calls dropped at once": OPENING + DROPPED_CALLS,
    "an even call after a later one": OPENING + headers(7) + headers(2),
    "a window that overflows": CALL + 3 * frame(8, 0, 1, b"\x7f\xff\xff\xff"),
    "a time-out that is no number": OPENING + headers(1, extra=literal(b"grpc-timeout", b"-1S")),
    "an encoding that is unknown": OPENING + headers(1, extra=literal(b"grpc-encoding", b"\xff")),
}


async def test_a_caller_that_is_gone_before_its_answer_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC logs it with a traceback, now and then: whichever of both is first."""
    log = logging.getLogger("grpc._cython.cygrpc")
    async with running_here(make_settings(tmp_path)):
        for error in (type("ExecuteBatchError", (Exception,), {})(), RuntimeError("another")):
            log.error("raised in core by servicer method", exc_info=error)
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error]


async def test_broken_http_2_ends_its_own_connection_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_here(make_settings(tmp_path)) as (address, serving), connected_to(address) as client:
        host, _, port = address.rpartition(":")
        for name, data in BROKEN.items():
            with capture_logs() as logs, caplog.at_level(logging.WARNING):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(data)
                writer.write_eof()
                async with asyncio.timeout(20):
                    await reader.read()
                writer.close()
                await client.ask("ListJobs")
            assert not serving.done(), name
            logged = [line for line in logs if line["log_level"] in ("warning", "error")]
            assert [line for line in logged if "stood still" not in line["event"]] == [], name
            assert caplog.records == [], name
