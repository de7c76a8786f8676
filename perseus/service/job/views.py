"""Read access to a run: the contract's `Job`, and values for metrics, budgets and load shifting.

Frequent requests cost no work over the run's ranks or pipelines; functions whose cost grows with them
document it.
"""

import math
from collections.abc import Iterable, Mapping, Set

from perseus.service.domain.errors import JobNotSolvedError, TimelineNotReadyError
from perseus.service.domain.figures import LastMeasured, RankColumns, RunFigures
from perseus.service.domain.job_power import JobPower
from perseus.service.domain.job_signal import JobSignal
from perseus.service.domain.measured import MeasuredTimeline, Period, Powers, Saving, Timeline
from perseus.service.domain.messages import (
    NUMBERS,
    budget_to_proto,
    cost_to_proto,
    parallelism_to_proto,
    policy_to_proto,
    saving_to_proto,
    signal_target_to_proto,
    spec_to_proto,
    time_to_proto,
)
from perseus.service.domain.model import JobState, RankState
from perseus.service.domain.records import EndedRun, JobRecord, ListedRun, StoredJob
from perseus.service.domain.snapshot import RunSnapshot
from perseus.service.domain.specification import BudgetTerms, Coordinates
from perseus.service.domain.stall import MAX_CLOCK_STEP, Stall, next_step
from perseus.service.job.ranks.rank_table import LIVE
from perseus.service.job.rules import Rules
from perseus.service.job.run import Run
from perseus.solver import Frontier
from perseus.v1 import job_pb2

# ---------------------------------------------------------------------- the job as clients see it


def job(run: Run, *, is_full: bool) -> job_pb2.Job:
    """Return the job. Unless `is_full`, it costs no work over the job's ranks or pipelines."""
    record, planner, frontier = run.record, run.planner, run.planner.frontier
    shown = _of_record(run, record, run.rules, run.epoch, run.ranks.counts, run.buffer.sequence)
    missed = planner.missed_policy if record.state is JobState.PLANNED else ""
    waits = f"stock is measured once this has passed: {cause}" if (cause := run.baseline.waits_for) else ""
    shown.state_reason = _state_reason(record, run.progress.stall, missed, waits)
    if run.max_clock_enforcer.why_waiting(record.state) is not None:
        shown.next_step = MAX_CLOCK_STEP
    elif run.progress.stall is not None:
        shown.next_step = next_step(run.progress.stall.reason, run.spec.job_id)
    shown.profiled_clock_count = run.profiler.min_clock_count
    if record.state is JobState.PROFILING:
        progress = run.profiler.progress
        shown.profiling_progress.tried_clock_count = progress.tried_clock_count
        shown.profiling_progress.max_clock_count = progress.max_clock_count
        if progress.remaining_s is not None:
            shown.profiling_progress.remaining_s = progress.remaining_s
    if record.baseline is not None:
        shown.baseline.has_timeline = run.timelines.baseline is not None
    if frontier is not None:
        shown.t_min_s, shown.t_star_s, shown.t_slow_s = frontier.t_min_s, frontier.t_star_s, frontier.t_slow_s
        shown.latency_cost_percent = frontier.points[0].latency_cost_percent
    if frontier is not None or record.overhead_s:
        shown.iteration_overhead_s = planner.overhead_s
    if (found := planner.no_slowdown) is not None:
        shown.no_slowdown_time.iteration_time_s = found.time_s
        shown.no_slowdown_time.basis = NUMBERS[found.basis]
    shown.min_planned_iteration_time_s, shown.max_planned_iteration_time_s = run.offers.planned_range_s
    if record.budget_target_time_s is not None and run.offers.planned_range_s[1]:
        shown.budget_target_iteration_time_s = record.budget_target_time_s
    shown.figures.MergeFrom(_figures_to_proto(figures(run)))
    if record.has_finished:  # its last plan is no longer offered, but what it saved is still of interest
        shown.figures.power_w = 0.0
        last = run.log.latest_period()
        if last is not None and last[1] is not None and last[0].state is JobState.PLANNED:
            shown.figures.saving.CopyFrom(saving_to_proto(last[1]))
    if is_full:
        shown.spec.CopyFrom(spec_to_proto(run.spec))
        straggler_times_s = planner.straggler_times_s()
        for straggler in run.stragglers:
            shown.stragglers.add(
                pipeline=straggler.pipeline,
                iteration_time_s=straggler_times_s[straggler.pipeline],
                is_detected=straggler.is_detected,
            )
        shown.planned_iteration_time_s.extend(run.offers.planned_times_s)
    return shown


