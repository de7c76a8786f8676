"""Commands of a job's state machine. The shell stores the records first, then executes the rest.

Nothing that depends on a record leaves the coordinator before the record is stored: after a crash, nobody
holds a version or an acknowledgement that the database does not know.
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
    """Accept an agent's rank, and send its maximum clock, if there is one."""

    rank: Coordinates
    instance_id: str
    max_clock: MaxClock | None = None


@dataclass(frozen=True, slots=True)
class SendMaxClock:
    """Send an agent another maximum clock for its rank, or lift it."""

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
    """Stop serving an agent's rank, for a reason: it goes to stock, up to `max_clock`, and joins again."""

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
    """Look up known profiles of each stage's work. If there are any, the answer is ProfileFound.

    `keys`: the works' keys, stage 0 first (`perseus.service.job.profiling.work_keys`).
    """

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SlowPlan:
    """A plan whose iterations take longer than predicted, and the stock baseline to compare them with."""

    plan: Plan
    median_time_s: float
    baseline_time_s: float


@dataclass(frozen=True, slots=True)
class Solve:
    """Solve a problem; the answer is Solved, SolveFailed or LagNotFound.

    With a slow plan, the lag between stages that explains it is found first, and used to solve the problem.
    Plans hold each clock long enough for GPUs that take `set_latency_s` to set one.
    """

    problem: Pipeline
    slow: SlowPlan | None = None
    set_latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Refine:
    """Refine one plan of a frontier; the answer is Refined or RefineFailed."""

    refinement: Refinement


@dataclass(frozen=True, slots=True)
class DropSolve:
    """Cancel the solve or refinement in progress; if it is still running, its answer is a failure."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Store an event, and publish it to watchers."""

    event: event_pb2.JobEvent


class ReportIteration(NamedTuple):
    """Publish a finished iteration of a pipeline to watchers."""

    summary: job_pb2.IterationSummary


class Store(NamedTuple):
    """Store a record in place of any of the same key."""

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
