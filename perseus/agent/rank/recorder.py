"""Records a rank's finished iterations: times, clocks, and energy from the counter. Pure.

A finished iteration is measured once the counter has moved past its end (or after 300 ms). Only then are the
clocks in force known, too, because the worker's completions may arrive after the marks that they precede.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from perseus.agent.clocks.foreign import ForeignClockJudge
from perseus.agent.clocks.keeper import Clocks
from perseus.agent.clocks.sets import ClockSet
from perseus.agent.energy.counter import CounterChange
from perseus.agent.link.computation import Computation, Kind
from perseus.agent.link.packets import Edge
from perseus.agent.rank.clock_counters import ClockCounters
from perseus.agent.rank.messages import NO_PLAN, ComputationRow, IterationRow
from perseus.agent.rank.sampling import (
    EstimateRequest,
    FinishedComputation,
    FinishedIteration,
    Sampler,
    energy_at_j,
    throttling,
)

COUNTER_WAIT_S = 0.3
"""How long a finished iteration waits for the energy counter: a few of its longest periods."""

MAX_WAITS = 4096
"""Limit on the waits within one computation: a layer has a few."""

# A longer gap means that the trainer was stopped.
_MAX_GAP_S = 3600.0
_SETTLED_S = 0.05  # from a set until the clock is surely the one set
_CHANGES_KEPT = 256  # counter changes: 25 s at 100 ms, which limits the regression to some 10 ms


@dataclass(slots=True)
class Run:
    """A computation that has begun, at its position in the order.

    `waits_s`: (begin, end) of its waits for other ranks; the end of a current wait is None. A computation
    that lost a mark of its waits never ends: its computing time is unknown.
    """

    computation: Computation
    position: int
    begin_s: float
    end_s: float | None = None
    waits_s: list[tuple[float, float | None]] = field(default_factory=list)
    has_lost_mark: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether it is waiting for other ranks."""
        return bool(self.waits_s) and self.waits_s[-1][1] is None

    def wait(self, edge: Edge, time_s: float) -> None:
        """Begin or end a wait."""
        if self.end_s is not None:
            return  # the begin mark of the waiting computation was lost
        if self.is_waiting == (edge is Edge.BEGIN) or len(self.waits_s) == MAX_WAITS:
            self.has_lost_mark = True
        elif edge is Edge.BEGIN:
            self.waits_s.append((time_s, None))
        else:
            self.waits_s[-1] = (self.waits_s[-1][0], time_s)

    def end(self, time_s: float) -> None:
        """End the computation."""
        if not self.is_waiting and not self.has_lost_mark:
            self.end_s = time_s


@dataclass(slots=True, eq=False)
class PlanRecord:
    """The recordings under one plan, since it came into force."""

    clocks_mhz: Clocks
    sampler: Sampler
    counters: ClockCounters = field(default_factory=ClockCounters)

    @property
    def version(self) -> int:
        """The plan's version; that of `NO_PLAN` without one."""
        return self.sampler.plan_version


@dataclass(slots=True)
class Iteration:
    """An iteration that has begun. `begin_s` is None if its begin mark was lost.

    `gap_begin_s`: the end of the previous one; None if unknown. `relative_work`, `work`: as stated, and as
    counted by a hook; 0 if unknown.
    """

    number: int
    begin_s: float | None
    plan: PlanRecord
    gap_begin_s: float | None = None
    relative_work: float = 0.0
    work: int = 0
    end_s: float = 0.0
    runs: list[Run] = field(default_factory=list)
    position: int = -1
    """Position of the latest computation seen, in the order."""
    has_deviated: bool = False
    is_at_stock: bool = False
    """Whether it runs at stock under any plan, because the previous ones deviated from the order."""
    has_clock_change: bool = False
    """Whether clocks came into force during it, so that its measurements belong to neither plan."""

    @property
    def needed_s(self) -> float | None:
        """The earliest time of which data is needed to measure it; None if it can't be measured."""
        if self.begin_s is None or self.gap_begin_s is None:
            return self.begin_s
        return self.gap_begin_s


@dataclass(frozen=True, slots=True)
class Report:
    """Iterations that ran under one plan, and a due request for its energy estimate."""

    plan: PlanRecord
    iterations: tuple[IterationRow, ...]
    computations: tuple[ComputationRow, ...]
    request: EstimateRequest | None


