"""A coordinator that gives prepared answers and keeps the requests, for commands that ask it."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.message import Message
from typer.testing import Result

from perseus.v1 import (
    frontier_service_pb2,
    info_service_pb2,
    job_service_pb2,
    ledger_service_pb2,
    power_service_pb2,
    token_service_pb2,
)
from tests.cli.commands import perseus

FILES = (
    frontier_service_pb2,
    info_service_pb2,
    job_service_pb2,
    ledger_service_pb2,
    power_service_pb2,
    token_service_pb2,
)
METHODS = {
    method.name: method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}

Answer = Message | Sequence[Message] | tuple[grpc.StatusCode, str]
"""What a call returns, or streams, or fails with."""


class PreparedCoordinator(grpc.GenericRpcHandler):
    """Answers calls by their names; those without an answer are not implemented."""

    def __init__(self) -> None:
        self.address = ""
        self.answers: Mapping[str, Answer] = {}
        self.requests: list[Message] = []

    def perseus(self, command: str, *, answer: str | None = None, **environment: str) -> Result:
        """Run a command line that asks this coordinator."""
        return perseus(command, answer=answer, PERSEUS_COORDINATOR=self.address, **environment)

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Return the handler of a method."""
        name = details.method.rpartition("/")[2]
        if name not in self.answers:
            return None
        method = METHODS[name]
        read = message_factory.GetMessageClass(method.input_type).FromString
        write = message_factory.GetMessageClass(method.output_type).SerializeToString

        def answers(request: Message, context: grpc.ServicerContext) -> Iterator[Message]:
            self.requests.append(request)
            match self.answers[name]:
                case Message() as answer:
                    yield answer
                case (grpc.StatusCode() as code, str(details)):
                    context.abort(code, details)
                case several:
                    yield from several

        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(answers, read, write)
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: next(answers(request, context)), read, write
        )


@contextmanager
def serving() -> Iterator[PreparedCoordinator]:
    """Serve such a coordinator."""
    prepared = PreparedCoordinator()
    pool = futures.ThreadPoolExecutor(2)
    both = threading.Barrier(2)
    for waiting in [pool.submit(both.wait) for _ in range(2)]:  # start all threads now, outside of any test
        waiting.result()
    server = grpc.server(pool)
    server.add_generic_rpc_handlers((prepared,))
    prepared.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield prepared
    finally:
        server.stop(None).wait()
        pool.shutdown()
