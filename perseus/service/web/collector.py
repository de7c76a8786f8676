"""The coordinator's state, as readings. It only reads: it waits for nothing and counts nothing.

The cost of a scrape grows with the number of jobs, not with their size; ranks are read only where the
operator asks for them. Jobs are read in batches, between which the loop does other work. A job that makes the
coordinator fail here is quarantined, as anywhere else.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

from perseus.metrics import names
from perseus.metrics.readings import Readings
from perseus.release import release
from perseus.service.domain.figures import RunFigures
from perseus.service.domain.members import Fleet
from perseus.service.domain.model import FaultyPart, JobState, RankState
from perseus.service.domain.power import FeedStatus
from perseus.service.domain.profiling import ProfilingBudget, ProfilingCost, ProfilingLimit
from perseus.service.domain.records import JobRecord
from perseus.service.domain.stall import Stall, needs_person
from perseus.service.domain.statement import LedgerTotals
from perseus.service.shell.coordinator import Coordinator
from perseus.service.shell.live_run import LiveRun
from perseus.service.shell.thinning import Part
from perseus.v1 import event_pb2, job_pb2

MAX_JOBS = 1_000
"""How many jobs have their own series."""

_TURN_JOBS = 32
"""Jobs read at a time: some milliseconds."""

_TURN_RANKS = 1_024


class CoordinatorCollector:
    """Reads a coordinator.

    Args:
        has_ranks: publish every rank, too.
        late_limit_s: lateness above which the coordinator does not serve.
        expiries_s: returns the Unix time of expiry, by file of certificates.
        refusal_counts: refusals so far, by reason.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        has_ranks: bool,
        late_limit_s: float,
        expiries_s: Callable[[], Mapping[str, float]],
        refusal_counts: Mapping[str, int],
    ) -> None:
        self._coordinator = coordinator
        self._has_ranks = has_ranks
        self._late_limit_s = late_limit_s
        self._expiries_s = expiries_s
        self._refusal_counts = refusal_counts

    async def collect(self) -> Readings:
        """Read everything."""
        readings = Readings()
        self._read_process(readings)
        unfinished = [run for run in self._coordinator.live if not run.machine.record.has_finished]
        unfinished.sort(key=lambda run: run.machine.create_time_s)
        readings.put(names.HIDDEN_JOBS, max(0, len(unfinished) - MAX_JOBS))
        for number, run in enumerate(unfinished[-MAX_JOBS:]):
            if number % _TURN_JOBS == 0:
                await asyncio.sleep(0)
            self._read_job(readings, run)
            if self._has_ranks:
                await self._read_ranks(readings, run)
        return readings

    # ------------------------------------------------------------------ the process

    def _read_process(self, readings: Readings) -> None:
        coordinator = self._coordinator
        live, agents = coordinator.live, coordinator.agents
        _put_member(readings, coordinator.fleet, self._expiries_s())
        readings.put(names.SERVING, coordinator.late_s() <= self._late_limit_s)
        readings.put(names.LEASE_EPOCH, agents.lease_epoch, str(coordinator.fleet.served))
        states = Counter(run.machine.record.state for run in live)
        for state in JobState:
            readings.put(names.JOBS, states[state], state.value)
        readings.put(names.UNREADABLE_JOBS, len(live.unreadable))
        for part in FaultyPart:
            readings.put(names.JOB_FAULTS, live.fault_counts[part], part.name.lower())
        readings.put(names.LOOP_LAG, coordinator.lag_s)
        readings.put(names.LOOP_LATE, coordinator.late_total_s)
        readings.put(names.CLOCK_SKEW, agents.clock_skew_s(), "agents")
        readings.put(names.AGENT_STREAMS, agents.stream_count)
        readings.put(names.WATCH_STREAMS, sum(len(run.watchers) for run in live))
        readings.put(names.BATCHES, agents.taken_count, "taken")
        readings.put(names.BATCHES, agents.repeated_count, "repeated")
        readings.put(names.BATCHES, agents.passed_count, "refused")
        for left_out in Part:
            readings.put(names.BATCHES_THINNED, agents.thinned_counts[left_out], left_out.value)
        for reason, count in sorted(self._refusal_counts.items()):
            readings.put(names.REFUSALS, count, reason)
        self._read_store(readings)
        if (totals := coordinator.ledger.totals) is not None:
            _put_ledger(readings, totals)
        for feed, status in coordinator.power.feeds(of_share=True):
            _put_feed(readings, feed.name, status)
        for name, is_known, failure_count in coordinator.signals.states():
            readings.put(names.SIGNAL_KNOWN, is_known, name)
            readings.put(names.SIGNAL_FAILURES, failure_count, name)
        for name, pool in (("jobs", coordinator.job_solver), ("requests", coordinator.request_solver)):
            readings.put(names.SOLVER_QUEUE, pool.waiting_count, name)
            readings.put(names.SOLVER_BUSY, pool.busy_count, name)
            readings.put(names.SOLVES, pool.solved, name)
            readings.put(names.SOLVER_FAILURES, pool.failure_count, name)
            readings.put(names.SOLVER_CRASHES, pool.crash_count, name)
        readings.put(names.SOLVER_DASK_THREADS, coordinator.job_solver.cluster_thread_count)

    def _read_store(self, readings: Readings) -> None:
        writer = self._coordinator.writer
        readings.put(names.THROTTLED_STREAMS, writer.admission.waiting_count)
        readings.put(names.STORE_LATE, writer.late_s())
        readings.put(names.STORE_WAITING, writer.waiting_count)
        readings.put(names.STORE_COMMIT, writer.commits)
        readings.put(names.STORE_ENTRIES, writer.entry_count)
        readings.put(names.STORE_SIZE, self._coordinator.store_size_bytes)
        for kind, standby_count in self._coordinator.standbys.items():
            readings.put(names.STORE_STANDBYS, standby_count, kind)

    # ------------------------------------------------------------------ jobs

    def _read_job(self, readings: Readings, run: LiveRun) -> None:
        live = self._coordinator.live
        job = live.job(run, is_full=False)
        figures = live.figures(run)
        record = run.machine.record
        _put_state(readings, job, record, figures.stall)
        _put_measured(readings, job, record, figures)
        _put_profiling(readings, job, figures.profiling_cost, live.rules.profiling_budget)
        counts, job_id = run.event_counts, run.job_id
        readings.put(names.JOB_PLAN_SWITCHES, figures.switch_count, job_id)
        readings.put(
            names.JOB_PREDICTION_VIOLATIONS, counts[event_pb2.JOB_EVENT_TYPE_PREDICTION_VIOLATED], job_id
        )
        readings.put(names.JOB_DETECTED, counts[event_pb2.JOB_EVENT_TYPE_STRAGGLER_DETECTED], job_id)
        readings.put(names.JOB_GPU_ERRORS, counts[event_pb2.JOB_EVENT_TYPE_GPU_ERROR], job_id)
        readings.put(names.JOB_QUARANTINES, counts[event_pb2.JOB_EVENT_TYPE_QUARANTINED], job_id)

    async def _read_ranks(self, readings: Readings, run: LiveRun) -> None:
        ranks = self._coordinator.live.read(run, lambda state: list(state.ranks), lambda _: [])
        for index, rank in enumerate(ranks):
            if index % _TURN_RANKS == _TURN_RANKS - 1:
                await asyncio.sleep(0)
            place, clocks = rank.coordinates, rank.clocks
            labels = (run.job_id, str(place.pipeline), str(place.stage), str(place.tensor))
            readings.put(names.RANK_CONNECTED, rank.state is RankState.CONNECTED, *labels)
            readings.put(names.RANK_ITERATION, rank.iteration if rank.iteration >= 0 else None, *labels)
            foreign = rank.foreign_clock
            readings.put(names.RANK_CLOCK_FOREIGN, 1e6 * foreign.clock_mhz if foreign else 0, *labels)
            if clocks is None:
                continue
            share = clocks.on_clock_time_s / clocks.computation_time_s if clocks.computation_time_s else None
            readings.put(names.RANK_ON_CLOCK, share, *labels)
            readings.put(names.RANK_SET_LATENCY, clocks.set_latency_s, *labels)


