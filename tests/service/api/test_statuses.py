"""Every error has its status, and its line in the documentation."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from structlog.testing import capture_logs

from perseus.service.api.statuses import STATUSES, mapped, to_status
from perseus.service.domain import errors
from perseus.solver import DeadlineError, SolverError
from perseus.v1 import job_service_pb2


def descendants(base: type[Exception]) -> set[type[Exception]]:
    found = {base}
    for child in base.__subclasses__():
        found |= descendants(child)
    return found


GATHERING = {
    errors.CoordinatorError,
    errors.InvalidInputError,
    errors.ProtocolError,
    errors.AuthenticationError,
    errors.ForbiddenError,
}


def test_every_error_class_that_can_be_raised_is_mapped_with_its_own_reason() -> None:
    raised = descendants(errors.CoordinatorError) | descendants(SolverError)
    assert set(STATUSES) == raised - GATHERING
    assert len({status.reason for status in STATUSES.values()}) == len(STATUSES)
    assert all(not hasattr(base, "template") for base in GATHERING)


def test_every_error_class_is_drawn_in_its_modules_tree() -> None:
    assert errors.__doc__ is not None
    for error in descendants(errors.CoordinatorError) | descendants(errors.StartupError):
        assert error.__name__ in errors.__doc__


@pytest.mark.parametrize(
    ("error", "code", "reason", "metadata"),
    [
        (errors.JobNotFoundError(job_id="a"), grpc.StatusCode.NOT_FOUND, "JOB_NOT_FOUND", {"job_id": "a"}),
        (
            DeadlineError("too short", t_min_s=1.5, found=1.0),
            grpc.StatusCode.OUT_OF_RANGE,
            "ITERATION_TIME_TOO_SHORT",
            {"t_min_s": "1.5", "found": "1.0"},
        ),
    ],
)
def test_a_status_carries_reason_domain_and_every_value(
    error: errors.CoordinatorError | SolverError, code: grpc.StatusCode, reason: str, metadata: dict[str, str]
) -> None:
    status = to_status(error)
    assert (status.code, status.details) == (code, str(error))
    rich = Status.FromString(dict(status.trailing_metadata)["grpc-status-details-bin"])
    info = ErrorInfo()
    assert rich.details[0].Unpack(info)
    assert (info.domain, info.reason, dict(info.metadata)) == ("perseus", reason, metadata)


def test_a_retryable_error_says_when_to_try_again_and_others_do_not() -> None:
    assert not STATUSES[errors.JobNotFoundError].is_retryable
    assert delays_s(errors.JobNotFoundError(job_id="a")) == []
    assert STATUSES[errors.SolverBusyError].is_retryable
    told_s = [delay_s for _ in range(20) for delay_s in delays_s(errors.SolverBusyError(limit=3))]
    assert all(1.0 <= delay_s < 2.0 for delay_s in told_s)
    assert len(set(told_s)) > 10, "who is refused together does not come again together"


def delays_s(error: errors.CoordinatorError) -> list[float]:
    rich = Status.FromString(dict(to_status(error).trailing_metadata)["grpc-status-details-bin"])
    retry = RetryInfo()
    return [retry.retry_delay.ToNanoseconds() / 1e9 for detail in rich.details if detail.Unpack(retry)]


def test_long_values_are_cut() -> None:
    error = errors.InvalidFieldError(field="f", expected="little", found="x" * 10_000)
    assert len(to_status(error).details) < 1000
    assert len(error.metadata["found"]) == len(error.found) == 256
    solver = SolverError("y" * 10_000, cycle="z" * 10_000)
    assert len(b"".join(map(_value, to_status(solver).trailing_metadata))) < 3000


def _value(pair: tuple[str, str | bytes]) -> bytes:
    return pair[1] if isinstance(pair[1], bytes) else pair[1].encode()


class _Aborting:
    """A context that remembers the status that a call was ended with."""

    status: grpc.Status | None = None

    async def abort_with_status(self, status: grpc.Status) -> None:
        self.status = status


async def test_what_nobody_thought_of_is_internal_and_logged_with_its_traceback() -> None:
    @mapped
    async def broken(self: object, request: object, context: object) -> None:
        raise OverflowError("cannot convert float infinity to integer")

    call: Callable[[object, object, object], Awaitable[None]] = broken
    context = _Aborting()
    with capture_logs() as logs:
        await call(None, job_service_pb2.GetJobRequest(), context)
    assert context.status is not None
    assert context.status.code == grpc.StatusCode.INTERNAL
    rich = Status.FromString(dict(context.status.trailing_metadata)["grpc-status-details-bin"])
    info = ErrorInfo()
    assert rich.details[0].Unpack(info)
    assert (info.domain, info.reason, dict(info.metadata)) == (
        "perseus",
        "INTERNAL",
        {"cause": "OverflowError"},
    )
    (line,) = logs
    assert isinstance(line["exc_info"], OverflowError)
    assert (line["log_level"], line["where"]) == ("error", "broken")


def test_every_reason_is_documented() -> None:
    """What is expected here is the table as it should stand in the page."""
    page = (Path(__file__).parents[3] / "docs" / "errors.md").read_text()
    rows = [
        f"| `{status.reason}` | {Code.Name(status.code)} | "
        f"{'retry' if status.is_retryable else 'permanent'} | {_first_line(error)} |"
        for error, status in sorted(STATUSES.items(), key=lambda item: item[1].reason)
    ]
    expected = "\n".join(["| reason | status | | what it says |", "|---|---|---|---|", *rows, ""])
    assert [line for line in page.splitlines() if line.startswith("|")] == expected.splitlines(), expected


def _first_line(error: type[Exception]) -> str:
    assert error.__doc__ is not None
    return error.__doc__.splitlines()[0]
