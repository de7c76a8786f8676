"""A run without a state machine: it has ended, or it is quarantined."""

from dataclasses import dataclass

from perseus.service.domain.errors import (
    CoordinatorError,
    JobFinishedError,
    JobNotSolvedError,
    JobQuarantinedError,
    TimelineNotReadyError,
    cut,
)
from perseus.service.domain.figures import LastMeasured, RankColumns
from perseus.service.domain.measured import MeasuredTimeline
from perseus.service.domain.model import FaultyPart, Rank
from perseus.service.domain.records import JobRecord, Registrations
from perseus.service.domain.specification import JobSpec
from perseus.solver import Frontier
from perseus.v1 import job_pb2

_MAX_ERROR_LENGTH = 256


@dataclass(frozen=True, slots=True)
class Fault:
    """The step at which the coordinator failed for a run, and the error."""

    part: FaultyPart
    error: str

    @classmethod
    def of(cls, part: FaultyPart, error: Exception) -> "Fault":
        """Describe an exception, whose text may be of any length and unprintable."""
        text = "".join(sign if sign.isprintable() else "?" for sign in cut(error, _MAX_ERROR_LENGTH))
        return cls(part, cut(f"{type(error).__name__}: {text}", _MAX_ERROR_LENGTH))

    def __str__(self) -> str:
        return f"the coordinator failed while {self.part.value} ({self.error})"


@dataclass(frozen=True, slots=True, eq=False)
class RunSnapshot:
    """A run as it was when its state machine was dropped. Its ranks and its report are in the store.

    Attributes:
        spec: the job as registered.
        run_number: the run's number, from 1.
        create_time_s: when it was registered, on the wall clock.
        registrations: who registered it.
        record: its stored record; nothing changes it in place.
        job: the full public view of it.
        fault: why it is quarantined; None if it ended regularly.
        ranks: of a quarantined run, the ranks that were served: they may have a maximum clock to be lifted.
        measured: None if not kept, or if there never was any.
    """

    spec: JobSpec
    run_number: int
    create_time_s: float
    registrations: Registrations
    record: JobRecord
    job: job_pb2.Job
    fault: Fault | None = None
    ranks: tuple[Rank, ...] = ()
    measured: LastMeasured | None = None

    def timeline(self, pipeline: int, *, from_baseline: bool = False) -> MeasuredTimeline:
        """Return the latest complete iteration of a pipeline, or the one kept from the stock baseline.

        Raises:
            PipelineOutOfRangeError: the job has no such pipeline.
            JobQuarantinedError, TimelineNotReadyError: there is none.
        """
        self.spec.check_pipeline(pipeline)
        found = None
        if self.measured is not None:
            found = self.measured.baseline if from_baseline else self.measured.timelines.get(pipeline)
        if found is not None:
            return found
        if self.fault is not None:
            raise self.refusal()
        raise TimelineNotReadyError(job_id=self.spec.job_id, pipeline=pipeline)

    def solved_frontier(self) -> Frontier:
        """Return the frontier.

        Raises:
            JobQuarantinedError, JobNotSolvedError: there is none.
        """
        if self.measured is not None and self.measured.frontier is not None:
            return self.measured.frontier
        if self.fault is not None:
            raise self.refusal()
        raise JobNotSolvedError(job_id=self.spec.job_id, state=self.record.state.value)

    def columns(self, first_pipeline: int, pipeline_count: int) -> RankColumns | None:
        """Return the ranks of `pipeline_count` pipelines from one on, in columns; None if not kept."""
        if self.measured is None:
            return None
        counts = self.spec.parallelism
        width = counts.stage_count * counts.tensor_count
        return self.measured.columns.cut(first_pipeline * width, pipeline_count * width)

    @property
    def has_live_rank(self) -> bool:
        """False: no rank is served."""
        return False

    def refusal(self) -> CoordinatorError:
        """Return the error that refuses requests to it."""
        if self.fault is None:
            return JobFinishedError(job_id=self.spec.job_id)
        return JobQuarantinedError(job_id=self.spec.job_id, cause=self.fault)

    @property
    def last_event_sequence(self) -> int:
        """The sequence of its last event."""
        return self.job.last_event_sequence
