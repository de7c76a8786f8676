"""What a rank's finished iterations took, at which clocks, and what the energy counter says. Pure.

A finished iteration waits until the counter has moved past its end (or 300 ms), and is measured then. Which
clocks were in force when is settled only then, too, as the worker's completions may be heard after the marks
that they precede.
"""

from collections import deque
from dataclasses import dataclass, field

from perseus.agent.clocks.keeper import Clocks
from perseus.agent.clocks.sets import ClockSet
from perseus.agent.energy.counter import CounterChange
from perseus.agent.link.computation import Computation, Kind
from perseus.agent.rank.messages import NO_PLAN, ComputationRow, IterationRow
from perseus.agent.rank.sampling import (
    EstimateRequest,
    FinishedComputation,
    FinishedIteration,
    Sampler,
    energy_at_j,
    throttling_reasons,
)
from perseus.agent.rank.tally import ClockTally

COUNTER_WAIT_S = 0.3
"""How long a finished iteration waits for the energy counter: some of its longest periods."""

_CHANGES_KEPT = 256  # of the counter: 25 s at 100 ms, which bounds the regression to some 10 ms


@dataclass(slots=True)
class Run:
    """A computation that has begun, at its position in the order."""

    computation: Computation
    position: int
    begin_s: float
    end_s: float | None = None


@dataclass(slots=True, eq=False)
class PlanRecord:
    """What was recorded under one plan, from its coming into force on."""

    clocks_mhz: Clocks
    sampler: Sampler
    tally: ClockTally = field(default_factory=ClockTally)

    @property
    def version(self) -> int:
        """The plan's; that of `NO_PLAN` without one."""
        return self.sampler.plan_version


@dataclass(slots=True)
class Iteration:
    """An iteration that has begun. `begin_s` is None if its begin mark was lost."""

    number: int
    begin_s: float | None
    plan: PlanRecord
    end_s: float = 0.0
    runs: list[Run] = field(default_factory=list)
    position: int = -1
    """Of the latest computation seen, in the order."""
    has_deviated: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """Iterations that ran under one plan, and the energy estimate of it that it is time for."""

    plan: PlanRecord
    iterations: tuple[IterationRow, ...]
    computations: tuple[ComputationRow, ...]
    request: EstimateRequest | None


class Recorder:
    """One rank's iterations, clocks and energy counter."""

    def __init__(self) -> None:
        self._plan = PlanRecord((), Sampler(NO_PLAN.version))
        self._finished: deque[Iteration] = deque()
        self._changes: list[CounterChange] = []
        self._clock_sets: list[ClockSet] = []

    @property
    def plan_version(self) -> int:
        """Of the plan that iterations now begin under."""
        return self._plan.version

    @property
    def has_unreported(self) -> bool:
        """Whether iterations wait for the counter."""
        return bool(self._finished)

    def follow(self, plan_version: int, clocks_mhz: Clocks) -> None:
        """Another plan is in force from the next iteration on."""
        self._plan = PlanRecord(clocks_mhz, Sampler(plan_version))

    def iteration(self, number: int, begin_s: float | None) -> Iteration:
        """An iteration that begins."""
        return Iteration(number, begin_s, self._plan)

    def finish(self, iteration: Iteration, end_s: float) -> None:
        """It has ended; it is measured by and by."""
        iteration.end_s = end_s
        self._finished.append(iteration)

    def counter_changed(self, change: CounterChange) -> None:
        """The energy counter has moved."""
        self._changes.append(change)

    def clock_set(self, done: ClockSet) -> None:
        """A set was carried out."""
        self._clock_sets.append(done)
        self._plan.tally.set_count += 1

    def report(
        self, order: tuple[Computation, ...] | None, now_s: float, *, needed_s: float, waits: bool
    ) -> list[Report]:
        """What can be told by now, one report for all iterations in a row that ran under the same plan.

        `waits`: for the counter; otherwise everything that has ended is told. `order`: the registered one.
        `needed_s`: the iteration under way began then, or the next can not begin before.
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
        assert iteration.begin_s is not None  # others are not finished
        complete = [self._measure_run(iteration.plan, run) for run in iteration.runs if run.end_s is not None]
        begin_j = energy_at_j(self._changes, iteration.begin_s)
        end_j = energy_at_j(self._changes, iteration.end_s)
        is_regular = (
            not iteration.has_deviated
            and tuple(each.computation for each in complete) == order
            and begin_j is not None  # the counter was not yet watched: of no use for energy
        )
        iteration.plan.sampler.add(
            FinishedIteration(iteration.begin_s, iteration.end_s, tuple(complete), is_regular)
        )
        iterations.append(
            IterationRow(
                iteration=iteration.number,
                plan_version=iteration.plan.version,
                duration_s=iteration.end_s - iteration.begin_s,
                energy_j=end_j - begin_j if begin_j is not None and end_j is not None else 0.0,
                is_regular=is_regular,
                clock_event_reasons=throttling_reasons(self._changes, iteration.begin_s, iteration.end_s),
            )
        )
        computations += [
            ComputationRow(
                iteration=iteration.number,
                computation=each.computation,
                begin_s=each.begin_s - iteration.begin_s,
                duration_s=each.end_s - each.begin_s,
                clock_mhz=each.clock_mhz,
            )
            for each in complete
        ]

    def _measure_run(self, plan: PlanRecord, run: Run) -> FinishedComputation:
        assert run.end_s is not None  # the caller has looked
        # (clock, from when): the one that it began at, then those that came into force while it ran.
        clocks: list[tuple[int | None, float]] = [(None, run.begin_s)]
        for done in self._clock_sets:
            if done.time_s <= run.begin_s:
                clocks[0] = (done.clock_mhz, run.begin_s)
            elif done.time_s < run.end_s:
                clocks.append((done.clock_mhz, done.time_s))
        if run.computation.kind != Kind.FIXED:
            plan.tally.add(plan.clocks_mhz[run.position], clocks, run.end_s)
        return FinishedComputation(
            run.computation, run.begin_s, run.end_s, clocks[0][0], is_pure=len(clocks) == 1
        )

    def _forget(self, needed_s: float) -> None:
        """Drop what no iteration still to be measured can need."""
        del self._changes[:-_CHANGES_KEPT]
        needed_s = min([needed_s, *(each.begin_s for each in self._finished if each.begin_s is not None)])
        obsolete = 0
        for index, done in enumerate(self._clock_sets):
            if done.time_s <= needed_s:
                obsolete = index  # this one is in force then; those before are not
        del self._clock_sets[:obsolete]

    def validate(self) -> None:
        """Check what must always hold; AssertionError otherwise. Called by tests."""
        assert len(self._changes) <= _CHANGES_KEPT
        ends_s = [iteration.end_s for iteration in self._finished]
        assert ends_s == sorted(ends_s)