async def collect_standing_by(fleet: Fleet, expiries_s: Callable[[], Mapping[str, float]]) -> Readings:
    """Read a coordinator that stands by."""
    readings = Readings()
    _put_member(readings, fleet, expiries_s())
    return readings


def _put_member(readings: Readings, fleet: Fleet, expiries_s: Mapping[str, float]) -> None:
    readings.put(names.BUILD_INFO, 1, release())
    for file, expiry_s in expiries_s.items():
        readings.put(names.CERTIFICATE_EXPIRY, expiry_s, file)
    readings.put(names.STANDING_BY, fleet.served is None)
    readings.put(names.STANDBY_COORDINATORS, fleet.standby_count())
    readings.put(names.IDLE_SLOTS, len(fleet.idle_slots()))
    readings.put(names.LATE_RENEWALS, fleet.late_renewal_count)
    readings.put(names.CLOCK_SKEW, fleet.database_skew_s, "database")


def _put_ledger(readings: Readings, totals: LedgerTotals) -> None:
    readings.put(names.LEDGER_ENERGY, totals.energy_j)
    readings.put(names.LEDGER_SAVED_ENERGY, totals.saved_energy_j)
    if (cost := totals.cost) is not None:
        readings.put(names.LEDGER_COST, cost.used)
        readings.put(names.LEDGER_SAVED_COST, cost.saved)
    if (carbon_g := totals.carbon_g) is not None:
        readings.put(names.LEDGER_CARBON, carbon_g.used)
        readings.put(names.LEDGER_SAVED_CARBON, carbon_g.saved)


