"""A coordinator that gives prepared answers and keeps the requests, for commands that ask it."""

import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from typing import Any, Self

import grpc
from google.protobuf import message_factory
from google.protobuf.message import Message
from typer.testing import Result

from tests.cli.commands import perseus

SERVICES = ("frontier", "info", "job", "ledger", "power", "token")
METHODS = {
    method.name: method
    for file in (importlib.import_module(f"perseus.v1.{name}_service_pb2") for name in SERVICES)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}

Answer = Message | Iterable["Answer"] | tuple[grpc.StatusCode, str] | grpc.Status | Callable[[Any], "Answer"]
"""What a call returns, or streams, or fails with; or a function of the request that returns it."""


class PreparedCoordinator(grpc.GenericRpcHandler):
    """Answers calls by their names; those without an answer are not implemented."""

    def __init__(self) -> None:
        self.answers: Mapping[str, Answer] = {}
        self.requests: list[Message] = []
        self._pool = futures.ThreadPoolExecutor(2)
        both = threading.Barrier(2)
        for waiting in [self._pool.submit(both.wait) for _ in range(2)]:  # start all threads now
            waiting.result()
        self._server = grpc.server(self._pool, [self], options=[("grpc.so_reuseport", 0)])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End all calls, and answer no more."""
        self._server.stop(None).wait()
        self._pool.shutdown()

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
            answer = self.answers[name]
            return given(answer(request) if callable(answer) else answer, context)

        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(answers, read, write)
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: next(answers(request, context)), read, write
        )


def given(answer: Answer, context: grpc.ServicerContext) -> Iterator[Message]:
    """Yield the messages of an answer; a failure ends the call."""
    match answer:
        case Message():
            yield answer
        case grpc.Status():
            context.abort_with_status(answer)
        case (grpc.StatusCode() as code, str(details)):
            context.abort(code, details)
        case Iterable():
            for each in answer:
                yield from given(each, context)
