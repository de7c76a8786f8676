"""The gRPC statuses of errors of the domain and of the solver.

The details of a status hold one ErrorInfo of domain "perseus" (a stable reason, and every changing value by
name), and a RetryInfo if the same request may succeed later. Any other exception is a fault of the
coordinator: callers see INTERNAL, and the log has the traceback.
"""

import functools
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any as Anything
from typing import TypeVar, cast

import grpc
import structlog
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from perseus.service.api.texts import check_texts
from perseus.service.domain import errors
from perseus.solver import DeadlineError, LagError, PipelineError, ProfileError, ScheduleError, SolverError

Unary = TypeVar("Unary", bound=Callable[..., Coroutine[Anything, Anything, Anything]])
Stream = TypeVar("Stream", bound=Callable[..., AsyncIterator[Anything]])

log = structlog.get_logger(__name__)

DOMAIN = "perseus"


SOLVER_STATUSES: dict[type[SolverError], tuple[str, str]] = {
    ScheduleError: ("INVALID_ARGUMENT", "INVALID_SCHEDULE"),
    ProfileError: ("INVALID_ARGUMENT", "INVALID_PROFILE"),
    PipelineError: ("INVALID_ARGUMENT", "INVALID_PIPELINE"),
    DeadlineError: ("OUT_OF_RANGE", "ITERATION_TIME_TOO_SHORT"),
    LagError: ("FAILED_PRECONDITION", "LAG_NOT_FOUND"),
    SolverError: ("INVALID_ARGUMENT", "INVALID_PROBLEM"),
}
"""Status code and reason of the solver's errors, which know nothing of gRPC; a retry doesn't help."""

_MAX_MESSAGE_LENGTH = 1024
"""Maximum length of a status's message, in characters: it travels in a header."""

MappedError = errors.CoordinatorError | SolverError
MAPPED = (errors.CoordinatorError, SolverError)


refusal_counts: Counter[str] = Counter()
"""How many calls, streams and messages on streams this process has refused or ended, by reason."""


def reason_of(error: MappedError) -> str:
    """Return an error's stable reason."""
    return SOLVER_STATUSES[type(error)][1] if isinstance(error, SolverError) else error.reason


def count_refusal(error: MappedError) -> None:
    """Count a refusal on a stream; `to_status` counts those that end a call."""
    refusal_counts[reason_of(error)] += 1


def error_info(error: MappedError) -> ErrorInfo:
    """Return the error's reason and changing values."""
    metadata = error.details if isinstance(error, SolverError) else error.metadata
    metadata = {name: errors.cut(value) for name, value in metadata.items()}
    return ErrorInfo(reason=reason_of(error), domain=DOMAIN, metadata=metadata)


def to_status(error: MappedError) -> grpc.Status:
    """Return the error in the form that `context.abort_with_status` takes."""
    if isinstance(error, SolverError):
        code, delay_s = SOLVER_STATUSES[type(error)][0], None
    else:
        code, delay_s = error.code, error.retry_delay_s
    count_refusal(error)
    details = [_packed(error_info(error))]
    if delay_s is not None:
        # Random, so that clients that are refused together don't come again together.
        delay = Duration(nanos=random.randrange(10**9), seconds=delay_s)
        details.append(_packed(RetryInfo(retry_delay=delay)))
    status: grpc.Status = rpc_status.to_status(
        Status(code=Code.Value(code), message=errors.cut(error, _MAX_MESSAGE_LENGTH), details=details)
    )
    return status


def refused_parts(error: MappedError) -> dict[str, str]:
    """Return reason, field, expected and found, as refusals on a stream contain them."""
    reason = reason_of(error)
    if isinstance(error, errors.InvalidInputError):
        return {"reason": reason, "field": error.field, "expected": error.expected, "found": error.found}
    return {"reason": reason, "field": "", "expected": "", "found": str(error)}


def unexpected(error: Exception, where: str, **context: object) -> errors.CoordinatorError:
    """Log an unexpected exception, and return the error for callers.

    A failing store ends the coordinator, which logs the reason itself.
    """
    if isinstance(error, errors.StoreFailedError):
        return errors.DrainingError()
    log.error("unexpected error", where=where, exc_info=error, **context)
    return errors.InternalError(cause=type(error).__name__)


def _packed(message: Message) -> Any:
    detail = Any()
    detail.Pack(message)
    return detail


def mapped(method: Unary) -> Unary:
    """Wrap a unary method of an adapter: it may raise domain errors, which end the call with their status.

    The texts of its request are checked first.
    """

    @functools.wraps(method)
    async def answer(
        self: object, request: Message, context: grpc.aio.ServicerContext[object, object]
    ) -> object:
        try:
            check_texts(request)
            return await method(self, request, context)
        except MAPPED as error:
            status = to_status(error)
        except Exception as error:
            status = to_status(unexpected(error, method.__name__))
        return await context.abort_with_status(status)

    return cast(Unary, answer)


def mapped_stream(method: Stream) -> Stream:
    """Wrap a method with a response stream in the same way."""

    @functools.wraps(method)
    async def answer(
        self: object, request: Message, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[object]:
        try:
            check_texts(request)
            async for message in method(self, request, context):
                yield message
        except MAPPED as error:
            status = to_status(error)
        except Exception as error:
            status = to_status(unexpected(error, method.__name__))
        else:
            return
        await context.abort_with_status(status)

    return cast(Stream, answer)
