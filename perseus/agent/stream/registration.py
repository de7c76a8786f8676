"""Registering jobs on behalf of their trainers: one unary call each, repeated if the coordinator loses it.

The agent keeps a registration for as long as the job has trainers here. A coordinator that was absent at the
time, or has lost its state, refuses the job's ranks because it does not know the job; the agent then
registers it again. It repeats the same request also where ranks of another specification blocked it: they may
be gone.

If a run ends at once, before any rank here was accepted under it, its request was spent: the ranks of the
previous training were still leaving (for example, a trainer that detached and attached again). The agent then
registers the job with a new request. Otherwise somebody has ended the run, and it stays ended.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
import structlog

from perseus.agent.link.computation import Rank
from perseus.agent.link.packets import Registration, Reply
from perseus.agent.rank.messages import (
    JOB_ALREADY_EXISTS,
    JOB_FINISHED,
    JOB_NOT_FOUND,
    SPEC_MISMATCH,
    RankRefused,
)
from perseus.agent.stream import statuses
from perseus.agent.stream.connection import CHANNEL_OPTIONS
from perseus.agent.stream.translate import register_job_request
from perseus.tls.channels import Channels
from perseus.v1.job_service_pb2 import RegisterJobRequest
from perseus.v1.job_service_pb2_grpc import JobServiceStub

_log = structlog.get_logger(__name__)

_DEADLINE_S = 5.0
_INVALID = "INVALID_REGISTRATION"
# This many refusals in a row for the same reason, in three seconds, are lasting: departing ranks have left by
# then.
_LASTING_REFUSALS = 3
# Ranks that were leaving when a job was registered have left within this time.
_REPEAT_WINDOW_S = 10.0
# Statuses that do not concern the job: the coordinator is absent, busy or restarting.
_TRANSIENT = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAUTHENTICATED,  # until the agent has a valid token
}


@dataclass(frozen=True, slots=True)
class Registered:
    """The coordinator knows the job."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The coordinator did not answer, or cannot now; retry after `retry_delay_s`."""

    message: str
    retry_delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Refused:
    """The coordinator refuses the job; `reason` is the stable one of its ErrorInfo, or its status."""

    reason: str
    message: str


Outcome = Registered | Unreachable | Refused