def stored_job(
    stored: StoredJob, record: JobRecord, rules: Rules, epoch: str, rank_counts: Mapping[RankState, int]
) -> job_pb2.Job:
    """Return a stored job, with its details, from its stored state only."""
    shown = _of_record(stored, record, rules, epoch, rank_counts, stored.last_sequence)
    shown.spec.CopyFrom(spec_to_proto(stored.spec))
    for straggler in record.stragglers:
        shown.stragglers.add(pipeline=straggler.pipeline, is_detected=straggler.is_detected)
    return shown


def listed_job(listed: ListedRun) -> job_pb2.Job:
    """Return a job as another coordinator stores it: what lists show, but for what is measured."""
    record = listed.record
    shown = job_pb2.Job(job_id=listed.job_id, run_number=listed.run_number, state=NUMBERS[JobState.WAITING])
    if listed.parallelism is not None:
        shown.parallelism.CopyFrom(parallelism_to_proto(listed.parallelism))
    if record is not None:
        shown.state = NUMBERS[record.state]
        shown.state_reason = _state_reason(record, record.stall)
        shown.straggler_count = len(record.stragglers)
        if record.state is JobState.STOCK:
            shown.next_step = next_step(record.stock_reason, listed.job_id, record.fall_back_count)
        if record.budget_target_time_s is not None and record.state is JobState.PLANNED:
            shown.budget_target_iteration_time_s = record.budget_target_time_s
    return shown


def without_details(full: job_pb2.Job) -> job_pb2.Job:
    """Return a job without the fields that grow with its size."""
    summary = job_pb2.Job()
    summary.CopyFrom(full)
    summary.ClearField("spec")
    summary.ClearField("stragglers")
    summary.ClearField("planned_iteration_time_s")
    return summary


def _of_record(
    run: Run | StoredJob,
    record: JobRecord,
    rules: Rules,
    epoch: str,
    rank_counts: Mapping[RankState, int],
    last_sequence: int,
) -> job_pb2.Job:
    shown = job_pb2.Job(
        job_id=run.spec.job_id,
        run_number=run.run_number,
        state=NUMBERS[record.state],
        state_reason=record.state_reason,
        epoch=epoch,
        parallelism=parallelism_to_proto(run.spec.parallelism),
        rank_counts=job_pb2.RankCounts(
            **{f"{state.name.lower()}_count": rank_counts.get(state, 0) for state in RankState}
        ),
        policy=policy_to_proto(record.policy),
        profiling_cost=cost_to_proto(record.earlier_profiling_cost.plus(run.counters.profiling_cost)),
        profiling_budget=budget_to_proto(rules.profiling_budget),
        straggler_count=len(record.stragglers),
        create_time=time_to_proto(run.create_time_s),
        last_event_sequence=last_sequence,
        set_latency_s=record.set_latency_s,
        figures=job_pb2.JobFigures(power_w=0.0 if record.has_finished else None),
        labels=[job_pb2.Label(key=key, value=value) for key, value in run.registrations.labels],
        next_step=next_step(record.stock_reason, run.spec.job_id, record.fall_back_count)
        if record.state is JobState.STOCK
        else "",
    )
    if record.baseline is not None:
        shown.baseline.iteration_time_s = record.baseline.time_s
        shown.baseline.energy_j = record.baseline.energy_j
    if record.finish_time_s is not None:
        shown.finish_time.CopyFrom(time_to_proto(record.finish_time_s))
    if record.signal_target is not None:
        shown.signal_target.CopyFrom(
            signal_target_to_proto(record.signal_target.after(run.counters.signal_count))
        )
    return shown


def _state_reason(record: JobRecord, stall: Stall | None, *more: str) -> str:
    """Return why a job is in its state, more about that, and why it makes no progress there."""
    parts = [record.state_reason, *more]
    if stall is not None:
        since = time_to_proto(math.floor(stall.since_time_s)).ToJsonString()
        parts.append(f"{stall}, since {since}")
    return "; ".join(filter(None, parts))


