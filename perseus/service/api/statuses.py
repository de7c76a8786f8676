"""Every domain and solver error, and the gRPC status that callers see.

The details of a status hold one ErrorInfo of domain "perseus" (a stable reason, and every changing value by
name), and a RetryInfo if the same request may be answered otherwise later. What is no error of ours is a
fault of the coordinator's: its callers see INTERNAL, its log the traceback.
"""

import functools
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Mapped:
    """How callers see an error.

    Attributes:
        is_retryable: later, the same request may be answered otherwise.
        retry_delay_s: when it is worth trying again; up to a second more, at random, is told.
    """

    code: int
    reason: str
    is_retryable: bool = False
    retry_delay_s: int = 1


STATUSES: dict[type[Exception], Mapped] = {
    errors.InvalidFieldError: Mapped(Code.INVALID_ARGUMENT, "INVALID_FIELD"),
    errors.InvalidJobIdError: Mapped(Code.INVALID_ARGUMENT, "INVALID_JOB_ID"),
    errors.RankOutOfRangeError: Mapped(Code.INVALID_ARGUMENT, "RANK_OUT_OF_RANGE"),
    errors.PipelineOutOfRangeError: Mapped(Code.INVALID_ARGUMENT, "PIPELINE_OUT_OF_RANGE"),
    errors.RankNotServedError: Mapped(Code.INVALID_ARGUMENT, "RANK_NOT_SERVED"),
    errors.TelemetryOutdatedError: Mapped(Code.INVALID_ARGUMENT, "TELEMETRY_OUTDATED"),
    errors.UnknownMessageError: Mapped(Code.UNIMPLEMENTED, "UNKNOWN_MESSAGE"),
    errors.UnknownCallError: Mapped(Code.UNIMPLEMENTED, "UNKNOWN_CALL"),
    errors.HelloExpectedError: Mapped(Code.INVALID_ARGUMENT, "HELLO_EXPECTED"),
    errors.HelloRepeatedError: Mapped(Code.INVALID_ARGUMENT, "HELLO_REPEATED"),
    errors.EmptyMessageError: Mapped(Code.INVALID_ARGUMENT, "EMPTY_MESSAGE"),
    errors.MalformedMessageError: Mapped(Code.INVALID_ARGUMENT, "MALFORMED_MESSAGE"),
    errors.JobNotFoundError: Mapped(Code.NOT_FOUND, "JOB_NOT_FOUND"),
    errors.JobUnreadableError: Mapped(Code.DATA_LOSS, "JOB_UNREADABLE"),
    errors.RunNotFoundError: Mapped(Code.NOT_FOUND, "RUN_NOT_FOUND"),
    errors.JobAlreadyExistsError: Mapped(Code.ALREADY_EXISTS, "JOB_ALREADY_EXISTS"),
    errors.JobFinishedError: Mapped(Code.FAILED_PRECONDITION, "JOB_FINISHED"),
    errors.JobNotFinishedError: Mapped(Code.FAILED_PRECONDITION, "JOB_NOT_FINISHED"),
    errors.JobQuarantinedError: Mapped(Code.FAILED_PRECONDITION, "JOB_QUARANTINED"),
    errors.JobNotSolvedError: Mapped(Code.FAILED_PRECONDITION, "JOB_NOT_SOLVED", is_retryable=True),
    errors.TimelineNotReadyError: Mapped(Code.FAILED_PRECONDITION, "TIMELINE_NOT_READY", is_retryable=True),
    errors.RankAlreadyServedError: Mapped(Code.FAILED_PRECONDITION, "RANK_ALREADY_SERVED", is_retryable=True),
    errors.SpecMismatchError: Mapped(Code.FAILED_PRECONDITION, "SPEC_MISMATCH"),
    errors.GpuAlreadyServedError: Mapped(Code.FAILED_PRECONDITION, "GPU_ALREADY_SERVED", is_retryable=True),
    errors.StreamReplacedError: Mapped(Code.ABORTED, "STREAM_REPLACED"),
    errors.LeaseExpiredError: Mapped(Code.UNAVAILABLE, "LEASE_EXPIRED", is_retryable=True),
    errors.StateLostError: Mapped(Code.UNAVAILABLE, "STATE_LOST", is_retryable=True),
    errors.ReaderTooSlowError: Mapped(Code.RESOURCE_EXHAUSTED, "READER_TOO_SLOW", is_retryable=True),
    errors.LimitReachedError: Mapped(
        Code.RESOURCE_EXHAUSTED, "LIMIT_REACHED", is_retryable=True, retry_delay_s=5
    ),
    errors.SolverBusyError: Mapped(Code.RESOURCE_EXHAUSTED, "SOLVER_BUSY", is_retryable=True),
    errors.SolverCrashedError: Mapped(Code.INTERNAL, "SOLVER_CRASHED", is_retryable=True),
    errors.SolverTimeoutError: Mapped(Code.DEADLINE_EXCEEDED, "SOLVER_TIMEOUT"),
    errors.DrainingError: Mapped(Code.UNAVAILABLE, "DRAINING", is_retryable=True),
    errors.BudgetNotFoundError: Mapped(Code.NOT_FOUND, "BUDGET_NOT_FOUND"),
    errors.FeedNotFoundError: Mapped(Code.NOT_FOUND, "FEED_NOT_FOUND"),
    errors.TokenNotFoundError: Mapped(Code.NOT_FOUND, "TOKEN_NOT_FOUND"),
    errors.TokenAlreadyExistsError: Mapped(Code.ALREADY_EXISTS, "TOKEN_ALREADY_EXISTS"),
    errors.CredentialMissingError: Mapped(Code.UNAUTHENTICATED, "CREDENTIAL_MISSING"),
    errors.TokenUnknownError: Mapped(Code.UNAUTHENTICATED, "TOKEN_UNKNOWN"),
    errors.TokenExpiredError: Mapped(Code.UNAUTHENTICATED, "TOKEN_EXPIRED"),
    errors.TokenRevokedError: Mapped(Code.UNAUTHENTICATED, "TOKEN_REVOKED"),
    errors.ScopeTooNarrowError: Mapped(Code.PERMISSION_DENIED, "SCOPE_TOO_NARROW"),
    errors.JobOutOfScopeError: Mapped(Code.PERMISSION_DENIED, "JOB_OUT_OF_SCOPE"),
    errors.HostOutOfScopeError: Mapped(Code.PERMISSION_DENIED, "HOST_OUT_OF_SCOPE"),
    errors.OriginMismatchError: Mapped(Code.PERMISSION_DENIED, "ORIGIN_MISMATCH"),
    errors.HostUnknownError: Mapped(Code.PERMISSION_DENIED, "HOST_UNKNOWN"),
    errors.OwnerMismatchError: Mapped(Code.PERMISSION_DENIED, "OWNER_MISMATCH"),
    errors.InstanceServedError: Mapped(Code.PERMISSION_DENIED, "INSTANCE_SERVED"),
    errors.InternalError: Mapped(Code.INTERNAL, "INTERNAL"),
    ScheduleError: Mapped(Code.INVALID_ARGUMENT, "INVALID_SCHEDULE"),
    ProfileError: Mapped(Code.INVALID_ARGUMENT, "INVALID_PROFILE"),
    PipelineError: Mapped(Code.INVALID_ARGUMENT, "INVALID_PIPELINE"),
    DeadlineError: Mapped(Code.OUT_OF_RANGE, "ITERATION_TIME_TOO_SHORT"),
    LagError: Mapped(Code.FAILED_PRECONDITION, "LAG_NOT_FOUND"),
    SolverError: Mapped(Code.INVALID_ARGUMENT, "INVALID_PROBLEM"),
}
"""Every error class that can be raised; those that only gather others are not here. See docs/errors.md."""

