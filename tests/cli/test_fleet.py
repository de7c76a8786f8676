"""Commands about a fleet whose jobs are spread over slots: real channels to small coordinators."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
import typer
from typer.testing import Result

from perseus.cli import escaping_channel
from perseus.cli.connection import Connection, escaping
from perseus.cli.fleet import Fleet
from perseus.job_id import slot_of
from perseus.service.api.statuses import to_status
from perseus.service.domain.errors import ServedElsewhereError
from perseus.v1 import event_pb2, info_service_pb2, job_pb2, job_service_pb2, power_service_pb2
from tests.cli.commands import perseus
from tests.cli.prepared import Answer, PreparedCoordinator

JOBS = [f"job-{number}" for number in range(6)]


class FakeCoordinator(PreparedCoordinator):
    """Serves its slot's jobs, one on a page, and sends callers to where `addresses` has others."""

    def __init__(self, slot: int, addresses: dict[int, str], slot_count: int = 2) -> None:
        super().__init__()
        self.slot, self.addresses, self.slot_count = slot, addresses, slot_count
        addresses[slot] = self.address
        self.standbys: list[str] = []
        self.event_count = self.change_count = 0
        self.answers: dict[str, Answer] = {
            "ListCoordinators": self.coordinators,
            "ListJobs": self.page,
            "GetJob": self.of_job(self.job),
            "ListJobEvents": job_service_pb2.ListJobEventsResponse(),
            "FinishJob": self.of_job(self.finished),
            "WatchJob": self.of_job(self.updates),
            "ListFeeds": power_service_pb2.ListFeedsResponse(feeds=[self.feed]),
            "WatchFeeds": [
                power_service_pb2.WatchFeedsResponse(feed=self.feed),
                (grpc.StatusCode.UNAVAILABLE, "the test ends it"),
            ],
        }
        self._is_ended = threading.Event()

    def stop(self) -> None:
        self._is_ended.set()
        super().stop()

    @property
    def feed(self) -> power_service_pb2.FeedState:
        return power_service_pb2.FeedState(feed=f"known to {self.slot}")

    @property
    def own_jobs(self) -> list[str]:
        return [job_id for job_id in JOBS if slot_of(job_id, self.slot_count) == self.slot]

    def elsewhere(self, slot: int) -> grpc.Status:
        """Return the refusal of what is of another slot."""
        address = self.addresses.get(slot, "")
        return to_status(ServedElsewhereError(address=address, slot=slot, standbys=self.standbys))

    def of_job(self, answer: Callable[[Any], Answer]) -> Callable[[Any], Answer]:
        """Return the answer about a job of this slot, and the refusal about others."""

        def checked(request: Any) -> Answer:
            slot = slot_of(request.job_id, self.slot_count)
            return answer(request) if slot == self.slot else self.elsewhere(slot)

        return checked

    def coordinators(self, _: info_service_pb2.ListCoordinatorsRequest) -> Answer:
        if self.slot >= self.slot_count:
            return self.elsewhere(1)  # it stands by
        known = [
            info_service_pb2.FleetCoordinator(address=address, slot=slot, is_answering=slot == self.slot)
            for slot, address in sorted(self.addresses.items())
        ]
        return info_service_pb2.ListCoordinatorsResponse(coordinators=known, slot_count=self.slot_count)

    def page(self, request: job_service_pb2.ListJobsRequest) -> Answer:
        number = int(request.page_token or 0)
        job_id, *more = self.own_jobs[number:]
        following = str(number + 1) if more else ""
        return job_service_pb2.ListJobsResponse(jobs=[job_pb2.Job(job_id=job_id)], next_page_token=following)

    def job(self, request: job_service_pb2.GetJobRequest) -> Answer:
        if request.job_id not in JOBS:
            return grpc.StatusCode.NOT_FOUND, f"job {request.job_id!r} is not registered"
        job = job_pb2.Job(job_id=request.job_id, run_number=7, state_reason=self.address)
        job.last_event_sequence = self.event_count
        return job_service_pb2.GetJobResponse(job=job)

    def finished(self, request: job_service_pb2.FinishJobRequest) -> Answer:
        self.change_count += 1
        return job_service_pb2.FinishJobResponse(job=job_pb2.Job(job_id=request.job_id))

    def updates(self, request: job_service_pb2.WatchJobRequest) -> Iterator[Answer]:
        yield job_service_pb2.WatchJobResponse(job=job_pb2.Job(job_id=request.job_id, run_number=7))
        for sequence in range(request.after_sequence + 1, self.event_count + 1):
            event = event_pb2.JobEvent(sequence=sequence, message=f"{sequence} of run {request.run_number}")
            yield job_service_pb2.WatchJobResponse(event=event)
        if self.event_count == 2:
            self._is_ended.wait()
            yield grpc.StatusCode.UNAVAILABLE, "it has ended"