class Recorder:
    """One rank's iterations, clocks and energy counter.

    Attributes:
        foreign: judges whether another client of the driver holds the GPU's clock.
    """

    def __init__(self, highest_clock_mhz: int, stock_mhz: int | None = None) -> None:
        self.foreign = ForeignClockJudge(stock_mhz or highest_clock_mhz)
        self._highest_clock_mhz = highest_clock_mhz
        self._ended: tuple[int, float] | None = None
        self._measured_end: tuple[float, float | None] | None = None
        self._plan = PlanRecord((), Sampler(NO_PLAN.version))
        self._finished: deque[Iteration] = deque()
        self._changes: list[CounterChange] = []
        self._clock_sets: list[ClockSet] = []

    @property
    def plan_version(self) -> int:
        """Version of the plan under which iterations now begin."""
        return self._plan.version

    @property
    def has_unreported(self) -> bool:
        """Whether finished iterations wait for the counter."""
        return bool(self._finished)

    def follow(self, plan_version: int, clocks_mhz: Clocks) -> None:
        """Switch to another plan, or other clocks of it, from the next iteration on."""
        self._plan = PlanRecord(clocks_mhz, Sampler(plan_version, clocks_mhz))

    def iteration(self, number: int, begin_s: float | None, relative_work: float = 0.0) -> Iteration:
        """Return a new iteration."""
        gap_begin_s = None
        if self._ended is not None and self._ended[0] == number - 1:
            gap_begin_s = self._ended[1]
        return Iteration(number, begin_s, self._plan, gap_begin_s, relative_work)

    def finish(self, iteration: Iteration, end_s: float) -> None:
        """Add a finished iteration, to be measured later."""
        iteration.end_s = end_s
        self._ended = (iteration.number, end_s)
        self._finished.append(iteration)

    def drop_finished(self) -> None:
        """Drop finished iterations that were not reported."""
        self._finished.clear()

    def counter_changed(self, change: CounterChange) -> None:
        """Add a change of the energy counter."""
        self._changes.append(change)

    def clock_set(self, done: ClockSet) -> None:
        """Add a completed set."""
        self._clock_sets.append(done)
        self._plan.counters.set_count += 1

    def report(
        self, order: tuple[Computation, ...] | None, now_s: float, *, needed_s: float, waits: bool
    ) -> list[Report]:
        """Return the reports that are ready, one for all consecutive iterations under the same plan.

        `waits`: wait for the counter; otherwise report all finished iterations. `order`: the registered one.
        `needed_s`: the begin of the current iteration, or the earliest begin of the next.
        """
        counted_until_s = self._changes[-1].time_s if self._changes else 0.0
        reports: list[Report] = []
        while self._finished:
            plan = self._finished[0].plan
            iterations: list[IterationRow] = []
            computations: list[ComputationRow] = []
            while self._finished and self._finished[0].plan is plan:
                end_s = self._finished[0].end_s
                if waits and counted_until_s < end_s and now_s < end_s + COUNTER_WAIT_S:
                    break
                self._measure(self._finished.popleft(), order, iterations, computations)
            if not iterations:
                break
            request = plan.sampler.estimate_request(self._changes)
            reports.append(Report(plan, tuple(iterations), tuple(computations), request))
        self._forget(needed_s)
        return reports

    def _measure(
        self,
        iteration: Iteration,
        order: tuple[Computation, ...] | None,
        iterations: list[IterationRow],
        computations: list[ComputationRow],
    ) -> None:
        assert iteration.begin_s is not None  # iterations without a begin are never finished
        plan = None if iteration.is_at_stock or iteration.has_clock_change else iteration.plan
        complete = [self._measure_run(plan, run) for run in iteration.runs if run.end_s is not None]
        begin_j = energy_at_j(self._changes, iteration.begin_s)
        end_j = energy_at_j(self._changes, iteration.end_s)
        is_regular = (
            not iteration.has_deviated
            and not iteration.is_at_stock
            and not iteration.has_clock_change
            and tuple(each.computation for each in complete) == order
            and begin_j is not None  # the counter was not yet polled: no energy is known
        )
        iteration.plan.sampler.add(
            FinishedIteration(
                iteration.begin_s,
                iteration.end_s,
                tuple(complete),
                is_regular,
                tuple(self._off_clock_s(iteration, complete)),
                iteration.relative_work or float(iteration.work),
            )
        )
        gap_time_s, gap_energy_j, gap_slowed_time_s = self._measure_gap(iteration, begin_j)
        self._measured_end = (iteration.end_s, end_j)
        reasons, capped_mhz = throttling(self._changes, iteration.begin_s, iteration.end_s)
        iterations.append(
            IterationRow(
                iteration=iteration.number,
                plan_version=iteration.plan.version,
                duration_s=iteration.end_s - iteration.begin_s,
                energy_j=end_j - begin_j if begin_j is not None and end_j is not None else 0.0,
                is_regular=is_regular,
                clock_event_reasons=reasons,
                gap_time_s=gap_time_s,
                gap_energy_j=gap_energy_j,
                gap_slowed_time_s=gap_slowed_time_s,
                capped_clock_mhz=capped_mhz,
                relative_work=iteration.relative_work,
                work=iteration.work,
                has_clock_change=iteration.has_clock_change,
            )
        )
        if iteration.has_clock_change:
            return
        computations += [
            ComputationRow(
                iteration=iteration.number,
                computation=each.computation,
                begin_s=each.begin_s - iteration.begin_s,
                duration_s=each.duration_s,
                clock_mhz=each.clock_mhz,
            )
            for each in complete
        ]

    def _off_clock_s(
        self, iteration: Iteration, complete: Sequence[FinishedComputation]
    ) -> Iterator[tuple[float, float]]:
        """Yield (begin, end) of waits at another clock than the plan's, if that has only one."""
        highest_mhz = self._highest_clock_mhz
        planned = {clock_mhz or highest_mhz for clock_mhz in iteration.plan.clocks_mhz}
        if len(planned) != 1 or iteration.begin_s is None:
            return
        begins_s = [iteration.begin_s, *(each.end_s for each in complete)]
        ends_s = [*(each.begin_s for each in complete), iteration.end_s]
        for begin_s, end_s in zip(begins_s, ends_s, strict=True):
            for clock_mhz, since_s, until_s in self._clocks_between(begin_s, end_s):
                if (clock_mhz or highest_mhz) not in planned and since_s < until_s:
                    yield since_s, until_s

    def _measure_gap(self, iteration: Iteration, end_j: float | None) -> tuple[float, float, float]:
        """Return the gap's time and energy, and the most that clocks can have added to its time."""
        begin_s, end_s = iteration.gap_begin_s, iteration.begin_s
        if begin_s is None or end_s is None or not 0 <= end_s - begin_s <= _MAX_GAP_S:
            return 0.0, 0.0, 0.0
        energy_j = 0.0
        # The counter's changes that far back may be dropped, but they measured the previous iteration.
        if self._measured_end is not None and self._measured_end[0] == begin_s:
            begin_j = self._measured_end[1]
            if begin_j is not None and end_j is not None:
                energy_j = max(0.0, end_j - begin_j)
        slowed_s = sum(
            (until_s - since_s) * (1 - clock_mhz / self._highest_clock_mhz)
            for clock_mhz, since_s, until_s in self._clocks_between(begin_s, end_s)
            if clock_mhz is not None
        )
        return end_s - begin_s, energy_j, max(0.0, slowed_s)

    def _clocks_between(self, begin_s: float, end_s: float) -> list[tuple[int | None, float, float]]:
        """Return (clock, begin, end) of all clocks in force between two moments."""
        clocks: list[tuple[int | None, float]] = [(None, begin_s)]
        for done in self._clock_sets:
            if done.time_s <= begin_s:
                clocks[0] = (done.clock_mhz, begin_s)
            elif done.time_s < end_s:
                clocks.append((done.clock_mhz, done.time_s))
        ends_s = [*(since_s for _, since_s in clocks[1:]), end_s]
        return [(mhz, since_s, until_s) for (mhz, since_s), until_s in zip(clocks, ends_s, strict=True)]

    def _measure_run(self, plan: PlanRecord | None, run: Run) -> FinishedComputation:
        assert run.end_s is not None  # checked by the caller
        # (clock, start time): first the one at its begin, then those that came into force while it ran.
        clocks = [(mhz, since_s) for mhz, since_s, _ in self._clocks_between(run.begin_s, run.end_s)]
        if run.computation.kind != Kind.FIXED:
            foreign_mhz = self._foreign_mhz(run.begin_s, run.end_s)
            if plan is not None:
                counted = clocks if foreign_mhz is None else [(foreign_mhz, run.begin_s)]
                plan.counters.add(plan.clocks_mhz[run.position], counted, run.end_s)
        return FinishedComputation(
            run.computation,
            run.begin_s,
            run.end_s,
            clocks[0][0],
            is_pure=len(clocks) == 1,
            waits_s=tuple((since_s, until_s) for since_s, until_s in run.waits_s if until_s is not None),
        )

    def _foreign_mhz(self, begin_s: float, end_s: float) -> int | None:
        """Compare the clocks read during a computation with those set; return one that another client set.

        A reading around a set proves nothing. Without any, the verdict on the GPU counts.
        """
        foreign_mhz, has_reading = None, False
        for index in range(bisect_left(self._changes, begin_s, key=attrgetter("time_s")), len(self._changes)):
            change = self._changes[index]
            if change.time_s > end_s:
                break
            if not change.sm_clock_mhz or change.read_at_s > end_s or self._is_near_set(change):
                continue
            has_reading = True
            ((set_mhz, _, _),) = self._clocks_between(change.time_s, change.time_s)
            if self.foreign.read(change.time_s, change.sm_clock_mhz, set_mhz, change.clock_event_reasons):
                foreign_mhz = change.sm_clock_mhz
        if not has_reading and self.foreign.verdict is not None:
            return self.foreign.verdict.clock_mhz
        return foreign_mhz

    def _is_near_set(self, change: CounterChange) -> bool:
        return any(
            done.begun_at_s <= change.read_at_s and change.time_s <= done.time_s + _SETTLED_S
            for done in self._clock_sets
        )

    def _forget(self, needed_s: float) -> None:
        """Drop data that no iteration still to be measured can need."""
        del self._changes[:-_CHANGES_KEPT]
        needed_s = min([needed_s, *(each.needed_s for each in self._finished if each.needed_s is not None)])
        obsolete = 0
        for index, done in enumerate(self._clock_sets):
            if done.time_s <= needed_s:
                obsolete = index  # in force at that time; the earlier ones are obsolete
        del self._clock_sets[:obsolete]

    def validate(self) -> None:
        """Check the invariants; AssertionError otherwise. Called by tests."""
        assert len(self._changes) <= _CHANGES_KEPT
        ends_s = [iteration.end_s for iteration in self._finished]
        assert ends_s == sorted(ends_s)
