"""Every domain and solver error, and the gRPC status that callers see.

The details of a status hold one ErrorInfo of domain "perseus": a stable reason, and every changing value by
name.
"""

import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any as Anything
from typing import TypeVar, cast

import grpc
from google.protobuf.any_pb2 import Any
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from perseus.service.domain import errors
from perseus.solver import DeadlineError, LagError, PipelineError, ProfileError, ScheduleError, SolverError

Unary = TypeVar("Unary", bound=Callable[..., Coroutine[Anything, Anything, Anything]])
Stream = TypeVar("Stream", bound=Callable[..., AsyncIterator[Anything]])

DOMAIN = "perseus"

STATUSES: dict[type[Exception], tuple[int, str]] = {
    errors.InvalidFieldError: (Code.INVALID_ARGUMENT, "INVALID_FIELD"),
    errors.InvalidJobIdError: (Code.INVALID_ARGUMENT, "INVALID_JOB_ID"),
    errors.RankOutOfRangeError: (Code.INVALID_ARGUMENT, "RANK_OUT_OF_RANGE"),
    errors.PipelineOutOfRangeError: (Code.INVALID_ARGUMENT, "PIPELINE_OUT_OF_RANGE"),
    errors.HelloExpectedError: (Code.INVALID_ARGUMENT, "HELLO_EXPECTED"),
    errors.HelloRepeatedError: (Code.INVALID_ARGUMENT, "HELLO_REPEATED"),
    errors.EmptyMessageError: (Code.INVALID_ARGUMENT, "EMPTY_MESSAGE"),
    errors.JobNotFoundError: (Code.NOT_FOUND, "JOB_NOT_FOUND"),
    errors.RunNotFoundError: (Code.NOT_FOUND, "RUN_NOT_FOUND"),
    errors.JobAlreadyExistsError: (Code.ALREADY_EXISTS, "JOB_ALREADY_EXISTS"),
    errors.JobFinishedError: (Code.FAILED_PRECONDITION, "JOB_FINISHED"),
    errors.JobNotFinishedError: (Code.FAILED_PRECONDITION, "JOB_NOT_FINISHED"),
    errors.JobNotSolvedError: (Code.FAILED_PRECONDITION, "JOB_NOT_SOLVED"),
    errors.TimelineNotReadyError: (Code.FAILED_PRECONDITION, "TIMELINE_NOT_READY"),
    errors.RankAlreadyServedError: (Code.FAILED_PRECONDITION, "RANK_ALREADY_SERVED"),
    errors.SpecMismatchError: (Code.FAILED_PRECONDITION, "SPEC_MISMATCH"),
    errors.StreamReplacedError: (Code.ABORTED, "STREAM_REPLACED"),
    errors.LeaseExpiredError: (Code.UNAVAILABLE, "LEASE_EXPIRED"),
    errors.ReaderTooSlowError: (Code.RESOURCE_EXHAUSTED, "READER_TOO_SLOW"),
    errors.SolverBusyError: (Code.RESOURCE_EXHAUSTED, "SOLVER_BUSY"),
    errors.SolverCrashedError: (Code.INTERNAL, "SOLVER_CRASHED"),
    errors.DrainingError: (Code.UNAVAILABLE, "DRAINING"),
    ScheduleError: (Code.INVALID_ARGUMENT, "INVALID_SCHEDULE"),
    ProfileError: (Code.INVALID_ARGUMENT, "INVALID_PROFILE"),
    PipelineError: (Code.INVALID_ARGUMENT, "INVALID_PIPELINE"),
    DeadlineError: (Code.OUT_OF_RANGE, "ITERATION_TIME_TOO_SHORT"),
    LagError: (Code.FAILED_PRECONDITION, "LAG_NOT_FOUND"),
    SolverError: (Code.INVALID_ARGUMENT, "INVALID_PROBLEM"),
}
"""Code and reason of every error class that can be raised; those that only gather others have none."""

MappedError = errors.CoordinatorError | SolverError
MAPPED = (errors.CoordinatorError, SolverError)


def error_info(error: MappedError) -> ErrorInfo:
    """Return the error's reason and changing values."""
    _, reason = STATUSES[type(error)]
    metadata = error.details if isinstance(error, SolverError) else error.metadata
    return ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata)


def to_status(error: MappedError) -> grpc.Status:
    """Return the error as what `context.abort_with_status` takes."""
    code, _ = STATUSES[type(error)]
    detail = Any()
    detail.Pack(error_info(error))
    status: grpc.Status = rpc_status.to_status(Status(code=code, message=str(error), details=[detail]))
    return status


def mapped(method: Unary) -> Unary:
    """Let a unary method of an adapter raise domain errors, which end the call with their status."""

    @functools.wraps(method)
    async def answer(
        self: object, request: object, context: grpc.aio.ServicerContext[object, object]
    ) -> object:
        try:
            return await method(self, request, context)
        except MAPPED as error:
            await context.abort_with_status(to_status(error))

    return cast(Unary, answer)


def mapped_stream(method: Stream) -> Stream:
    """Let a method that streams its answers raise domain errors, which end the call with their status."""

    @functools.wraps(method)
    async def answer(
        self: object, request: object, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[object]:
        try:
            async for message in method(self, request, context):
                yield message
        except MAPPED as error:
            await context.abort_with_status(to_status(error))

    return cast(Stream, answer)