class Registrar:
    """The registrations of an agent's jobs; `channels_of` returns the way to a job's coordinator."""

    def __init__(
        self, channels_of: Callable[[str], Channels], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._channels_of = channels_of
        self._monotonic = monotonic
        # To be repeated whenever the coordinator does not know the job.
        self._requests: dict[str, RegisterJobRequest] = {}
        # The jobs among them that the coordinator has accepted, as far as known, and when.
        self._taken: dict[str, float] = {}
        # The jobs with ranks here that were accepted since the latest registration.
        self._served: set[str] = set()
        self._running: dict[str, asyncio.Task[None]] = {}
        # The coordinator's latest reason to refuse a rank, with its count in a row; ranks with notified
        # trainers.
        self._refusals: dict[Rank, tuple[str, int]] = {}
        self._notified: set[Rank] = set()
        # When the coordinator may be asked again, if it gave a delay.
        self._not_before_s: dict[str, float] = {}

    async def register(
        self,
        job_id: str,
        registration: Registration,
        owner: str = "",
        labels: Sequence[tuple[str, str]] = (),
    ) -> Outcome:
        """Register a job of `owner`, and keep it registered unless it is refused for good."""
        try:
            # Off the event loop: a schedule of many computations takes long.
            request = await asyncio.to_thread(register_job_request, registration, owner, labels)
        except ValueError as error:
            return Refused(_INVALID, str(error))
        if request.spec.job_id != job_id:
            return Refused(
                _INVALID,
                f"registration: expected job {job_id!r}, as in the hello, found {request.spec.job_id[:64]!r}",
            )
        return await self._register(request)

    def rank_accepted(self, rank: Rank) -> Reply | None:
        """Note that the coordinator accepts a rank; return a notice if its trainer knows of a refusal."""
        self._served.add(rank.job_id)
        self._refusals.pop(rank, None)
        if rank not in self._notified:
            return None
        self._notified.discard(rank)
        return Reply(True, "", "the coordinator now accepts the rank", is_notice=True)

    def rank_refused(self, refused: RankRefused) -> Reply | None:
        """Note that the coordinator refuses a rank, and register its job again if that may help.

        Returns a notice for the rank's trainer, once, if the refusal lasts.
        """
        rank, reason = refused.rank, refused.reason
        before, count = self._refusals.get(rank, ("", 0))
        if before != reason:  # it is announced again every second
            count = 0
            log = _log.info if reason == JOB_NOT_FOUND else _log.warning
            log(
                "coordinator does not accept the rank yet",
                rank=str(rank),
                reason=reason,
                message=refused.message,
            )
        self._refusals[rank] = reason, count + 1
        is_taken = rank.job_id in self._taken
        is_spent = reason == JOB_FINISHED and self._is_spent(rank.job_id)
        if is_spent and (request := self._requests.get(rank.job_id)) is not None:
            request.request_id = uuid.uuid4().hex
        if reason == JOB_NOT_FOUND or is_spent or (reason in (JOB_FINISHED, SPEC_MISMATCH) and not is_taken):
            self._register_again(rank.job_id)
        if count + 1 != _LASTING_REFUSALS or reason == JOB_NOT_FOUND:
            return None
        self._notified.add(rank)
        message = f"the coordinator does not accept the rank: {refused.message}"
        return Reply(False, reason, f"{message}: training continues at stock clocks", is_notice=True)

    def _is_spent(self, job_id: str) -> bool:
        taken_s = self._taken.get(job_id)
        if taken_s is None or job_id in self._served:
            return False
        return self._monotonic() < taken_s + _REPEAT_WINDOW_S

    def forget_rank(self, rank: Rank) -> None:
        """Forget a rank whose trainer is gone."""
        self._refusals.pop(rank, None)
        self._notified.discard(rank)

    def forget_job(self, job_id: str) -> None:
        """Forget a job without trainers here: agents that have some keep it registered."""
        self._requests.pop(job_id, None)
        self._taken.pop(job_id, None)
        self._served.discard(job_id)
        self._not_before_s.pop(job_id, None)

    def close(self) -> None:
        """Cancel calls in progress."""
        for registering in self._running.values():
            registering.cancel()

    async def _register(self, request: RegisterJobRequest) -> Outcome:
        job_id = request.spec.job_id
        outcome = await register_job(self._channels_of(job_id), request)
        self._taken.pop(job_id, None)
        self._served.discard(job_id)
        self._not_before_s.pop(job_id, None)
        if isinstance(outcome, Unreachable) and outcome.retry_delay_s:
            self._not_before_s[job_id] = self._monotonic() + outcome.retry_delay_s
        if isinstance(outcome, Refused) and outcome.reason != JOB_ALREADY_EXISTS:
            self._requests.pop(job_id, None)
            return outcome
        self._requests[job_id] = request
        if isinstance(outcome, Registered):
            self._taken[job_id] = self._monotonic()
        return outcome

    def _register_again(self, job_id: str) -> None:
        request = self._requests.get(job_id)
        if request is None or job_id in self._running:
            return
        if self._monotonic() < self._not_before_s.get(job_id, 0.0):
            return

        async def register() -> None:
            match await self._register(request):
                case Registered():
                    _log.info("job registered", job=job_id)
                case Unreachable(message):
                    _log.info("job not registered yet", job=job_id, message=message)
                case Refused(_, message):
                    _log.error("registration refused", job=job_id, message=message)

        task = asyncio.create_task(register())
        self._running[job_id] = task
        task.add_done_callback(lambda _: self._running.pop(job_id, None))


async def register_job(channels: Channels, request: RegisterJobRequest) -> Outcome:
    """Send one registration to the coordinator, or to the one that it names."""
    channels = channels.beside()  # the stream goes its own way
    while True:
        try:
            async with channels.open(CHANNEL_OPTIONS) as channel:
                await JobServiceStub(channel).RegisterJob(request, timeout=_DEADLINE_S)
            return Registered()
        except grpc.aio.AioRpcError as error:
            if channels.follow(error):
                continue
            retry_delay_s = statuses.retry_delay_s(error)
            is_limit = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and retry_delay_s is not None
            if error.code() in _TRANSIENT or is_limit:
                reason = f"{error.code().name}: {error.details()}"
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    reason = await channels.diagnosis() or reason
                return Unreachable(f"coordinator at {channels.address}: {reason}", retry_delay_s or 0.0)
            return Refused(statuses.reason(error), error.details() or error.code().name)
