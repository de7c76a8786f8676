"""One run of a job as others may see it: summary, details, figures, ranks, what was measured.

What is asked for often costs no work over the run's ranks or pipelines; what grows with it says so.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from perseus.service.domain.errors import JobNotSolvedError, TimelineNotReadyError
from perseus.service.domain.figures import JobFigures, RankColumns
from perseus.service.domain.job_pacing import JobPacing
from perseus.service.domain.job_power import JobPower
from perseus.service.domain.measured import MeasuredTimeline, Period, Powers, Saving
from perseus.service.domain.model import Ceiling, JobState, Rank, RankFilter
from perseus.service.domain.records import Registrations
from perseus.service.domain.specification import BudgetTerms, Coordinates, JobSpec
from perseus.service.domain.views import JobDetails, JobView
from perseus.service.job.course import Course
from perseus.service.job.ranks.rank_table import LIVE
from perseus.service.job.rules import Rules
from perseus.solver import Computation, Frontier


class VisibleRun:
    """What is known of a run, and how it is told; `JobMachine` takes the inputs that change it.

    Attributes:
        spec: the job as registered.
        run_number: which run of it this is, from 1.
        registrations: who registered it.
        create_time_s: when it was registered, on the wall clock.
        schedule: its order of computations.
        log: its iterations and the report.
        timelines: the latest iteration of each pipeline.
        profiler: what is measured of its stages.
    """

    def __init__(
        self,
        spec: JobSpec,
        run_number: int,
        rules: Rules,
        epoch: str,
        create_time_s: float,
        created_s: float,
    ) -> None:
        """Begin where nothing is known.

        Args:
            spec: the job.
            run_number: which run of it this is, from 1.
            rules: what the operator has set.
            epoch: of the coordinator's state.
            create_time_s: when it was registered, on the wall clock.
            created_s: the same on the clock that never goes back.
        """
        self.spec = spec
        self.run_number = run_number
        self.registrations = Registrations(())
        self.create_time_s = create_time_s
        self._epoch = epoch
        self._profiling_budget = rules.profiling_budget
        self._course = course = Course(spec, rules, create_time_s, created_s)
        self.schedule = course.schedule
        self._journal, self._ranks, self._offers = course.journal, course.ranks, course.offers
        self._baseline, self._stragglers = course.baseline, course.stragglers
        self._planner, self._progress = course.planner, course.progress
        self.log, self.timelines, self.profiler = course.log, course.timelines, course.profiler

    @property
    def state(self) -> JobState:
        """Where the job stands."""
        return self._course.state

    @property
    def ceiling(self) -> Ceiling | None:
        """The highest clock where nothing is planned, as a power budget wants it; None without one."""
        return self._course.limiter.ceiling

    def summary(self) -> JobView:
        """Return the job as others may see it, without details: no work over its ranks or pipelines."""
        frontier = self._planner.frontier
        min_planned_s, max_planned_s = self._offers.planned_range_s
        return JobView(
            job_id=self.spec.job_id,
            run_number=self.run_number,
            state=self.state,
            state_reason=self._course.state_reason,
            stall=self._progress.stall,
            epoch=self._epoch,
            parallelism=self.spec.parallelism,
            rank_counts=self._ranks.counts.copy(),
            policy=self._planner.policy,
            baseline=self._baseline.iteration,
            profiled_clock_count=self.profiler.least_clock_count,
            profiling_cost=self.profiler.cost,
            profiling_budget=self._profiling_budget,
            profiling_progress=self.profiler.progress if self.state is JobState.PROFILING else None,
            t_min_s=frontier.t_min_s if frontier else 0.0,
            t_star_s=frontier.t_star_s if frontier else 0.0,
            t_slow_s=frontier.t_slow_s if frontier else 0.0,
            no_slowdown=self._planner.no_slowdown,
            min_planned_time_s=min_planned_s,
            max_planned_time_s=max_planned_s,
            straggler_count=len(self._stragglers),
            set_latency_s=self._planner.latency.planned_s,
            latency_cost_percent=frontier.points[0].latency_cost_percent if frontier else 0.0,
            create_time_s=self.create_time_s,
            finish_time_s=self._course.finish_time_s,
            last_event_sequence=self.last_event_sequence,
            figures=self.figures(),
            budget_time_s=self._planner.pace_s,
            signal_pacing=self._planner.pacing,
            has_baseline_timeline=self.timelines.baseline is not None,
            labels=self.registrations.labels,
        )

    def details(self) -> JobDetails:
        """Return what of the job grows with its size."""
        return JobDetails(
            spec=self.spec,
            straggler_times_s=self._planner.straggler_times_s(),
            detected_stragglers=frozenset(
                straggler.pipeline for straggler in self._stragglers if straggler.is_detected
            ),
            planned_iteration_time_s=self._offers.planned_times_s,
        )

    def view(self) -> JobView:
        """Return the job as others may see it, with its details."""
        return replace(self.summary(), details=self.details())

    def figures(self) -> JobFigures:
        """Return what metrics tell beyond the summary: no work over its ranks, either."""
        found = self.log.latest_period()
        period, saving = found if found and found[0].versions == self._offers.versions else (None, None)
        return JobFigures(
            latest=self.log.latest,
            totals=self.log.totals,
            period=period,
            saving=saving,
            promised_time_s=self._planner.promised_time_s(),
            detected_count=sum(straggler.is_detected for straggler in self._stragglers),
            straggler_time_s=max(self._planner.straggler_times_s().values(), default=None),
            switch_count=self._offers.switch_count,
            saved_energy_j=self._course.meter.saved_j,
        )

    def power(self) -> JobPower:
        """Return what it draws and can offer: no work over its ranks, but over its pipelines."""
        planner, latest = self._planner, self.log.latest
        known = JobPower(
            basis=planner.curve_basis() if self.state is JobState.PLANNED else None,
            terms=planner.policy.budget_terms or BudgetTerms(),
            pace_s=planner.pace_s,
            placement_count=self._ranks.placement_count,
        )
        if latest is None:
            return known
        energy_j = sum(latest.pipeline_energy_j) + latest.gap_energy_j
        return replace(
            known,
            power_w=energy_j / (latest.iteration_time_s + latest.gap_time_s) if energy_j else None,
            iteration_time_s=latest.iteration_time_s,
            is_changing=latest.is_touched or latest.versions != self._offers.versions,
            is_in_force=self._offers.are_in_force,
        )

    def pacing(self) -> JobPacing | None:
        """Return what it wants of a signal, and can do; None if its policy follows none."""
        return self._planner.job_pacing(is_planned=self.state is JobState.PLANNED)

    def hostnames(self) -> list[str]:
        """Return the hosts that the ranks are on, or were last, in their order; "" where none is known."""
        return [rank.hostname for rank in self._ranks]

    def highest_clock_mhz(self) -> int:
        """Return the highest clock that a GPU of it has; 0 where none is known."""
        gpus = (rank.gpu for rank in self._ranks)
        return max((gpu.supported_clocks_mhz[0] for gpu in gpus if gpu is not None), default=0)

    def gpu_models(self) -> list[str]:
        """Return the models of the GPUs that the ranks are on, or were last, in their order; "" for none."""
        return ["" if rank.gpu is None else rank.gpu.model for rank in self._ranks]

    def ranks(self, wanted: RankFilter, first_index: int = 0) -> Iterator[tuple[int, Rank]]:
        """Yield the wanted ranks from an index on, each with its index in the order of all ranks.

        Raises:
            PipelineOutOfRangeError, InvalidFieldError: the job has no such pipeline or stage.
        """
        return self._ranks.select(wanted, first_index)

    @property
    def last_event_sequence(self) -> int:
        """Number of the last event."""
        return self._journal.sequence

    @property
    def has_finished(self) -> bool:
        """Whether the job has ended."""
        return self.state is JobState.FINISHED

    @property
    def finish_time_s(self) -> float | None:
        """When the job ended, on the wall clock."""
        return self._course.finish_time_s

    @property
    def has_live_rank(self) -> bool:
        """Whether a rank is connected, or may come back within its lease."""
        return any(self._ranks.counts[state] for state in LIVE)

    @property
    def version(self) -> int:
        """The highest version of clocks that was used so far."""
        return self._offers.version

    def takes(self, spec_fingerprint: str) -> bool:
        """Tell whether ranks of this specification may join; what names none is not checked."""
        known = (some.spec_fingerprint for some in self.registrations.registrations)
        return not spec_fingerprint or spec_fingerprint in known

    def order(self, stage: int) -> tuple[Computation, ...]:
        """Return what the ranks of a stage compute, in order."""
        return self.schedule.orders[stage]

    def is_on_gpu(self, place: Coordinates, gpu_uuid: str) -> bool:
        """Tell whether a rank is served, or its lease still runs, on a GPU, and may have clocks there."""
        if place not in self._ranks or self.has_finished:
            return False
        rank = self._ranks[place]
        return rank.state in LIVE and rank.gpu is not None and rank.gpu.uuid == gpu_uuid

    def instance_of(self, place: Coordinates) -> str:
        """Return the agent instance that serves a rank, or did last; "" for none."""
        return self._ranks[place].instance_id if place in self._ranks else ""

    def gpus(self) -> dict[Coordinates, str]:
        """Return the UUIDs of the GPUs that the ranks are on, or were last."""
        return {rank.coordinates: rank.gpu.uuid for rank in self._ranks if rank.gpu is not None}

    def report(self, first_number: int) -> Iterator[tuple[Period, Saving | None]]:
        """Yield what was measured, from the period of a number on, and what it saved against stock."""
        return self.log.report(first_number)

    def timeline(self, pipeline: int, *, from_baseline: bool = False) -> MeasuredTimeline:
        """Return the latest whole iteration of a pipeline; or the one that is kept of the stock baseline.

        Raises:
            PipelineOutOfRangeError: the job has no such pipeline.
            TimelineNotReadyError: there is none yet.
        """
        self.spec.check_pipeline(pipeline)
        timeline = self.timelines.latest(pipeline)
        if from_baseline:
            pipeline, timeline = self.timelines.baseline or (pipeline, None)
        if timeline is None:
            raise TimelineNotReadyError(job_id=self.spec.job_id, pipeline=pipeline)
        frontier = self._planner.frontier
        return MeasuredTimeline(
            pipeline,
            timeline,
            Powers(self.profiler.profiles),
            tuple(frontier.pipeline.blocking_power_w) if frontier is not None else (),
        )

    def rank_columns(self, first_pipeline: int, pipeline_count: int) -> RankColumns:
        """Return so many pipelines' ranks from one on, in columns; fewer where there are no more."""
        counts, paces = self.spec.parallelism, self._stragglers.paces
        places = [
            (pipeline, stage)
            for pipeline in range(counts.pipeline_count)[first_pipeline:][:pipeline_count]
            for stage in range(counts.stage_count)
        ]
        ranks = [
            self._ranks[Coordinates(pipeline, stage, tensor)]
            for pipeline, stage in places
            for tensor in range(counts.tensor_count)
        ]

        def to_ranks(of_stages: Iterable[float | None]) -> list[float | None]:
            return [value for value in of_stages for _ in range(counts.tensor_count)]

        first_index = first_pipeline * counts.stage_count * counts.tensor_count
        return RankColumns(
            state=[rank.state for rank in ranks],
            iteration=[rank.iteration if rank.iteration >= 0 else None for rank in ranks],
            clock_mhz=to_ranks(self.timelines.mean_clock_mhz(*place) for place in places),
            slowness=to_ranks(
                None if paces is None or math.isnan(paces[stage, pipeline]) else float(paces[stage, pipeline])
                for pipeline, stage in places
            ),
            power_w=self.log.rank_powers_w(first_index, len(ranks)),
        )

    def solved_frontier(self) -> Frontier:
        """Return the frontier.

        Raises:
            JobNotSolvedError: there is none yet.
        """
        if self._planner.frontier is None:
            raise JobNotSolvedError(job_id=self.spec.job_id, state=self.state.value)
        return self._planner.frontier
