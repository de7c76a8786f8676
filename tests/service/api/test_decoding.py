"""Bytes that are not a protocol buffer are refused with a reason by every kind of call, and are no fault of
ours."""

import logging
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from perseus.service.api.interceptors import serve_stream
from perseus.service.api.rpc_scopes import RPC_SCOPES
from tests.service.grpc_fakes import TIMEOUT_S, Client, refusal

NONSENSE = b"\xff\xff\xff\xff"
STREAMS_OF_REQUESTS = ("/ServerReflectionInfo", "/Connect")


async def test_malformed_bytes_are_refused_with_a_reason(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    channel: Any = client.channel  # raw bytes
    for rpc in RPC_SCOPES:
        with capture_logs() as logs, caplog.at_level(logging.WARNING):
            if rpc.endswith(STREAMS_OF_REQUESTS):
                call = channel.stream_stream(rpc)(timeout=TIMEOUT_S)
                await call.write(NONSENSE)
            elif rpc.endswith(("/Watch", "/WatchJob")):
                call = channel.unary_stream(rpc)(NONSENSE, timeout=TIMEOUT_S)
            else:
                call = channel.unary_unary(rpc)(NONSENSE, timeout=TIMEOUT_S)
            code, reason, values = await refusal(call)
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE"), rpc
        assert "pars" in values["cause"].lower()
        assert [line for line in logs if line["log_level"] == "error"] == []
        assert caplog.records == [], "no traceback of gRPC's"


async def test_a_caller_that_leaves_during_an_answer_is_no_fault() -> None:
    left: list[str] = []

    async def behaviour(request: object, context: object) -> AsyncGenerator[str, None]:
        try:
            for number in range(9):
                yield f"answer {number}"
        finally:
            left.append("the watcher's place")

    class Gone:
        def __init__(self) -> None:
            self.written: list[str] = []

        async def write(self, answer: str) -> None:
            if self.written:
                raise grpc.aio.InternalError('Failed "execute_batch"')
            self.written.append(answer)

    context: Any = Gone()
    await serve_stream(behaviour, None, context)
    assert (context.written, left) == (["answer 0"], ["the watcher's place"])
