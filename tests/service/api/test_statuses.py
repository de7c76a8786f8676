"""Every error has its status, and its line in the documentation."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import grpc
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from structlog.testing import capture_logs

from perseus.service.api.statuses import SOLVER_STATUSES, mapped, to_status
from perseus.service.domain import errors
from perseus.solver import SolverError
from perseus.v1 import job_service_pb2

Error = TypeVar("Error", bound=Exception)


def descendants(base: type[Error]) -> set[type[Error]]:
    found = {base}
    for child in base.__subclasses__():
        found |= descendants(child)
    return found


GATHERING: set[type[errors.CoordinatorError]] = {
    errors.CoordinatorError,
    errors.InvalidInputError,
    errors.ProtocolError,
    errors.ServedError,
    errors.AuthenticationError,
    errors.ForbiddenError,
}


def rich_status(status: grpc.Status) -> Status:
    return Status.FromString(dict(status.trailing_metadata)["grpc-status-details-bin"])


def info_of(status: grpc.Status) -> tuple[str, str, dict[str, str]]:
    """Return domain, reason and metadata."""
    info = ErrorInfo()
    assert rich_status(status).details[0].Unpack(info)
    return info.domain, info.reason, dict(info.metadata)


def statuses() -> dict[type[Exception], tuple[str, str, bool]]:
    """Return every error class that can be raised, with its status code, its reason and whether to retry."""
    found: dict[type[Exception], tuple[str, str, bool]] = {
        error: (*SOLVER_STATUSES[error], False) for error in descendants(SolverError)
    }
    for error in descendants(errors.CoordinatorError) - GATHERING:
        found[error] = error.code, error.reason, error.retry_delay_s is not None
    return found


def test_every_error_class_that_can_be_raised_has_a_status_and_its_own_reason() -> None:
    found = statuses()
    assert all(code in Code.keys() for code, _, _ in found.values())  # noqa: SIM118
    assert len({reason for _, reason, _ in found.values()}) == len(found)
    assert all(not hasattr(base, "template") for base in GATHERING)


def test_only_a_retryable_error_has_a_retry_delay() -> None:
    assert delays_s(errors.JobNotFoundError(job_id="a")) == []
    reported_s = [delay_s for _ in range(20) for delay_s in delays_s(errors.SolverBusyError(limit=3))]
    assert all(1.0 <= delay_s < 2.0 for delay_s in reported_s)
    assert len(set(reported_s)) > 10, "clients that are refused together don't come again together"


def delays_s(error: errors.CoordinatorError) -> list[float]:
    retry, details = RetryInfo(), rich_status(to_status(error)).details
    return [retry.retry_delay.ToNanoseconds() / 1e9 for detail in details if detail.Unpack(retry)]


def test_long_values_are_cut() -> None:
    error = errors.InvalidFieldError(field="f", expected="little", found="x" * 10_000)
    assert len(to_status(error).details) < 1000
    assert len(error.metadata["found"]) == len(error.found) == 256
    solver = SolverError("y" * 10_000, cycle="z" * 10_000)
    assert rich_status(to_status(solver)).ByteSize() < 3000


class _Aborting:
    """A context that remembers the status that a call was ended with."""

    status: grpc.Status | None = None

    async def abort_with_status(self, status: grpc.Status) -> None:
        self.status = status


async def test_an_unexpected_error_is_internal_and_logged_with_its_traceback() -> None:
    @mapped
    async def broken(self: object, request: object, context: object) -> None:
        raise OverflowError("cannot convert float infinity to integer")

    call: Callable[[object, object, object], Awaitable[None]] = broken
    context = _Aborting()
    with capture_logs() as logs:
        await call(None, job_service_pb2.GetJobRequest(), context)
    assert context.status is not None
    assert context.status.code == grpc.StatusCode.INTERNAL
    assert info_of(context.status) == ("perseus", "INTERNAL", {"cause": "OverflowError"})
    (line,) = logs
    assert isinstance(line["exc_info"], OverflowError)
    assert (line["log_level"], line["where"]) == ("error", "broken")


def test_every_reason_is_documented() -> None:
    """The expected text is the table as it must be in the page."""
    page = (Path(__file__).parents[3] / "docs" / "errors.md").read_text()
    rows = [
        f"| `{reason}` | {code} | {'retry' if is_retryable else 'permanent'} | {_first_line(error)} |"
        for error, (code, reason, is_retryable) in sorted(statuses().items(), key=lambda item: item[1][1])
    ]
    expected = "\n".join(["| reason | status | | what it says |", "|---|---|---|---|", *rows, ""])
    assert [line for line in page.splitlines() if line.startswith("|")] == expected.splitlines(), expected


def _first_line(error: type[Exception]) -> str:
    assert error.__doc__ is not None
    return error.__doc__.splitlines()[0]
