"""Commands about a fleet whose jobs are spread over slots: real channels to small coordinators."""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise
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
from perseus.v1 import (
    event_pb2,
    info_service_pb2,
    info_service_pb2_grpc,
    job_pb2,
    job_service_pb2,
    job_service_pb2_grpc,
    power_service_pb2,
    power_service_pb2_grpc,
)
from tests.agent.coordinator_stub import until
from tests.cli import commands
from tests.ports import free_port

JOBS = [f"job-{number}" for number in range(6)]
Context = grpc.aio.ServicerContext[Any, Any]


class FakeCoordinator(
    info_service_pb2_grpc.InfoServiceServicer,
    job_service_pb2_grpc.JobServiceServicer,
    power_service_pb2_grpc.PowerServiceServicer,
):
    """Serves its slot's jobs, one on a page, and sends callers to where `addresses` has others."""

    def __init__(self, slot: int, addresses: dict[int, str], slot_count: int = 2) -> None:
        self.slot, self.addresses, self.slot_count = slot, addresses, slot_count
        self.address = addresses[slot] = f"127.0.0.1:{free_port()}"
        self.standbys: list[str] = []
        self.events = self.change_count = 0
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])

    async def start(self, *, knows_slots: bool = True) -> None:
        if knows_slots:
            info_service_pb2_grpc.add_InfoServiceServicer_to_server(self, self._server)
        job_service_pb2_grpc.add_JobServiceServicer_to_server(self, self._server)
        power_service_pb2_grpc.add_PowerServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    @property
    def own_jobs(self) -> list[str]:
        return [job_id for job_id in JOBS if slot_of(job_id, self.slot_count) == self.slot]

    def elsewhere(self, slot: int) -> grpc.Status:
        """Return the refusal of what is of another slot."""
        address = self.addresses.get(slot, "")
        return to_status(ServedElsewhereError(address=address, slot=slot, standbys=self.standbys))

    async def check(self, slot: int, context: Context) -> None:
        if slot != self.slot:
            await context.abort_with_status(self.elsewhere(slot))

    async def ListCoordinators(  # noqa: N802 - gRPC's name
        self, request: info_service_pb2.ListCoordinatorsRequest, context: Context
    ) -> info_service_pb2.ListCoordinatorsResponse:
        if self.slot >= self.slot_count:
            await self.check(1, context)  # it stands by
        found = [
            info_service_pb2.FleetCoordinator(address=address, slot=slot, is_answering=slot == self.slot)
            for slot, address in sorted(self.addresses.items())
        ]
        return info_service_pb2.ListCoordinatorsResponse(coordinators=found, slot_count=self.slot_count)

    async def ListJobs(  # noqa: N802 - gRPC's name
        self, request: job_service_pb2.ListJobsRequest, context: Context
    ) -> job_service_pb2.ListJobsResponse:
        number = int(request.page_token or 0)
        jobs = self.own_jobs
        return job_service_pb2.ListJobsResponse(
            jobs=[job_pb2.Job(job_id=job_id) for job_id in jobs[number : number + 1]],
            next_page_token=str(number + 1) if number + 1 < len(jobs) else "",
        )

    async def GetJob(  # noqa: N802 - gRPC's name
        self, request: job_service_pb2.GetJobRequest, context: Context
    ) -> job_service_pb2.GetJobResponse:
        await self.check(slot_of(request.job_id, self.slot_count), context)
        if request.job_id not in JOBS:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"job {request.job_id!r} is not registered")
        return job_service_pb2.GetJobResponse(
            job=job_pb2.Job(
                job_id=request.job_id,
                run_number=7,
                state_reason=self.address,
                last_event_sequence=self.events,
            )
        )

    async def ListJobEvents(  # noqa: N802 - gRPC's name
        self, request: job_service_pb2.ListJobEventsRequest, context: Context
    ) -> job_service_pb2.ListJobEventsResponse:
        return job_service_pb2.ListJobEventsResponse()

    async def FinishJob(  # noqa: N802 - gRPC's name
        self, request: job_service_pb2.FinishJobRequest, context: Context
    ) -> job_service_pb2.FinishJobResponse:
        await self.check(slot_of(request.job_id, self.slot_count), context)
        self.change_count += 1
        return job_service_pb2.FinishJobResponse(job=job_pb2.Job(job_id=request.job_id))

    async def WatchJob(  # noqa: N802 - gRPC's name
        self, request: job_service_pb2.WatchJobRequest, context: Context
    ) -> AsyncIterator[job_service_pb2.WatchJobResponse]:
        await self.check(slot_of(request.job_id, self.slot_count), context)
        yield job_service_pb2.WatchJobResponse(job=job_pb2.Job(job_id=request.job_id, run_number=7))
        for sequence in range(request.after_sequence + 1, self.events + 1):
            event = event_pb2.JobEvent(sequence=sequence, message=f"{sequence} of run {request.run_number}")
            yield job_service_pb2.WatchJobResponse(event=event)
        if self.events == 2:
            await asyncio.Event().wait()

    async def ListFeeds(  # noqa: N802 - gRPC's name
        self, request: power_service_pb2.ListFeedsRequest, context: Context
    ) -> power_service_pb2.ListFeedsResponse:
        return power_service_pb2.ListFeedsResponse(
            feeds=[power_service_pb2.FeedState(feed=f"known to {self.slot}")]
        )

    async def WatchFeeds(  # noqa: N802 - gRPC's name
        self, request: power_service_pb2.WatchFeedsRequest, context: Context
    ) -> AsyncIterator[power_service_pb2.WatchFeedsResponse]:
        yield power_service_pb2.WatchFeedsResponse(
            feed=power_service_pb2.FeedState(feed=f"known to {self.slot}")
        )
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the test ends it")


