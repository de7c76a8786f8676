"""Every error has its status."""

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from perseus.service.api.statuses import STATUSES, to_status
from perseus.service.domain import errors
from perseus.solver import DeadlineError, SolverError


def descendants(base: type[Exception]) -> set[type[Exception]]:
    found = {base}
    for child in base.__subclasses__():
        found |= descendants(child)
    return found


GATHERING = {errors.CoordinatorError, errors.InvalidInputError, errors.ProtocolError}


def test_every_error_class_that_can_be_raised_is_mapped_with_its_own_reason() -> None:
    raised = descendants(errors.CoordinatorError) | descendants(SolverError)
    assert set(STATUSES) == raised - GATHERING
    assert len({reason for _, reason in STATUSES.values()}) == len(STATUSES)
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
