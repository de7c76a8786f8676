"""Registering jobs with a coordinator on a real port, and again if it does not know them."""

from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from structlog.testing import capture_logs

from perseus.agent.link.computation import Rank
from perseus.agent.link.packets import Registration
from perseus.agent.rank.messages import JOB_FINISHED, JOB_NOT_FOUND, SPEC_MISMATCH, RankRefused
from perseus.agent.stream.registration import Refused, Registered, Registrar, Unreachable
from perseus.job_id import slot_of
from perseus.tls.channels import Channels
from perseus.v1 import job_pb2, job_service_pb2
from tests.agent.coordinator_stub import CoordinatorStub, Inbox, coordinating, until

RANK = Rank("job", 0, 0, 0)
REGISTRATION = Registration({"jobId": "job"}, "request", "fingerprint")
UNKNOWN = RankRefused(RANK, JOB_NOT_FOUND, "no job 'job'")
KNOWN = job_service_pb2.RegisterJobRequest(
    spec=job_pb2.JobSpec(job_id="job"), request_id="request", spec_fingerprint="fingerprint"
)


@pytest.fixture
async def coordinator() -> AsyncIterator[CoordinatorStub]:
    async with coordinating() as coordinator:
        yield coordinator


@pytest.fixture
def registrar(coordinator: CoordinatorStub) -> Iterator[Registrar]:
    registrar = Registrar(channels_of(coordinator))
    yield registrar
    registrar.close()  # the last refusal may have begun another registration


def channels_of(coordinator: CoordinatorStub) -> Callable[[str], Channels]:
    channels = Channels(f"127.0.0.1:{coordinator.port}")
    return lambda job_id: channels


async def registered(coordinator: CoordinatorStub) -> None:
    await until(lambda: "job" in coordinator.inbox.jobs, "the job registered")


async def registered_last(registrar: Registrar) -> None:
    """A registration in progress would have ended before this one."""
    assert await registrar.register("last", Registration({"jobId": "last"}, "last", "")) == Registered()


async def test_a_job_is_registered_again_when_the_coordinator_does_not_know_it(
    coordinator: CoordinatorStub, registrar: Registrar
) -> None:
    assert await registrar.register("job", REGISTRATION) == Registered()
    assert coordinator.inbox.jobs == {"job": KNOWN}

    def is_known() -> bool:
        registrar.rank_refused(UNKNOWN)  # announced repeatedly: refusals during a registration have no effect
        return "job" in coordinator.inbox.jobs

    for _ in range(2):
        coordinator.inbox.jobs.clear()
        await until(is_known, "the job registered")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"jobId": "another"}, "expected job 'job', as in the hello, found 'another'"),
        ({"jobId": "job", "parallelism": 3}, "parallelism"),
    ],
)
async def test_an_invalid_registration_is_refused_and_changes_nothing(
    coordinator: CoordinatorStub, registrar: Registrar, spec: dict[str, object], message: str
) -> None:
    assert await registrar.register("job", REGISTRATION) == Registered()
    refused = await registrar.register("job", Registration(spec, "request", "fingerprint"))
    assert isinstance(refused, Refused)
    assert refused.reason == "INVALID_REGISTRATION"
    assert message in refused.message
    assert coordinator.inbox.jobs == {"job": KNOWN}
    coordinator.inbox.jobs.clear()
    registrar.rank_refused(UNKNOWN)
    await registered(coordinator)


async def test_a_job_that_is_refused_or_forgotten_is_not_registered_again(
    coordinator: CoordinatorStub, registrar: Registrar
) -> None:
    assert await registrar.register("job", REGISTRATION) == Registered()
    coordinator.inbox.refusal = "job 'job' has 4 stages, found 1"
    assert await registrar.register("job", REGISTRATION) == Refused(
        "JOB_EXISTS", "job 'job' has 4 stages, found 1"
    )
    coordinator.inbox.refusal = ""
    assert await registrar.register("other", Registration({"jobId": "other"}, "other", "")) == Registered()
    registrar.forget_job("other")
    coordinator.inbox.jobs.clear()
    registrar.rank_refused(UNKNOWN)
    registrar.rank_refused(RankRefused(Rank("other", 0, 0, 0), JOB_NOT_FOUND, ""))
    await registered_last(registrar)
    assert set(coordinator.inbox.jobs) == {"last"}


FINISHED = RankRefused(RANK, JOB_FINISHED, "job 'job' has finished")


async def test_a_spent_request_is_replaced(coordinator: CoordinatorStub, registrar: Registrar) -> None:
    assert await registrar.register("job", REGISTRATION) == Registered()
    coordinator.inbox.jobs.clear()
    assert registrar.rank_refused(FINISHED) is None
    await registered(coordinator)
    assert coordinator.inbox.jobs["job"].request_id not in ("", KNOWN.request_id)
    assert coordinator.inbox.jobs["job"].spec == KNOWN.spec