@pytest.fixture
async def coordinators() -> AsyncIterator[list[FakeCoordinator]]:
    addresses: dict[int, str] = {}
    found = [FakeCoordinator(slot, addresses) for slot in range(2)]  # type: ignore[abstract]
    for each in found:
        await each.start()
    yield found
    for each in found:
        await each.stop()


async def perseus(coordinator: FakeCoordinator | str, command: str) -> Result:
    address = coordinator if isinstance(coordinator, str) else coordinator.address
    return await asyncio.to_thread(commands.perseus, command, PERSEUS_COORDINATOR=address)


def jobs_in(listed: Result) -> list[str]:
    return [job["job_id"] for job in json.loads(listed.stdout)]


async def test_jobs_of_all_slots_are_listed_in_order_with_one_address(
    coordinators: list[FakeCoordinator],
) -> None:
    assert all(len(each.own_jobs) > 1 for each in coordinators), "several pages of each"
    for each in coordinators:
        listed = await perseus(each, "jobs list --format json")
        assert (listed.exit_code, listed.stderr) == (0, "")
        assert jobs_in(listed) == JOBS


async def test_who_does_not_answer_and_what_nobody_serves_is_said_in_one_line(
    coordinators: list[FakeCoordinator],
) -> None:
    for each in coordinators:
        each.slot_count = 3
    await coordinators[1].stop()
    listed = await perseus(coordinators[0], "jobs list --format json")
    assert listed.exit_code == 1
    assert jobs_in(listed) == coordinators[0].own_jobs
    (line,) = listed.stderr.splitlines()
    assert line == (
        f"warning: this is not all: nobody serves slot 2 of 3; "
        f"slot 1 at {coordinators[1].address} does not answer"
    )


async def test_a_coordinator_that_may_not_be_followed_to_is_named(
    coordinators: list[FakeCoordinator],
) -> None:
    coordinators[0].addresses[1] = "10.0.0.1:50051"
    listed = await perseus(coordinators[0], "jobs list --format json")
    assert jobs_in(listed) == coordinators[0].own_jobs
    assert "slot 1 is served at '10.0.0.1:50051', which may not be followed" in listed.stderr


async def test_an_older_coordinator_is_a_fleet_of_one() -> None:
    older = FakeCoordinator(0, {}, slot_count=1)  # type: ignore[abstract]
    await older.start(knows_slots=False)
    listed = await perseus(older, "jobs list --format json")
    await older.stop()
    assert (listed.exit_code, jobs_in(listed), listed.stderr) == (0, JOBS, "")


async def test_a_command_about_a_job_is_answered_where_that_is_served(
    coordinators: list[FakeCoordinator],
) -> None:
    for job_id in JOBS:
        for each in coordinators:
            shown = await perseus(each, f"jobs show {job_id} --format json")
            served_at = coordinators[slot_of(job_id, 2)].address
            assert json.loads(shown.stdout)["state_reason"] == served_at
    unknown = await perseus(coordinators[0], "jobs show jop-1")
    assert unknown.exit_code == 2
    assert "did you mean job-1?" in unknown.stderr


@pytest.mark.parametrize("address", ["", "10.0.0.1:50051"])
async def test_what_nobody_serves_or_may_not_be_followed_is_an_error(
    coordinators: list[FakeCoordinator], address: str
) -> None:
    coordinators[0].addresses[1] = address
    shown = await perseus(coordinators[0], f"jobs show {coordinators[1].own_jobs[0]}")
    assert shown.exit_code == 1
    assert shown.stderr == f"error: {coordinators[0].elsewhere(1).details}\n"


async def test_two_hops_are_the_most(coordinators: list[FakeCoordinator]) -> None:
    chain = [FakeCoordinator(0, {}) for _ in range(4)]  # type: ignore[abstract]
    for here, there in pairwise(chain):
        here.addresses[1] = there.address
    chain[3].slot = 1
    for each in chain:
        await each.start()
    job_id = chain[3].own_jobs[0]
    assert (await perseus(chain[1], f"jobs show {job_id}")).exit_code == 0
    assert (await perseus(chain[0], f"jobs show {job_id}")).exit_code == 1
    for each in chain:
        await each.stop()


