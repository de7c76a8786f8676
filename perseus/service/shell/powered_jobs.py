"""The jobs that power budgets reckon with: what they draw and can offer, and what they are ordered.

Of jobs that nothing happened to nothing is asked. A job's pace and ceiling are compared with those that it
has, so whatever got lost on the way, in a restart or a quarantine, is put right with the next look.
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
    """How many are on each feed."""
    highest_clock_mhz: int
    max_w: Mapping[str, float]
    """What its GPUs on each feed can draw: it counts with no more, whatever was measured or is planned."""
    points: tuple[PowerPoint, ...] = ()

    def drawn_w(self) -> dict[str, float]:
        """What its latest iteration drew."""
        return self.possible_w(
            {feed: share * (self.power.power_w or 0.0) for feed, share in self.shares.items()}
        )

    def possible_w(self, powers_w: Mapping[str, float]) -> dict[str, float]:
        """Return powers by feed, as far as its GPUs there can draw them."""
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
    """All jobs that draw power now, as a fleet is to know them."""

    def __init__(self, live: LiveRuns, feeds: Feeds) -> None:
        self._live = live
        self._feeds = feeds
        self._jobs: dict[str, _Known] = {}
        # Runs that draw nothing that is known, and yet are under a ceiling: their feeds.
        self._idle_capped: dict[str, set[str]] = {}
        # Jobs that can't be reckoned with, which the log has told of.
        self._left_out: set[str] = set()
        # Since the start: those of which no power is known, and until when that counts.
        self._unknown: set[str] = set()
        self._unknown_until_s = -math.inf

    def begin(self, until_s: float) -> None:
        """After a start, until then: jobs train on, whose agents may not be there yet nor plans solved again.

        While it is not known what one of them draws on a feed that is limited, no pace or ceiling from before
        is lifted on that feed.
        """
        self._unknown, self._unknown_until_s = set(self._live.job_ids), until_s

    async def follow(self, job_id: str) -> JobChanged | JobLeft | None:
        """Look at a job that something happened to; return what the fleet is to be told of it, if anything.

        One whose figures can't be is left out.
        """
        run = self._live.get(job_id)
        if run is None or run.machine.record.has_finished or not run.machine.has_live_rank:
            if run is not None and run.machine.record.max_clock is not None:
                self._idle_capped[job_id] = set(shares(self._placed(run)))
            return self._leave(job_id)
        try:
            changed = await self._update(job_id, run)
        except Exception as error:
            if job_id not in self._left_out:
                self._left_out.add(job_id)
                log.error("a job is left out of power budgets", job_id=job_id, exc_info=error)
            return self._leave(job_id)
        self._idle_capped.pop(job_id, None)
        self._left_out.discard(job_id)
        return changed

    @property
    def job_ids(self) -> Collection[str]:
        """The jobs that draw power."""
        return self._jobs.keys()

    def measured(self, duration_s: float, drawn: PowerTotals) -> PowerMeasured:
        """Return what was drawn for so long, of those of which it is known.

        It is what agents tell of this second. Where they tell of none or not all of a job's GPUs, its latest
        iteration counts, which may have been of other plans.
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
        """Return the share of a job's GPUs that is on each feed; empty where it is not reckoned with."""
        known = self._jobs.get(job_id)
        return {} if known is None else known.shares

    def order(self, fleet: FleetMachine, urgent: Mapping[str, bool], now_s: float) -> None:
        """Order the paces and ceilings that the fleet wants. `urgent`: of the paces that it just changed."""
        unknown = self._unknown if now_s < self._unknown_until_s else ()
        held = {feed for job_id in unknown for feed in self._jobs[job_id].shares if fleet.is_limited(feed)}
        for job_id, known in list(self._jobs.items()):
            run = self._live.get(job_id)
            if run is None:
                continue
            # First what counts wherever a plan does not: the plan may take a moment.
            max_clock_mhz, target_time_s = fleet.max_clock_mhz(job_id), fleet.target_time_s(job_id)
            may_lift = held.isdisjoint(known.shares)
            if may_lift or not _is_lifted(run, max_clock_mhz):
                self._send_max_clock(run, max_clock_mhz, known.shares)
            if (
                known.power.basis is not None
                and target_time_s != known.power.target_time_s
                and (may_lift or (target_time_s or 0.0) >= (known.power.target_time_s or 0.0))
            ):
                self._send(run, BudgetTargetSet(target_time_s, urgent.get(job_id, target_time_s is not None)))
        for job_id, feeds in list(self._idle_capped.items()):
            if not any(fleet.is_limited(feed) for feed in feeds):
                del self._idle_capped[job_id]
                if (run := self._live.get(job_id)) is not None:
                    self._send_max_clock(run, None, ())

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
        with suppress(CoordinatorError):  # it has ended, or is quarantined: the next look finds it so
            self._live.handle(run, order)

    def _leave(self, job_id: str) -> JobLeft | None:
        return None if self._jobs.pop(job_id, None) is None else JobLeft(job_id)

    async def _update(self, job_id: str, run: LiveRun) -> JobChanged | None:
        power = self._live.read(run, views.power, lambda _: NO_POWER)
        known = self._jobs.get(job_id)
        if power.power_w is None and known is not None:
            power = replace(power, power_w=known.power.power_w)  # it goes on to draw what it drew
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
        """Return the hosts that a run's ranks are on; of a quarantined one, those that were served."""

        def of_snapshot(snapshot: RunSnapshot) -> list[str]:
            hosts = {rank.coordinates: rank.hostname for rank in snapshot.ranks}
            return [hosts.get(place, "") for place in snapshot.spec.parallelism.all_coordinates()]

        return self._live.read(run, views.hostnames, of_snapshot)

    def _placed(self, run: LiveRun) -> Sequence[Sequence[StageFeeds]]:
        counts = run.machine.spec.parallelism
        hostnames = self._hostnames(run)
        return placement(self._feeds, hostnames, counts.stage_count, counts.tensor_count)

    async def _points(self, basis: PowerCurveBasis | None, known: _Known) -> tuple[PowerPoint, ...]:
        """Return the points of a curve: in a thread, as that adds up every plan of the frontier."""
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
    """Whether a ceiling would be higher than the one that a run has."""
    before = run.machine.record.max_clock
    if before is None or before.clock_mhz is None:
        return False
    return max_clock_mhz is None or max_clock_mhz > before.clock_mhz


def _is_new(basis: PowerCurveBasis | None, before: PowerCurveBasis | None) -> bool:
    return before is not None if basis is None else not basis.is_same(before)