async def test_a_run_ended_by_somebody_stays_ended_and_its_trainer_is_notified_once(
    coordinator: CoordinatorStub, registrar: Registrar
) -> None:
    assert await registrar.register("job", REGISTRATION) == Registered()
    assert registrar.rank_accepted(RANK) is None
    coordinator.inbox.jobs.clear()
    reported = [
        notice for notice in [registrar.rank_refused(FINISHED) for _ in range(9)] if notice is not None
    ]
    (notice,) = reported
    assert (notice.ok, notice.reason, notice.is_notice) == (False, JOB_FINISHED, True)
    assert notice.message == (
        "the coordinator does not accept the rank: job 'job' has finished: training continues at stock clocks"
    )
    assert not coordinator.inbox.jobs
    accepted = registrar.rank_accepted(RANK)
    assert accepted is not None
    assert accepted.ok
    assert registrar.rank_accepted(RANK) is None


async def test_a_refusal_is_notified_once_for_each_reason(registrar: Registrar) -> None:
    leased = RankRefused(RANK, "RANK_SERVED", "another agent's lease runs")
    with capture_logs() as logs:
        for refused in (leased, leased, UNKNOWN, UNKNOWN):
            registrar.rank_refused(refused)
        assert [line["reason"] for line in logs] == [leased.reason, JOB_NOT_FOUND]
        registrar.rank_accepted(RANK)
        registrar.rank_refused(UNKNOWN)
        assert len(logs) == 3
        registrar.forget_rank(RANK)
        registrar.rank_refused(UNKNOWN)
        assert len(logs) == 4


@pytest.mark.parametrize("reason", [SPEC_MISMATCH, JOB_FINISHED])
async def test_a_blocked_job_is_registered_with_the_same_request_later(
    coordinator: CoordinatorStub, registrar: Registrar, reason: str
) -> None:
    coordinator.inbox.refusal = "job 'job' has live ranks"
    coordinator.inbox.refusal_reason = "JOB_ALREADY_EXISTS"
    refused = await registrar.register("job", REGISTRATION)
    assert refused == Refused("JOB_ALREADY_EXISTS", "job 'job' has live ranks")
    coordinator.inbox.refusal = ""
    registrar.rank_refused(RankRefused(RANK, reason, ""))
    await registered(coordinator)
    assert coordinator.inbox.jobs == {"job": KNOWN}
    # Its ranks were served, and then it ended: this agent must not begin another run.
    registrar.rank_accepted(RANK)
    coordinator.inbox.jobs.clear()
    registrar.rank_refused(RankRefused(RANK, reason, ""))
    await registered_last(registrar)
    assert coordinator.inbox.jobs.keys() == {"last"}


async def test_a_limit_with_a_retry_delay_is_waited_for(coordinator: CoordinatorStub) -> None:
    now_s = 100.0
    registrar = Registrar(channels_of(coordinator), lambda: now_s)
    inbox = coordinator.inbox
    inbox.refusal, inbox.refusal_reason, inbox.refusal_code = "too many jobs", "LIMIT_REACHED", 8
    assert await registrar.register("job", REGISTRATION) == Refused("LIMIT_REACHED", "too many jobs")
    inbox.retry_delay_s = 5
    outcome = await registrar.register("job", REGISTRATION)
    assert isinstance(outcome, Unreachable)
    assert (outcome.retry_delay_s, "too many jobs" in outcome.message) == (5.0, True)
    count, inbox.refusal = inbox.register_count, ""
    registrar.rank_refused(UNKNOWN)
    now_s = 104.9
    registrar.rank_refused(UNKNOWN)
    now_s = 105.0
    registrar.rank_refused(UNKNOWN)
    await registered(coordinator)
    assert inbox.register_count == count + 1, "no request before that"


async def test_a_job_of_another_slot_is_registered_where_that_is_served() -> None:
    own = slot_of("job", 2)
    async with coordinating(Inbox(slot=own, slot_count=2)) as there:
        inbox = Inbox(slot=1 - own, slot_count=2, addresses={own: f"127.0.0.1:{there.port}"})
        async with coordinating(inbox) as here:
            channels = channels_of(here)
            assert await Registrar(channels).register("job", REGISTRATION) == Registered()
            assert channels("job").address == f"127.0.0.1:{here.port}", "a stream's way stays its own"
            assert (here.inbox.jobs, there.inbox.jobs) == ({}, {"job": KNOWN})
            inbox.addresses[own] = ""
            outcome = await Registrar(channels).register("job", REGISTRATION)
            assert isinstance(outcome, Unreachable), "nobody serves the slot at present"