def _put_feed(readings: Readings, name: str, status: FeedStatus) -> None:
    readings.put(names.FEED_LIMIT, status.limit_w, name)
    readings.put(names.FEED_POWER_CAP, status.power_cap_w, name)
    readings.put(names.FEED_POWER, status.measured_w, name)
    readings.put(names.FEED_MANAGED, status.managed_w, name)
    readings.put(names.FEED_UNMANAGED, status.unmanaged_w, name)
    readings.put(names.FEED_COMPLIANT, status.is_compliant, name)
    readings.put(names.FEED_ABOVE_CAP, status.is_above_power_cap, name)
    readings.put(names.FEED_TRANSITION, status.in_transition, name)
    readings.put(names.FEED_HELD_JOBS, len(status.held), name)


def _put_state(readings: Readings, job: job_pb2.Job, record: JobRecord, stall: Stall | None) -> None:
    job_id, now = job.job_id, record.state
    for state in JobState:
        if state is not JobState.FINISHED:
            readings.put(names.JOB_STATE, now is state, job_id, state.value)
    needs_resume = now is JobState.STOCK and needs_person(record.stock_reason, record.fall_back_count)
    readings.put(names.JOB_NEEDS_RESUME, needs_resume, job_id)
    readings.put(names.JOB_RUN, job.run_number, job_id)
    for rank_state in RankState:
        readings.put(
            names.JOB_RANKS,
            getattr(job.rank_counts, f"{rank_state.name.lower()}_count"),
            job_id,
            rank_state.value,
        )
    if stall is not None:
        readings.put(names.JOB_STALLED, 1, job_id, stall.reason.name.lower())