def _figures_to_proto(found: RunFigures) -> job_pb2.JobFigures:
    latest, period = found.latest, found.period
    energy_j = sum(latest.pipeline_energy_j) if latest is not None else 0.0
    return job_pb2.JobFigures(
        iteration_time_s=latest.iteration_time_s if latest is not None else None,
        energy_j=energy_j or None,
        power_w=found.power_w,
        mean_iteration_time_s=period.iteration_time_s if period is not None else None,
        saving=saving_to_proto(found.saving) if found.saving is not None else None,
        predicted_iteration_time_s=found.predicted_time_s,
        straggler_iteration_time_s=found.straggler_time_s or None,
    )


# ---------------------------------------------------------------------- for metrics and power management


def figures(run: Run) -> RunFigures:
    """Return the metrics beyond the job's fields: no work over its ranks, either."""
    period, saving = _under_offered_clocks(run)
    latest = run.log.latest if run.log.is_latest_current else None
    return RunFigures(
        stall=run.progress.stall,
        latest=run.log.latest,
        power_w=sum(latest.pipeline_energy_j) / latest.iteration_time_s or None if latest else None,
        totals=run.log.totals,
        period=period,
        saving=saving,
        predicted_time_s=run.planner.predicted_time_s(),
        straggler_time_s=max(run.planner.straggler_times_s().values(), default=None),
        switch_count=run.offers.switch_count,
        saved_energy_j=run.meter.saved_j,
        profiling_cost=run.counters.profiling_cost,
    )


def saving(run: Run) -> Saving | None:
    """Return what the plans in force save; None while that is unknown."""
    return _under_offered_clocks(run)[1]


def _under_offered_clocks(run: Run) -> tuple[Period | None, Saving | None]:
    """Return the measurements under the offered clocks, and what they save if these are plans."""
    found = run.log.latest_period()
    if not found or found[0].versions != run.offers.plan_versions:
        return None, None
    return found[0], found[1] if run.offers.planned_range_s[1] else None


def power(run: Run) -> JobPower:
    """Return the job's power and its power curve: no work over its ranks, but over its pipelines."""
    planner, record, latest = run.planner, run.record, run.log.latest
    energy_j = sum(latest.pipeline_energy_j) + latest.gap_energy_j if latest is not None else 0.0
    return JobPower(
        basis=planner.curve_basis() if record.state is JobState.PLANNED else None,
        terms=record.policy.budget_terms or BudgetTerms(),
        target_time_s=record.budget_target_time_s,
        power_w=energy_j / (latest.iteration_time_s + latest.gap_time_s) if latest and energy_j else None,
        iteration_time_s=latest.iteration_time_s if latest is not None else 0.0,
        is_changing=latest is not None
        and (latest.has_clock_change or latest.versions != run.offers.versions),
        is_in_force=latest is not None and run.offers.are_in_force,
        placement_count=run.ranks.placement_count,
    )


def signal_target(run: Run) -> JobSignal | None:
    """Return the job's inputs for load shifting; None if its policy follows no signal."""
    return run.planner.job_signal(is_planned=run.record.state is JobState.PLANNED)


def hostnames(run: Run) -> list[str]:
    """Return the hosts of the ranks, or their last ones, in order; "" if unknown."""
    return [rank.hostname for rank in run.ranks]


def highest_clock_mhz(run: Run) -> int:
    """Return the highest clock of the job's GPUs; 0 if unknown."""
    gpus = (rank.gpu for rank in run.ranks)
    return max((gpu.supported_clocks_mhz[0] for gpu in gpus if gpu is not None), default=0)


def gpu_models(run: Run) -> list[str]:
    """Return the GPU models of the ranks, or their last ones, in order; "" if unknown."""
    return ["" if rank.gpu is None else rank.gpu.model for rank in run.ranks]


def gpus(run: Run) -> dict[Coordinates, str]:
    """Return the UUIDs of the ranks' GPUs, or of their last ones."""
    return {rank.coordinates: rank.gpu.uuid for rank in run.ranks if rank.gpu is not None}


def lease_on_gpu_s(run: Run, place: Coordinates, gpu_uuid: str, now_s: float) -> float | None:
    """Return how much of its lease, s, a rank has left that is on a GPU and may have clocks there.

    None if it is not on that GPU, or no longer live.
    """
    if place not in run.ranks or run.record.has_finished:
        return None
    rank = run.ranks[place]
    is_there = rank.state in LIVE and rank.gpu is not None and rank.gpu.uuid == gpu_uuid
    return run.ranks.lease_left_s(place, now_s) if is_there else None