@pytest.fixture
def coordinators() -> Iterator[list[FakeCoordinator]]:
    addresses: dict[int, str] = {}
    with FakeCoordinator(0, addresses) as first, FakeCoordinator(1, addresses) as second:
        yield [first, second]


def jobs_in(listed: Result) -> list[str]:
    return [job["job_id"] for job in json.loads(listed.stdout)]


def test_jobs_of_all_slots_are_listed_in_order_with_one_address(coordinators: list[FakeCoordinator]) -> None:
    assert all(len(each.own_jobs) > 1 for each in coordinators), "several pages of each"
    for each in coordinators:
        listed = each.perseus("jobs list --format json")
        assert (listed.exit_code, jobs_in(listed), listed.stderr) == (0, JOBS, "")


def test_who_does_not_answer_and_what_nobody_serves_is_said_in_one_line(
    coordinators: list[FakeCoordinator],
) -> None:
    first, other = coordinators
    first.slot_count = other.slot_count = 4
    first.addresses[3] = "10.0.0.1:50051"
    other.stop()
    listed = first.perseus("jobs list --format json")
    assert (listed.exit_code, jobs_in(listed)) == (1, first.own_jobs)
    unserved = "nobody serves slot 2 of 4; slot 3 is served at '10.0.0.1:50051', which may not be followed"
    silent = f"slot 1 at {other.address} does not answer"
    assert listed.stderr == f"warning: this is not all: {unserved}; {silent}\n"


def test_an_older_coordinator_is_a_fleet_of_one() -> None:
    with FakeCoordinator(0, {}, slot_count=1) as older:
        del older.answers["ListCoordinators"]
        listed = older.perseus("jobs list --format json")
    assert (listed.exit_code, jobs_in(listed), listed.stderr) == (0, JOBS, "")


def test_a_command_about_a_job_is_answered_where_that_is_served(coordinators: list[FakeCoordinator]) -> None:
    for job_id in JOBS:
        for each in coordinators:
            shown = each.perseus(f"jobs show {job_id} --format json")
            assert json.loads(shown.stdout)["state_reason"] == coordinators[slot_of(job_id, 2)].address
    unknown = coordinators[0].perseus("jobs show jop-1")
    assert (unknown.exit_code, "did you mean job-1?" in unknown.stderr) == (2, True)


def test_a_refusal_that_may_not_be_followed_is_the_error(coordinators: list[FakeCoordinator]) -> None:
    first, other = coordinators
    first.addresses[1] = "10.0.0.1:50051"
    refused = first.perseus(f"jobs show {other.own_jobs[0]}")
    assert (refused.exit_code, refused.stderr) == (1, f"error: {first.elsewhere(1).details}\n")


