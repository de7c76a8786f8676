"""The jobs under power budgets: what they draw and can offer, and which orders they get.

Jobs without a change are not read. A job's target iteration time and maximum clock are compared with the
wanted ones at each tick, so an order that was lost, in a restart or a quarantine, is sent again.
"""

import asyncio
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import structlog

from perseus.service.domain.errors import CoordinatorError
from perseus.service.domain.inputs import BudgetTargetSet, MaxClockSet
from perseus.service.domain.job_power import NO_POWER, JobPower, PowerCurveBasis
from perseus.service.domain.power_reading import max_power_w
from perseus.service.domain.snapshot import RunSnapshot
from perseus.service.fleet.power.curve import StageFeeds, power_points
from perseus.service.fleet.power.demand import JobDemand, PowerPoint
from perseus.service.fleet.power.feeds import Feeds, placement, shares
from perseus.service.fleet.power.machine import FleetMachine
from perseus.service.fleet.power.messages import JobChanged, JobLeft, PowerMeasured
from perseus.service.fleet.power.readings import PowerTotals, completed_w
from perseus.service.job import views
from perseus.service.shell.live_run import LiveRun
from perseus.service.shell.live_runs import LiveRuns

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Known:
    """A job as the fleet knows it."""

    run_number: int
    power: JobPower
    placement: Sequence[Sequence[StageFeeds]]
    shares: Mapping[str, float]
    gpus: Mapping[str, float]
    """How many of its GPUs are on each feed."""
    highest_clock_mhz: int
    max_w: Mapping[str, float]
    """The most that its GPUs on each feed can draw: measured and planned powers are cut to this."""
    points: tuple[PowerPoint, ...] = ()

    def drawn_w(self) -> dict[str, float]:
        """Return what its latest iteration drew, by feed."""
        return self.possible_w(
            {feed: share * (self.power.power_w or 0.0) for feed, share in self.shares.items()}
        )

    def possible_w(self, powers_w: Mapping[str, float]) -> dict[str, float]:
        """Return powers by feed, each cut to what its GPUs there can draw."""
        return {feed: min(power_w, self.max_w.get(feed, 0.0)) for feed, power_w in powers_w.items()}

    def changed(self, job_id: str, max_clock_mhz: int | None) -> JobChanged:
        terms = self.power.terms
        demand = JobDemand(
            job_id,
            self.points,
            self.drawn_w(),
            terms.tolerance_percent,
            terms.weight,
            highest_clock_mhz=self.highest_clock_mhz,
        )
        return JobChanged(demand, self.power.iteration_time_s, max_clock_mhz)