def live_gpus(run: Run) -> Set[tuple[Coordinates, str]]:
    """Return the ranks that are on a GPU and may have clocks there, each with the GPU's UUID."""
    if run.record.has_finished:
        return frozenset()
    return {
        (rank.coordinates, rank.gpu.uuid) for rank in run.ranks if rank.state in LIVE and rank.gpu is not None
    }


def instance_of(run: Run, place: Coordinates) -> str:
    """Return the agent instance that serves a rank, or last did; an empty string if unknown."""
    return run.ranks[place].instance_id if place in run.ranks else ""


# ---------------------------------------------------------------------- measurements and plans


def timeline(run: Run, pipeline: int, *, from_baseline: bool = False) -> MeasuredTimeline:
    """Return the latest complete iteration of a pipeline; or the kept one of the stock baseline.

    Raises:
        PipelineOutOfRangeError: the job has no such pipeline.
        TimelineNotReadyError: there is none yet.
    """
    run.spec.check_pipeline(pipeline)
    found = run.timelines.baseline if from_baseline else None
    if not from_baseline and (latest := run.timelines.latest(pipeline)) is not None:
        found = pipeline, latest
    if found is None:
        raise TimelineNotReadyError(job_id=run.spec.job_id, pipeline=pipeline)
    return _measured_timeline(run, *found)


def _measured_timeline(run: Run, pipeline: int, found: Timeline) -> MeasuredTimeline:
    frontier = run.planner.frontier
    return MeasuredTimeline(
        pipeline,
        found,
        Powers(run.profiler.profiles),
        frontier.pipeline.stock_blocking_power_w if frontier is not None else (),
    )


def rank_columns(run: Run, first_pipeline: int, pipeline_count: int) -> RankColumns:
    """Return the ranks of up to `pipeline_count` pipelines from one on, in columns."""
    counts, slowness = run.spec.parallelism, run.stragglers.slowness
    places = [
        (pipeline, stage)
        for pipeline in range(counts.pipeline_count)[first_pipeline:][:pipeline_count]
        for stage in range(counts.stage_count)
    ]
    ranks = [
        run.ranks[Coordinates(pipeline, stage, tensor)]
        for pipeline, stage in places
        for tensor in range(counts.tensor_count)
    ]

    def to_ranks(of_stages: Iterable[float | None]) -> list[float | None]:
        return [value for value in of_stages for _ in range(counts.tensor_count)]

    first_index = first_pipeline * counts.stage_count * counts.tensor_count
    return RankColumns(
        state=[rank.state for rank in ranks],
        iteration=[rank.iteration if rank.iteration >= 0 else None for rank in ranks],
        clock_mhz=to_ranks(run.timelines.mean_clock_mhz(*place) for place in places),
        slowness=to_ranks(
            None
            if slowness is None or math.isnan(slowness[stage, pipeline])
            else float(slowness[stage, pipeline])
            for pipeline, stage in places
        ),
        power_w=run.log.rank_powers_w(first_index, len(ranks)),
    )


def solved_frontier(run: Run) -> Frontier:
    """Return the frontier.

    Raises:
        JobNotSolvedError: there is none yet.
    """
    if run.planner.frontier is None:
        raise JobNotSolvedError(job_id=run.spec.job_id, state=run.record.state.value)
    return run.planner.frontier


def snapshot(run: Run, end: EndedRun) -> RunSnapshot:
    """Return the part of an ended run that is kept in memory, with its view at the end."""
    return RunSnapshot(
        run.spec,
        run.run_number,
        run.create_time_s,
        run.registrations,
        run.record,
        end.job,
        measured=end.measured,
    )


def ended(run: Run) -> EndedRun:
    """Return what is stored of an ended run; costs work over its ranks."""
    pipelines = range(run.spec.parallelism.pipeline_count)
    latest = {pipeline: run.timelines.latest(pipeline) for pipeline in pipelines}
    return EndedRun(
        job(run, is_full=True),
        LastMeasured(
            run.planner.frontier,
            {
                pipeline: _measured_timeline(run, pipeline, found)
                for pipeline, found in latest.items()
                if found is not None
            },
            _measured_timeline(run, *run.timelines.baseline) if run.timelines.baseline else None,
            rank_columns(run, 0, len(pipelines)),
        ),
    )