_MAX_MESSAGE_LENGTH = 1024
"""Characters of a status's message: it travels in a header."""

MappedError = errors.CoordinatorError | SolverError
MAPPED = (errors.CoordinatorError, SolverError)


refusal_counts: Counter[str] = Counter()
"""What this process has refused or ended, by reason: calls, streams and messages on them."""


def count_refusal(error: MappedError) -> None:
    """Count what is refused on a stream; `to_status` counts what ends a call."""
    refusal_counts[STATUSES[type(error)].reason] += 1


def error_info(error: MappedError) -> ErrorInfo:
    """Return the error's reason and changing values."""
    reason = STATUSES[type(error)].reason
    metadata = error.details if isinstance(error, SolverError) else error.metadata
    metadata = {name: errors.cut(value) for name, value in metadata.items()}
    return ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata)


def to_status(error: MappedError) -> grpc.Status:
    """Return the error as what `context.abort_with_status` takes."""
    mapped_to = STATUSES[type(error)]
    count_refusal(error)
    details = [_packed(error_info(error))]
    if mapped_to.is_retryable:
        # Those who are refused together are not to come again together.
        delay = Duration(nanos=random.randrange(10**9), seconds=mapped_to.retry_delay_s)
        details.append(_packed(RetryInfo(retry_delay=delay)))
    status: grpc.Status = rpc_status.to_status(
        Status(code=mapped_to.code, message=errors.cut(error, _MAX_MESSAGE_LENGTH), details=details)
    )
    return status


def refused_parts(error: MappedError) -> dict[str, str]:
    """Return reason, field, expected and found, as the refusals on a stream have them."""
    reason = STATUSES[type(error)].reason
    if isinstance(error, errors.InvalidInputError):
        return {"reason": reason, "field": error.field, "expected": error.expected, "found": error.found}
    return {"reason": reason, "field": "", "expected": "", "found": str(error)}


def unexpected(error: Exception, where: str, **context: object) -> errors.CoordinatorError:
    """Log an exception that nobody thought of, and return what callers are told of it.

    A store that fails ends the coordinator, which says why by itself.
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
    """Let a unary method of an adapter raise domain errors, which end the call with their status.

    Its request's texts are checked before it sees them.
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
    """The same for a method that streams its answers."""

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
