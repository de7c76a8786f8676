"""What a job's state machine wants done, in this order: records stored, then the rest.

A record is stored before anything that follows from it leaves the coordinator: after a crash nobody holds a
version or an acknowledgement that the database does not know.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from perseus.service.iterations import Period
from perseus.service.model import Happening, IterationSummary, JobState, Offer, PipelineOffer, Rank, Straggler
from perseus.service.specification import Coordinates, OperatingPolicy
from perseus.service.stage_profiles import StageProfile
from perseus.service.telemetry import IterationColumns
from perseus.solver import Pipeline


@dataclass(frozen=True, slots=True)
class AcceptRank:
    """Tell the agent that its rank is served."""

    rank: Coordinates
    instance_id: str


@dataclass(frozen=True, slots=True)
class SendOffer:
    """Offer clocks to a rank."""

    rank: Coordinates
    instance_id: str
    offer: Offer


@dataclass(frozen=True, slots=True)
class EndStream:
    """End the stream of an agent that was silent for longer than its lease, so that it joins anew."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class FindProfile:
    """Look for a profile of the same GPUs and job shape; it comes back as ProfileFound, if there is one."""


@dataclass(frozen=True, slots=True)
class Solve:
    """Solve a problem; the answer comes back as Solved or SolveFailed."""

    problem: Pipeline


@dataclass(frozen=True, slots=True)
class Announce:
    """Store an event, and tell it to whoever watches."""

    happening: Happening


@dataclass(frozen=True, slots=True)
class ReportIteration:
    """Tell a finished iteration of a pipeline to whoever watches."""

    summary: IterationSummary


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job's own figures. `baseline_time_s` is 0 before it was measured."""

    policy: OperatingPolicy
    state: JobState
    version: int
    baseline_time_s: float
    is_profile_complete: bool
    stragglers: tuple[Straggler, ...]


@dataclass(frozen=True, slots=True)
class OfferRecord:
    """The offer that a pipeline has now."""

    pipeline: int
    offer: PipelineOffer


@dataclass(frozen=True, slots=True, eq=False)
class IterationRows:
    """A rank's rows of iterations; those up to `closed_through` are in the periods and no longer needed."""

    rank: Coordinates
    rows: IterationColumns
    closed_through: int


@dataclass(frozen=True, slots=True)
class ForgetIterations:
    """The stored rows of incomplete iterations are no longer needed."""


Record = JobRecord | Rank | OfferRecord | StageProfile | Period | IterationRows | ForgetIterations


def record_key(record: Record) -> Hashable:
    """Return what a record is about: a later one of the same key replaces it. Rows add up instead."""
    match record:
        case JobRecord():
            return (JobRecord,)
        case ForgetIterations():
            return (ForgetIterations,)
        case Rank():
            return record.coordinates
        case OfferRecord():
            return OfferRecord, record.pipeline
        case StageProfile():
            return StageProfile, record.stage, record.clock_mhz
        case Period():
            return Period, record.number
        case IterationRows():
            return id(record)


@dataclass(frozen=True, slots=True)
class Store:
    """Store a record; one of the same key is replaced."""

    record: Record


Command = AcceptRank | SendOffer | EndStream | FindProfile | Solve | Announce | ReportIteration | Store