def _put_measured(readings: Readings, job: job_pb2.Job, record: JobRecord, figures: RunFigures) -> None:
    job_id, latest, totals = job.job_id, figures.latest, figures.totals
    if totals is not None:
        readings.put(names.JOB_ITERATIONS, totals.regular_count, job_id, "yes")
        readings.put(names.JOB_ITERATIONS, totals.irregular_count, job_id, "no")
        readings.put(names.JOB_TIME, totals.time_s, job_id)
        readings.put(names.JOB_ENERGY, totals.energy_j, job_id)
    readings.put(names.JOB_SAVED_ENERGY, figures.saved_energy_j, job_id)
    readings.put(names.JOB_POWER, figures.power_w, job_id)
    if latest is not None:
        energy_j = sum(latest.pipeline_energy_j)
        readings.put(names.JOB_ITERATION_TIME, latest.iteration_time_s, job_id)
        readings.put(names.JOB_ITERATION_ENERGY, energy_j or None, job_id)
    if record.baseline is not None:
        readings.put(names.JOB_BASELINE_TIME, record.baseline.time_s, job_id)
        readings.put(names.JOB_BASELINE_ENERGY, record.baseline.energy_j or None, job_id)
    if figures.period is not None:
        readings.put(names.JOB_MEASURED, figures.period.iteration_time_s, job_id)
    readings.put(names.JOB_PREDICTED, figures.predicted_time_s, job_id)
    if (saving := figures.saving) is not None:
        readings.put(names.JOB_SAVING, _ratio(saving.energy_percent), job_id)
        readings.put(names.JOB_SAVING_ERROR, _ratio(saving.energy_se_percent), job_id)
        readings.put(names.JOB_SLOWDOWN, _ratio(saving.slowdown_percent), job_id)
    overhead_s = job.iteration_overhead_s
    for point, time_s in (("t_min", job.t_min_s), ("t_star", job.t_star_s), ("t_slow", job.t_slow_s)):
        readings.put(names.JOB_FRONTIER, time_s + overhead_s if time_s else None, job_id, point)
    detected_count = sum(straggler.is_detected for straggler in record.stragglers)
    readings.put(names.JOB_STRAGGLERS, detected_count, job_id, "detected")
    readings.put(names.JOB_STRAGGLERS, len(record.stragglers) - detected_count, job_id, "reported")
    if job.HasField("budget_target_iteration_time_s"):
        target_s = job.budget_target_iteration_time_s + overhead_s
        readings.put(names.JOB_BUDGET_TARGET_TIME, target_s, job_id)
    if figures.straggler_time_s:
        readings.put(names.JOB_STRAGGLER_TIME, figures.straggler_time_s + overhead_s, job_id)


def _put_profiling(
    readings: Readings, job: job_pb2.Job, cost: ProfilingCost | None, budget: ProfilingBudget
) -> None:
    job_id = job.job_id
    readings.put(names.JOB_PROFILED, job.profiled_clock_count, job_id)
    if cost is not None:
        readings.put(names.JOB_PROFILING_ITERATIONS, cost.iteration_count, job_id)
        readings.put(names.JOB_PROFILING_TIME, cost.time_s, job_id)
        readings.put(names.JOB_PROFILING_EXTRA_TIME, cost.extra_time_s, job_id)
        readings.put(names.JOB_PROFILING_EXTRA_ENERGY, cost.extra_energy_j, job_id)
        used = max(budget.used(cost, limit) / budget.limit_of(limit) for limit in ProfilingLimit)
        readings.put(names.JOB_PROFILING_BUDGET, max(0.0, used), job_id)
    if job.HasField("profiling_progress"):
        progress = job.profiling_progress
        readings.put(names.JOB_PROFILING_TRIED, progress.tried_clock_count, job_id)
        readings.put(names.JOB_PROFILING_MAX, progress.max_clock_count, job_id)
        if progress.HasField("remaining_s"):
            readings.put(names.JOB_PROFILING_LEFT, progress.remaining_s, job_id)


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else percent / 100
