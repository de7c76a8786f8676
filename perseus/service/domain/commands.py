"""What a job's state machine wants done, in this order: records stored, then the rest.

A record is stored before anything that follows from it leaves the coordinator: after a crash nobody holds a
version or an acknowledgement that the database does not know.
"""

from dataclasses import dataclass
from typing import NamedTuple

from perseus.service.domain.errors import CoordinatorError
from perseus.service.domain.model import MaxClock, Offer
from perseus.service.domain.records import Record
from perseus.service.domain.specification import Coordinates
from perseus.solver import Pipeline, Plan, Refinement
from perseus.v1 import event_pb2, job_pb2


@dataclass(frozen=True, slots=True)
class AcceptRank:
    """Tell the agent that its rank is served, and under which ceiling, if there is one."""

    rank: Coordinates
    instance_id: str
    max_clock: MaxClock | None = None


@dataclass(frozen=True, slots=True)
class SendMaxClock:
    """Tell the agent that its rank has another ceiling, or none any more."""

    rank: Coordinates
    instance_id: str
    max_clock: MaxClock | None


@dataclass(frozen=True, slots=True)
class SendOffer:
    """Offer clocks to a rank."""

    rank: Coordinates
    instance_id: str
    offer: Offer


@dataclass(frozen=True, slots=True)
class RefuseRank:
    """Tell the agent that its rank is served no longer, and why: it goes to stock, and asks again.

    While there is a ceiling, that is stock up to it.
    """

    rank: Coordinates
    instance_id: str
    why: CoordinatorError
    max_clock: MaxClock | None = None


@dataclass(frozen=True, slots=True)
class EndStream:
    """End the stream of an agent that was silent for longer than its lease, so that it joins anew."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class FindProfile:
    """Look for what is known of each stage's work; it comes back as ProfileFound, if there is anything.

    `keys`: what identifies it, stage 0 first (`perseus.service.job.profiling.work_keys`).
    """

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SlowPlan:
    """A plan whose iterations take longer than it promised, and the stock baseline to hold them against."""

    plan: Plan
    median_time_s: float
    baseline_time_s: float


@dataclass(frozen=True, slots=True)
class Solve:
    """Solve a problem; the answer comes back as Solved or SolveFailed, or as LagNotFound.

    With a slow plan, the lag between stages that explains it is found first, and the problem solved with it.
    Plans keep their clocks long enough for GPUs that take `set_latency_s` to set one.
    """

    problem: Pipeline
    slow: SlowPlan | None = None
    set_latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Refine:
    """Refine one plan of a frontier; the answer comes back as Refined or RefineFailed."""

    refinement: Refinement


@dataclass(frozen=True, slots=True)
class DropSolve:
    """Do no more what is being solved or refined; if that is in time, it comes back as failed."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Store an event, and tell it to whoever watches."""

    event: event_pb2.JobEvent


class ReportIteration(NamedTuple):
    """Tell a finished iteration of a pipeline to whoever watches."""

    summary: job_pb2.IterationSummary


class Store(NamedTuple):
    """Store a record; one of the same key is replaced."""

    record: Record


Command = (
    AcceptRank
    | SendMaxClock
    | SendOffer
    | RefuseRank
    | EndStream
    | FindProfile
    | Solve
    | Refine
    | DropSolve
    | Announce
    | ReportIteration
    | Store
)