class PoweredJobs:
    """All jobs that draw power now, in the form that the fleet needs."""

    def __init__(self, live: LiveRuns, feeds: Feeds) -> None:
        self._live = live
        self._feeds = feeds
        self._jobs: dict[str, _Known] = {}
        # By run of unknown draw that still has a target or a maximum clock: its feeds.
        self._idle_limited: dict[str, set[str]] = {}
        # Jobs that budgets leave out because of a fault, already logged.
        self._left_out: set[str] = set()
        # Since the start: jobs of unknown power, and until when they count as such.
        self._unknown: set[str] = set()
        self._unknown_until_s = -math.inf

    def begin(self, until_s: float) -> None:
        """Protect limited feeds after a start, until `until_s`.

        Jobs train on, while their agents may still be absent and their plans unsolved. While the draw of such
        a job on a limited feed is unknown, no target or maximum clock from before is lifted on that feed.
        """
        self._unknown, self._unknown_until_s = set(self._live.job_ids), until_s

    async def follow(self, job_id: str) -> JobChanged | JobLeft | None:
        """Read a changed job; return the input for the fleet, if any.

        A job with invalid figures is left out.
        """
        run = self._live.get(job_id)
        if run is None or run.machine.record.has_finished or not run.machine.has_live_rank:
            if run is not None:
                record = run.machine.record
                if record.max_clock is not None or record.budget_target_time_s is not None:
                    self._idle_limited[job_id] = set(shares(self._placed(run)))
            return self._leave(job_id)
        try:
            changed = await self._update(job_id, run)
        except Exception as error:
            if job_id not in self._left_out:
                self._left_out.add(job_id)
                log.error("a job is left out of power budgets", job_id=job_id, exc_info=error)
            return self._leave(job_id)
        self._idle_limited.pop(job_id, None)
        self._left_out.discard(job_id)
        return changed

    @property
    def job_ids(self) -> Collection[str]:
        """The jobs that draw power."""
        return self._jobs.keys()

    def measured(self, duration_s: float, drawn: PowerTotals) -> PowerMeasured:
        """Return the power drawn for `duration_s`, of all jobs whose draw is known.

        Agents' readings of this second count. Where they cover none or not all of a job's GPUs, its latest
        iteration counts, which may have run other plans.
        """
        jobs_w: dict[str, Mapping[str, float]] = {}
        changing, outdated = set(), set()
        for job_id, known in self._jobs.items():
            reported_w = drawn.jobs_w.get(job_id)
            if reported_w is None and known.power.power_w is None:
                continue
            jobs_w[job_id], is_whole = completed_w(
                reported_w or {}, drawn.gpu_counts.get(job_id, {}), known.drawn_w(), known.gpus
            )
            if is_whole:
                if not known.power.is_in_force:
                    changing.add(job_id)
            elif known.power.is_changing:
                changing.add(job_id)
                if known.power.is_in_force:
                    outdated.add(job_id)
        here = self._unknown & self._jobs.keys() - jobs_w.keys()
        self._unknown = {job_id for job_id in here if not self._jobs[job_id].points}
        others_w = {**dict.fromkeys(self._feeds.all(), 0.0), **drawn.others_w}
        return PowerMeasured(duration_s, jobs_w, others_w, changing, outdated, drawn.conflicting_counts)

    def shares(self, job_id: str) -> Mapping[str, float]:
        """Return the share of a job's GPUs on each feed; empty where budgets leave it out."""
        known = self._jobs.get(job_id)
        return {} if known is None else known.shares

    def order(self, fleet: FleetMachine, urgent: Mapping[str, bool], now_s: float) -> None:
        """Order the targets and maximum clocks that the fleet wants. `urgent`: of the targets just
        changed."""
        unknown = self._unknown if now_s < self._unknown_until_s else ()
        held = {feed for job_id in unknown for feed in self._jobs[job_id].shares if fleet.is_limited(feed)}
        for job_id, known in list(self._jobs.items()):
            run = self._live.get(job_id)
            if run is None:
                continue
            # The maximum clock first: it counts wherever no plan is in force, and the plan may take a moment.
            max_clock_mhz, target_time_s = fleet.max_clock_mhz(job_id), fleet.target_time_s(job_id)
            may_lift = held.isdisjoint(known.shares)
            if may_lift or not _is_lifted(run, max_clock_mhz):
                self._send_max_clock(run, max_clock_mhz, known.shares)
            # Without plans it keeps its target for the next ones, unless nothing limits its feeds any more.
            may_change = known.power.basis is not None or not any(map(fleet.is_limited, known.shares))
            if (
                may_change
                and target_time_s != known.power.target_time_s
                and (may_lift or (target_time_s or 0.0) >= (known.power.target_time_s or 0.0))
            ):
                self._send(run, BudgetTargetSet(target_time_s, urgent.get(job_id, target_time_s is not None)))
        for job_id, feeds in list(self._idle_limited.items()):
            if not any(map(fleet.is_limited, feeds)):
                del self._idle_limited[job_id]
                if (run := self._live.get(job_id)) is not None:
                    self._send_max_clock(run, None, ())
                    self._send(run, BudgetTargetSet(None, is_urgent=False))

    def _send_max_clock(
        self, run: LiveRun, max_clock_mhz: int | None, feeds: Sequence[str] | Mapping[str, float]
    ) -> None:
        outlasts_lease = max_clock_mhz is not None and any(
            feed in self._feeds.with_last_plan for feed in feeds
        )
        ordered = MaxClockSet(max_clock_mhz, outlasts_lease)
        if run.machine.record.max_clock != ordered.to_max_clock():
            self._send(run, ordered)

    def _send(self, run: LiveRun, order: BudgetTargetSet | MaxClockSet) -> None:
        with suppress(CoordinatorError):  # it has ended or is quarantined; the next tick sees that
            self._live.handle(run, order)

    def _leave(self, job_id: str) -> JobLeft | None:
        return None if self._jobs.pop(job_id, None) is None else JobLeft(job_id)

    async def _update(self, job_id: str, run: LiveRun) -> JobChanged | None:
        power = self._live.read(run, views.power, lambda _: NO_POWER)
        known = self._jobs.get(job_id)
        if power.power_w is None and known is not None:
            power = replace(power, power_w=known.power.power_w)  # it still draws what it drew
        if known is None or (known.run_number, known.power.placement_count) != (
            run.number,
            power.placement_count,
        ):
            placed = self._placed(run)
            highest_mhz = self._live.read(run, views.highest_clock_mhz, lambda _: 0)
            own_shares, gpu_count = shares(placed), run.machine.spec.rank_count
            gpus = {feed: share * gpu_count for feed, share in own_shares.items()}
            known_now = _Known(run.number, power, placed, own_shares, gpus, highest_mhz, self._max_w(run))
            known_now.points = await self._points(power.basis, known_now)
        else:
            known_now = replace(known, power=power)
            if _is_new(power.basis, known.power.basis):
                known_now.points = await self._points(power.basis, known_now)
        self._jobs[job_id] = known_now
        if known is None or known_now.points is not known.points or power.terms != known.power.terms:
            max_clock = run.machine.record.max_clock
            return known_now.changed(job_id, None if max_clock is None else max_clock.clock_mhz)
        return None

    def _max_w(self, run: LiveRun) -> dict[str, float]:
        hostnames = self._hostnames(run)
        models = self._live.read(run, views.gpu_models, lambda _: [""] * len(hostnames))
        found: dict[str, float] = {}
        for hostname, model in zip(hostnames, models, strict=True):
            feed = self._feeds.of_host(hostname)
            found[feed] = found.get(feed, 0.0) + max_power_w(model)
        return found

    def _hostnames(self, run: LiveRun) -> Sequence[str]:
        """Return the hosts of a run's ranks; of a quarantined run, those of the ranks that were served."""

        def of_snapshot(snapshot: RunSnapshot) -> list[str]:
            hosts = {rank.coordinates: rank.hostname for rank in snapshot.ranks}
            return [hosts.get(place, "") for place in snapshot.spec.parallelism.all_coordinates()]

        return self._live.read(run, views.hostnames, of_snapshot)

    def _placed(self, run: LiveRun) -> Sequence[Sequence[StageFeeds]]:
        counts = run.machine.spec.parallelism
        hostnames = self._hostnames(run)
        return placement(self._feeds, hostnames, counts.stage_count, counts.tensor_count)

    async def _points(self, basis: PowerCurveBasis | None, known: _Known) -> tuple[PowerPoint, ...]:
        """Return the points of a curve, made in a thread: every plan of the frontier is added up."""
        if basis is None:
            return ()
        points = await asyncio.to_thread(
            power_points,
            basis.frontier,
            known.placement,
            own_time_s=basis.own_time_s,
            slowdowns=basis.slowdowns,
            overhead_s=basis.overhead_s,
        )
        possible: list[PowerPoint] = []
        for point in points:
            power_w = known.possible_w(point.power_w)
            if not possible or sum(power_w.values()) < sum(possible[-1].power_w.values()):
                possible.append(replace(point, power_w=power_w))
        return tuple(possible)


def _is_lifted(run: LiveRun, max_clock_mhz: int | None) -> bool:
    """Return whether a maximum clock is higher than the present one of a run."""
    before = run.machine.record.max_clock
    if before is None or before.clock_mhz is None:
        return False
    return max_clock_mhz is None or max_clock_mhz > before.clock_mhz


def _is_new(basis: PowerCurveBasis | None, before: PowerCurveBasis | None) -> bool:
    return before is not None if basis is None else not basis.is_same(before)
