"""What stands in for a run's state machine once the coordinator has failed at it. Pure, like the machine.

A machine that raised something nobody thought of can't be trusted any more: it may have stopped halfway. So
it is asked nothing more, and what takes its place knows only what it gave out before: the job is shown at
stock, its ranks are told to go there, whoever speaks of it is refused, and it can be finished, abandoned,
deleted or resumed. Resuming builds a machine from what is stored (`LiveRuns.revive`); the store holds the job
as one at stock, so that a restart does the same and no plan comes back with it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from perseus.service.domain.commands import Command, RefuseRank, SendCeiling
from perseus.service.domain.errors import JobQuarantinedError, cut
from perseus.service.domain.figures import JobFigures, RankColumns
from perseus.service.domain.inputs import (
    Abandoned,
    AgentDisconnected,
    AgentHeard,
    AgentLeft,
    CeilingOrdered,
    EpochRenewed,
    FinishRequested,
    Input,
    LagNotFound,
    ProfileFound,
    RankLeft,
    RegisteredAgain,
    Solved,
    SolveFailed,
    SolveRetried,
    Tick,
)
from perseus.service.domain.job_pacing import JobPacing
from perseus.service.domain.job_power import JobPower
from perseus.service.domain.measured import MeasuredTimeline, Period, Saving
from perseus.service.domain.messages import NUMBERS
from perseus.service.domain.model import (
    LOST_VERSIONS,
    NO_VERSION,
    Ceiling,
    FaultyPart,
    JobState,
    Rank,
    RankFilter,
    RankState,
)
from perseus.service.domain.profiling import ProfilingCost
from perseus.service.domain.records import ForgetIterations, JobRecord, Registrations, StoredJob
from perseus.service.domain.specification import BudgetTerms, Coordinates, Registration
from perseus.service.domain.views import JobDetails, JobView
from perseus.service.job.iterations.iteration_log import IterationLog
from perseus.service.job.journal import Journal
from perseus.service.job.ranks.rank_table import LIVE
from perseus.service.job.rules import Rules
from perseus.solver import Frontier
from perseus.v1 import event_pb2

_MOST_ERROR_LENGTH = 256


@dataclass(frozen=True, slots=True)
class Fault:
    """What the coordinator failed at, and how."""

    part: FaultyPart
    error: str

    @classmethod
    def of(cls, part: FaultyPart, error: Exception) -> "Fault":
        """Describe an exception; whatever it quotes may be of any length, and not printable."""
        text = "".join(sign if sign.isprintable() else "?" for sign in cut(error, _MOST_ERROR_LENGTH))
        return cls(part, cut(f"{type(error).__name__}: {text}", _MOST_ERROR_LENGTH))

    def __str__(self) -> str:
        return f"the coordinator failed at {self.part.value} ({self.error})"


class QuarantinedRun:
    """A run that was put aside: at stock, or finished.

    Attributes: as of `JobMachine`.
    """

    def __init__(self, known: StoredJob, fault: Fault, rules: Rules, epoch: str, wall_time_s: float) -> None:
        """Stand in for what is known of a run, from now on; `begin` says what is to be done about it."""
        self.spec = known.spec
        self.run_number = known.run_number
        self.create_time_s = known.create_time_s
        self.registrations = known.registrations
        self.fault = fault
        self._rules = rules
        self._epoch = epoch
        self._record = known.record or JobRecord(
            policy=known.spec.policy,
            state=JobState.WAITING,
            state_reason="",
            version=NO_VERSION,
            baseline=None,
            is_profile_complete=False,
            stragglers=(),
            lag_s=0.0,
            profiling_cost=ProfilingCost(),
            given_up_clocks=(),
            stall=None,
            finish_time_s=None,
        )
        self._served = [rank for rank in known.ranks if rank.state in LIVE]
        self._ranks = {place: Rank(place) for place in known.spec.parallelism.all_coordinates()}
        for rank in known.ranks:
            is_told = rank.state in LIVE
            self._ranks[rank.coordinates] = (
                replace(rank, state=RankState.LOST, in_force_version=NO_VERSION) if is_told else rank
            )
        self._periods = known.periods
        self._journal = Journal(wall_time_s=wall_time_s)
        self._journal.sequence = known.last_sequence

    def begin(self) -> list[Command]:
        """Put the run at stock, and return what is to be stored, told and said to its ranks."""
        before, why = self._record.state, f"quarantined: {self.fault}"
        if before is JobState.FINISHED:
            return []
        if before is JobState.STOCK:
            self._keep(replace(self._record, state_reason=why))
        else:
            self._enter(JobState.STOCK, why)
        self._journal.store(ForgetIterations())
        self._journal.announce(
            event_pb2.JOB_EVENT_TYPE_QUARANTINED,
            why,
            event_pb2.Quarantined(
                part=NUMBERS[self.fault.part], error=self.fault.error, before=NUMBERS[before]
            ),
        )
        error = self._error()
        for rank in self._served:
            self._journal.do(RefuseRank(rank.coordinates, rank.instance_id, error, self.ceiling))
        return self._journal.take()

    def handle(self, event: Input, now_s: float, wall_time_s: float) -> list[Command]:
        """Take one input; see `JobMachine.handle`.

        Raises:
            JobQuarantinedError: it needs a machine.
        """
        self._journal.begin(now_s, wall_time_s)
        match event:
            case FinishRequested():
                self._finish("ended on request", wall_time_s)
            case Abandoned(why):
                self._finish(f"abandoned: {why}", wall_time_s)
            case RegisteredAgain(registration):
                self._note_registration(registration)
            case CeilingOrdered():
                self._limit(event.to_ceiling())
            case EpochRenewed(epoch):
                self._epoch = epoch
                self._keep(replace(self._record, version=self._record.version + LOST_VERSIONS))
            case AgentDisconnected() | AgentLeft() | AgentHeard() | RankLeft() | Tick():
                pass
            case Solved() | SolveRetried() | SolveFailed() | LagNotFound() | ProfileFound():
                pass
            case _:
                raise self._error()
        return self._journal.take()

    def next_deadline_s(self) -> float | None:
        """Nothing runs out here."""
        return None

    @property
    def state(self) -> JobState:
        """Where the job stands."""
        return self._record.state

    @property
    def ceiling(self) -> Ceiling | None:
        """The highest clock of its ranks, as a power budget wants it; None without one."""
        return self._record.ceiling

    @property
    def finish_time_s(self) -> float | None:
        """When it ended, on the wall clock; None if it has not."""
        return self._record.finish_time_s

    @property
    def has_finished(self) -> bool:
        """Whether the job has ended."""
        return self.state is JobState.FINISHED

    @property
    def has_live_rank(self) -> bool:
        """No rank is served."""
        return False

    @property
    def version(self) -> int:
        """The highest version of clocks that was used so far."""
        return self._record.version

    @property
    def last_event_sequence(self) -> int:
        """Number of the last event."""
        return self._journal.sequence

    def summary(self) -> JobView:
        """Return the job as others may see it, without details."""
        record = self._record
        return JobView(
            job_id=self.spec.job_id,
            run_number=self.run_number,
            state=record.state,
            state_reason=record.state_reason,
            stall=None,
            epoch=self._epoch,
            parallelism=self.spec.parallelism,
            rank_counts=Counter(rank.state for rank in self._ranks.values()),
            policy=record.policy,
            baseline=record.baseline,
            profiled_clock_count=0,
            profiling_cost=record.profiling_cost,
            profiling_budget=self._rules.profiling_budget,
            profiling_progress=None,
            t_min_s=0.0,
            t_star_s=0.0,
            t_slow_s=0.0,
            no_slowdown=None,
            min_planned_time_s=0.0,
            max_planned_time_s=0.0,
            straggler_count=len(record.stragglers),
            set_latency_s=record.set_latency_s,
            latency_cost_percent=0.0,
            create_time_s=self.create_time_s,
            finish_time_s=record.finish_time_s,
            last_event_sequence=self._journal.sequence,
            figures=self.figures(),
            signal_pacing=record.pacing,
            labels=self.registrations.labels,
        )

    def details(self) -> JobDetails:
        """Return what of the job grows with its size."""
        stragglers = self._record.stragglers
        return JobDetails(
            spec=self.spec,
            straggler_times_s={straggler.pipeline: 0.0 for straggler in stragglers},
            detected_stragglers=frozenset(each.pipeline for each in stragglers if each.is_detected),
            planned_iteration_time_s=(),
        )

    def view(self) -> JobView:
        """Return the job as others may see it, with its details."""
        return replace(self.summary(), details=self.details())

    def figures(self) -> JobFigures:
        """Return what metrics tell beyond the summary: nothing is measured any more."""
        return JobFigures(detected_count=sum(each.is_detected for each in self._record.stragglers))

    def power(self) -> JobPower:
        """What it draws is not measured any more."""
        return JobPower(None, self._record.policy.budget_terms or BudgetTerms())

    def pacing(self) -> JobPacing | None:
        """No signal paces it."""
        return None

    def hostnames(self) -> list[str]:
        """Return the hosts that the ranks are on, or were last, in their order; "" where none is known."""
        return [rank.hostname for rank in self._ranks.values()]

    def highest_clock_mhz(self) -> int:
        """Return the highest clock that a GPU of it has; 0 where none is known."""
        gpus = (rank.gpu for rank in self._ranks.values())
        return max((gpu.supported_clocks_mhz[0] for gpu in gpus if gpu is not None), default=0)

    def gpu_models(self) -> list[str]:
        """Return the models of the GPUs that the ranks are on, or were last, in their order; "" for none."""
        return ["" if rank.gpu is None else rank.gpu.model for rank in self._ranks.values()]

    def ranks(self, wanted: RankFilter, first_index: int = 0) -> Iterator[tuple[int, Rank]]:
        """Yield the wanted ranks from an index on, each with its index in the order of all ranks."""
        for index, rank in enumerate(self._ranks.values()):
            place = rank.coordinates
            if (
                index >= first_index
                and (not wanted.states or rank.state in wanted.states)
                and wanted.pipeline in (None, place.pipeline)
                and wanted.stage in (None, place.stage)
            ):
                yield index, rank

    def gpus(self) -> Mapping[Coordinates, str]:
        """No GPU has a rank that is served."""
        return {}

    def instance_of(self, _place: Coordinates) -> str:
        """No rank is served."""
        return ""

    def is_on_gpu(self, _place: Coordinates, _gpu_uuid: str) -> bool:
        """No GPU has a rank that is served."""
        return False

    def report(self, first_number: int) -> Iterator[tuple[Period, Saving | None]]:
        """Yield what was measured, from the period of a number on, and what it saved against stock."""
        return IterationLog(list(self._ranks), self._periods).report(first_number)

    def rank_columns(self, first_pipeline: int, pipeline_count: int) -> RankColumns:
        """Return so many pipelines' ranks from one on, in columns: nothing is measured any more."""
        counts = self.spec.parallelism
        width = counts.stage_count * counts.tensor_count
        own = slice(first_pipeline * width, (first_pipeline + pipeline_count) * width)
        ranks = list(self._ranks.values())[own]
        nothing = (None,) * len(ranks)
        return RankColumns(
            state=[rank.state for rank in ranks],
            iteration=[rank.iteration if rank.iteration >= 0 else None for rank in ranks],
            clock_mhz=nothing,
            slowness=nothing,
            power_w=nothing,
        )

    def timeline(self, _pipeline: int, *, from_baseline: bool = False) -> MeasuredTimeline:
        """There is none.

        Raises:
            JobQuarantinedError: always.
        """
        raise self._error()

    def solved_frontier(self) -> Frontier:
        """There is none.

        Raises:
            JobQuarantinedError: always.
        """
        raise self._error()

    def _error(self) -> JobQuarantinedError:
        return JobQuarantinedError(job_id=self.spec.job_id, cause=self.fault)

    def _limit(self, ceiling: Ceiling | None) -> None:
        self._keep(replace(self._record, ceiling=ceiling))
        for rank in self._served:
            self._journal.do(SendCeiling(rank.coordinates, rank.instance_id, ceiling))

    def _finish(self, why: str, wall_time_s: float) -> None:
        if not self.has_finished:
            self._record = replace(self._record, finish_time_s=wall_time_s)
            self._enter(JobState.FINISHED, why)

    def _note_registration(self, registration: Registration) -> None:
        registrations: Registrations = self.registrations.with_newest(registration)
        if registrations != self.registrations:
            self.registrations = registrations
            self._journal.store(registrations)

    def _enter(self, state: JobState, why: str) -> None:
        before = self._record.state
        self._keep(replace(self._record, state=state, state_reason=why, stall=None))
        self._journal.announce(
            event_pb2.JOB_EVENT_TYPE_STATE_CHANGED,
            f"{before.value} → {state.value}: {why}",
            event_pb2.StateChanged(before=NUMBERS[before], after=NUMBERS[state], reason=why),
        )

    def _keep(self, record: JobRecord) -> None:
        self._record = record
        self._journal.store(record)