def test_a_watch_goes_on_at_the_coordinator_that_takes_over(
    coordinators: list[FakeCoordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = coordinators
    other.event_count = 2  # and then it waits
    escape = escaping_channel.escape

    def ends_after_two_events(message: Any) -> None:
        escape(message)
        if isinstance(message, job_service_pb2.WatchJobResponse) and message.event.sequence == 2:
            other.stop()

    with FakeCoordinator(1, dict(first.addresses)) as successor:
        successor.event_count = 4

        def sleep(_: float) -> None:
            first.addresses[1] = successor.address

        monkeypatch.setattr(escaping_channel, "escape", ends_after_two_events)
        monkeypatch.setattr("time.sleep", sleep)
        watched = first.perseus(f"jobs watch {other.own_jobs[0]} --format json")
    assert watched.exit_code == 0
    assert f"{other.address} has gone: waiting 60 s" in watched.stderr
    updates = [json.loads(line) for line in watched.stdout.splitlines()]
    messages = [update["event"]["message"] for update in updates if "event" in update]
    assert messages == ["1 of run 7", "2 of run 7", "3 of run 7", "4 of run 7"]


class Takeover:
    """Time that passes only while a command waits; the standby takes slot 1 over after the second wait."""

    def __init__(
        self, coordinators: list[FakeCoordinator], standby: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.holder, self.standby = coordinators[1], standby
        for each in (*coordinators, standby):
            each.standbys = [standby.address]
        self.wait_count = 0
        self.takes_over = True
        self._now_s = 0.0
        monkeypatch.setattr(escaping_channel, "time", self)

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, _: float) -> None:
        self.wait_count += 1
        self._now_s += 15
        if self.takes_over and self.wait_count == 2:
            self.standby.slot, self.standby.addresses[1] = 1, self.standby.address

    @property
    def text(self) -> str:
        return (
            f"slot 1 changes hands; standing by: {self.standby.address}; no answer from {self.holder.address}"
        )


@pytest.fixture
def takeover(coordinators: list[FakeCoordinator], monkeypatch: pytest.MonkeyPatch) -> Iterator[Takeover]:
    with FakeCoordinator(9, coordinators[0].addresses) as standby:
        coordinators[1].stop()
        yield Takeover(coordinators, standby, monkeypatch)


@pytest.mark.parametrize("command", ["jobs show", "jobs watch", "jobs finish --yes"])
def test_a_command_waits_for_the_coordinator_that_takes_over_and_says_so(
    takeover: Takeover, command: str
) -> None:
    addresses = f"{takeover.holder.address},{takeover.standby.address}"
    answered = perseus(f"{command} {takeover.holder.own_jobs[0]}", PERSEUS_COORDINATOR=addresses)
    assert (answered.exit_code, takeover.wait_count) == (0, 2)
    assert answered.stderr == f"warning: {takeover.text}: waiting 60 s for a coordinator\n"
    assert takeover.standby.change_count == ("finish" in command)


@pytest.mark.parametrize("is_list", [False, True])
def test_a_command_that_has_waited_for_too_long_says_who_stands_by(takeover: Takeover, is_list: bool) -> None:
    takeover.takes_over = False
    command = "jobs list" if is_list else f"jobs show {takeover.holder.own_jobs[0]}"
    failed = takeover.standby.perseus(command)
    assert (failed.exit_code, takeover.wait_count) == (1, 4)
    assert failed.stderr.splitlines()[1:] == [f"error: {takeover.text}; nobody took it over in 60 s"]


def test_without_a_standby_the_coordinator_that_does_not_answer_is_named(takeover: Takeover) -> None:
    takeover.standby.standbys = []
    failed = takeover.standby.perseus(f"jobs show {takeover.holder.own_jobs[0]}")
    assert (failed.exit_code, takeover.wait_count) == (1, 0)
    assert failed.stderr.startswith(f"error: no coordinator at {takeover.holder.address}: ")


def test_top_has_the_jobs_of_all_and_the_feeds_of_slot_0(coordinators: list[FakeCoordinator]) -> None:
    for each in coordinators:
        shown = json.loads(each.perseus("top --format json").stdout)
        assert [job["job_id"] for job in shown["jobs"]] == JOBS
        feeds = json.loads(each.perseus("power feeds --format json").stdout)
        assert [feed["feed"] for feed in (*shown["feeds"], *feeds)] == ["known to 0", "known to 0"]
    watched = coordinators[0].perseus("power watch")
    assert watched.exit_code == 1, "it does not go on with what slot 1 knows"
    assert watched.stdout == "known to 0: 0 W drawn, no limit\n"
    coordinators[0].stop()
    shown_without = coordinators[1].perseus("top --format json")
    assert (shown_without.exit_code, json.loads(shown_without.stdout)["feeds"]) == (1, [])


def test_a_fleet_is_asked_by_way_of_another_if_the_first_is_gone(coordinators: list[FakeCoordinator]) -> None:
    request = job_service_pb2.ListJobsRequest()
    first, other = coordinators
    with escaping(Connection(first.address)) as channel, Fleet(channel) as fleet:
        assert [job.job_id for job in fleet.jobs(request)] == JOBS
        first.stop()
        del first.addresses[0]
        assert [job.job_id for job in fleet.jobs(request)] == other.own_jobs
        assert fleet.missing == ["nobody serves slot 0 of 2"]
        with pytest.raises(typer.Exit):
            fleet.keeper()
