"""Whether a failed call may be repeated while a slot changes hands, and what the message says."""

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from perseus.cli.takeover import Takeover
from perseus.service.api.statuses import to_status
from perseus.service.domain.errors import (
    CoordinatorError,
    DatabaseUnreadableError,
    JobNotFoundError,
    ServedElsewhereError,
)

READ, CHANGE = "/perseus.v1.JobService/GetJob", "/perseus.v1.JobService/FinishJob"
HOLDER, STANDBYS = "a:1", ("b:1", "c:1")


def error(cause: CoordinatorError) -> AioRpcError:
    status = to_status(cause)
    return AioRpcError(status.code, Metadata(), Metadata(*status.trailing_metadata), status.details)


def elsewhere(address: str = HOLDER, standbys: tuple[str, ...] = STANDBYS) -> AioRpcError:
    return error(ServedElsewhereError(address=address, slot=0, standbys=standbys))


def lost(details: str) -> AioRpcError:
    return AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), details)


REFUSED = lost("failed to connect to all addresses; last error: UNKNOWN: ipv4:a:1: Connection refused")
CLOSED = lost("Socket closed")
UNREADABLE = error(DatabaseUnreadableError())
SLOW = AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, Metadata(), Metadata(), "Deadline Exceeded")


@pytest.mark.parametrize(
    ("failure", "read", "change"),
    [
        (elsewhere(), True, True),
        (REFUSED, True, True),
        (CLOSED, True, False),
        (UNREADABLE, True, False),
        (SLOW, False, False),
        (error(JobNotFoundError(job_id="j")), False, False),
    ],
)
def test_a_change_is_repeated_only_where_it_was_surely_not_executed(
    failure: AioRpcError, read: bool, change: bool
) -> None:
    assert (Takeover(READ).may_repeat(HOLDER, failure), Takeover(CHANGE).may_repeat(HOLDER, failure)) == (
        read,
        change,
    )


def text_after(*heard: tuple[str, AioRpcError]) -> str:
    takeover = Takeover(READ)
    for address, failure in heard:
        takeover.may_repeat(address, failure)
    return takeover.text()


def test_a_slot_changes_hands_while_others_stand_by_and_its_holder_is_silent() -> None:
    both = "slot 0 changes hands; standing by: b:1, c:1"
    assert text_after(("b:1", elsewhere()), (HOLDER, REFUSED)) == f"{both}; no answer from a:1"
    assert text_after(("b:1", elsewhere(address=""))) == both, "its lease has run out"
    of_three = text_after(("b:1", elsewhere()), (HOLDER, REFUSED), ("c:1", CLOSED))
    assert of_three == "slot 0 changes hands; standing by: b:1; no answer from a:1, c:1"


@pytest.mark.parametrize(
    "heard",
    [
        [(HOLDER, REFUSED)],
        [("b:1", elsewhere())],
        [("d:1", elsewhere(standbys=())), (HOLDER, REFUSED)],
        [("b:1", elsewhere(standbys=("b:1",))), (HOLDER, REFUSED), ("b:1", REFUSED)],
        [("b:1", elsewhere()), (HOLDER, UNREADABLE)],
        [("b:1", elsewhere()), (HOLDER, REFUSED), ("b:1", SLOW)],
    ],
)
def test_nothing_changes_hands_without_a_standby_or_where_the_holder_answers(
    heard: list[tuple[str, AioRpcError]],
) -> None:
    assert text_after(*heard) == ""