async def test_a_watch_goes_on_at_the_coordinator_that_takes_over(
    coordinators: list[FakeCoordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(escaping_channel, "RETRY_S", 0.01)
    heard: list[object] = []
    escape = escaping_channel.escape

    def noted(message: Any) -> None:
        escape(message)
        if isinstance(message, job_service_pb2.WatchJobResponse):
            heard.append(message)

    monkeypatch.setattr(escaping_channel, "escape", noted)
    first, other = coordinators
    other.events = 2  # and then it waits
    watching = asyncio.create_task(perseus(first, f"jobs watch {other.own_jobs[0]} --format json"))
    successor = FakeCoordinator(1, dict(first.addresses))  # type: ignore[abstract]
    successor.events = 4
    await successor.start()
    await until(lambda: len(heard) == 3, "the job and both events")
    await other.stop()
    await asyncio.sleep(0.05)  # nobody serves the slot meanwhile
    first.addresses[1] = successor.address
    watched = await watching
    await successor.stop()
    assert watched.exit_code == 0
    assert f"{other.address} has gone: waiting 60 s" in watched.stderr
    updates = [json.loads(line) for line in watched.stdout.splitlines()]
    messages = [update["event"]["message"] for update in updates if "event" in update]
    assert messages == ["1 of run 7", "2 of run 7", "3 of run 7", "4 of run 7"]


class Takeover:
    """Time that passes only while a command waits; the standby takes slot 1 over after the second wait."""

    def __init__(self, coordinators: list[FakeCoordinator], monkeypatch: pytest.MonkeyPatch) -> None:
        self.holder = coordinators[1]
        self.standby = FakeCoordinator(9, coordinators[0].addresses)  # type: ignore[abstract]
        for each in (*coordinators, self.standby):
            each.standbys = [self.standby.address]
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
async def takeover(
    coordinators: list[FakeCoordinator], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Takeover]:
    found = Takeover(coordinators, monkeypatch)
    await found.standby.start()
    await found.holder.stop()
    yield found
    await found.standby.stop()


@pytest.mark.parametrize("command", ["jobs show", "jobs watch", "jobs finish --yes"])
async def test_a_command_waits_for_the_coordinator_that_takes_over_and_says_so(
    takeover: Takeover, coordinators: list[FakeCoordinator], command: str
) -> None:
    job_id = takeover.holder.own_jobs[0]
    addresses = f"{takeover.holder.address},{takeover.standby.address}"
    answered = await perseus(addresses, f"{command} {job_id}")
    assert (answered.exit_code, takeover.wait_count) == (0, 2)
    assert answered.stderr == f"warning: {takeover.text}: waiting 60 s for a coordinator\n"
    assert takeover.standby.change_count == ("finish" in command)


@pytest.mark.parametrize("is_list", [False, True])
async def test_a_command_that_has_waited_for_too_long_says_who_stands_by(
    takeover: Takeover, is_list: bool
) -> None:
    takeover.takes_over = False
    command = "jobs list" if is_list else f"jobs show {takeover.holder.own_jobs[0]}"
    failed = await perseus(takeover.standby, command)
    assert (failed.exit_code, takeover.wait_count) == (1, 4)
    assert failed.stderr.splitlines()[1:] == [f"error: {takeover.text}; nobody took it over in 60 s"]


async def test_without_a_standby_the_coordinator_that_does_not_answer_is_named(takeover: Takeover) -> None:
    takeover.standby.standbys = []
    failed = await perseus(takeover.standby, f"jobs show {takeover.holder.own_jobs[0]}")
    assert (failed.exit_code, takeover.wait_count) == (1, 0)
    assert failed.stderr.startswith(f"error: no coordinator at {takeover.holder.address}: ")


async def test_top_has_the_jobs_of_all_and_the_feeds_of_slot_0(coordinators: list[FakeCoordinator]) -> None:
    for each in coordinators:
        shown = json.loads((await perseus(each, "top --format json")).stdout)
        assert [job["job_id"] for job in shown["jobs"]] == JOBS
        assert [feed["feed"] for feed in shown["feeds"]] == ["known to 0"]
        feeds = json.loads((await perseus(each, "power feeds --format json")).stdout)
        assert [feed["feed"] for feed in feeds] == ["known to 0"]
    watched = await perseus(coordinators[0], "power watch")
    assert watched.exit_code == 1, "it does not go on with what slot 1 knows"
    assert watched.stdout == "known to 0: 0 W drawn, no limit\n"
    await coordinators[0].stop()
    shown_without = await perseus(coordinators[1], "top --format json")
    assert shown_without.exit_code == 1
    assert json.loads(shown_without.stdout)["feeds"] == []


async def test_a_fleet_is_asked_by_way_of_another_if_the_first_is_gone(
    coordinators: list[FakeCoordinator],
) -> None:
    request = job_service_pb2.ListJobsRequest()

    def ask(fleet: Fleet) -> list[str]:
        return [job.job_id for job in fleet.jobs(request)]

    with escaping(Connection(coordinators[0].address)) as channel, Fleet(channel) as fleet:
        assert await asyncio.to_thread(ask, fleet) == JOBS
        await coordinators[0].stop()
        del coordinators[0].addresses[0]
        assert await asyncio.to_thread(ask, fleet) == coordinators[1].own_jobs
        assert fleet.missing == ["nobody serves slot 0 of 2"]
        with pytest.raises(typer.Exit):
            await asyncio.to_thread(fleet.keeper)
