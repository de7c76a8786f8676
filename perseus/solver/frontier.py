"""The frontier of one pipeline: its relaxed bound, its realised points, and plans at any iteration time."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from perseus.solver.columns import Choice
from perseus.solver.dwelled_plans import LatencyPlans, LatencyPoint, dwelled_count, latency_plan
from perseus.solver.errors import DeadlineError, SolverError
from perseus.solver.graph import EventGraph, build_event_graph, convex_hulls
from perseus.solver.latency import check_clocks, check_latency
from perseus.solver.margin import (
    MAX_CONFIDENCE,
    Emulation,
    Margin,
    check_confidence,
    first_error_count,
    has_errors,
    padded,
)
from perseus.solver.pipeline import Pipeline
from perseus.solver.plan import Plan, assemble_plan, fastest_clock_plan
from perseus.solver.plan_table import PlanTable, tabulate
from perseus.solver.realisation import MANY_COMPUTATIONS, REFINED_BESIDE, Realiser, Target
from perseus.solver.relaxed_cost import RelaxedCost
from perseus.solver.sweep import Sweep, sweep_frontier
from perseus.solver.variation import Variation, hastened

MIN_POINT_COUNT = 3
"""T_min, T* and T_slow."""

_GRACE_PS = 1000
"""A deadline this many scaled picoseconds below T_min counts as T_min: sums of the same seconds differ in
their last digits."""

_PRICED_AT = 1.05
"""The iteration time at which a margin's price is reported, as a factor of T_min."""

_AUTOMATIC_TOLERANCE = 0.002
"""The default hull tolerance for many computations: the exact frontier's pieces grow faster in number than
the stages, and each takes longer with more computations."""

_AROUND_SHARES = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04)
"""A single plan is realised together with plans for iteration times that differ by these shares."""

_FIRST_POINTS = 10
"""Plans from which the first estimate of a margin is made."""

_FIRST_SHARE = 0.3
"""Approximate share of that estimate in solving time."""

_SWEEP_SHARE = 0.6
"""Approximate share of the sweep in solving time; realising plans takes the rest."""


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A realised plan's place on the frontier.

    Attributes:
        deadline_s: the iteration time that the plan was made for.
        iteration_time_s: the plan's own iteration time, at most the deadline.
        energy_j: of one iteration of ``iteration_time_s``, waiting included.
        effective_energy_j: ``energy_j`` without the blocking power at stock over the iteration.
        bound_energy_j: lower bound on the energy of any plan of ``iteration_time_s``.
        latency_cost_j: extra energy until the deadline due to the GPUs' set latency, over the plan whose
            clocks change at once; 0 for plans without latency.
    """

    deadline_s: float
    iteration_time_s: float
    energy_j: float
    effective_energy_j: float
    bound_energy_j: float
    latency_cost_j: float = 0.0

    @property
    def latency_cost_percent(self) -> float:
        """The latency cost in percent of the plan's energy without it."""
        return 100 * self.latency_cost_j / self.energy_j


@dataclass(frozen=True, slots=True, eq=False)
class Refinement:
    """The input for refining one plan in any process. Plain data: it can be pickled.

    Attributes:
        pipeline: the pipeline of the plan.
        deadline_s: the iteration time for which it is made.
    """

    pipeline: Pipeline
    deadline_s: float
    _graph: EventGraph = field(repr=False)
    _target: Target = field(repr=False)
    _others: NDArray[np.int16] = field(repr=False)
    """Choices of the neighbouring points, by rising time; the first meets the deadline."""
    _set_latency_s: float
    _realised: Plan = field(repr=False)
    """The slowest of the points' plans that meets the deadline."""
    _variation: Variation | None = field(repr=False)
    _tolerance: float

    def plan(self) -> Plan:
        """Return the plan: never slower than the deadline, at the least effective energy found.

        Where computations vary, it is not slower in the mean over iterations, up to a tolerance.
        """
        choice = Realiser(self._graph).refine(self._target, self._others)
        plan = _assemble(self.pipeline, self._graph, choice)
        if self._set_latency_s:
            plan = latency_plan(self.pipeline, plan, self._set_latency_s) or self._realised
        # Rounding errors of the sums must not make it dearer than the plan that is already realised.
        plan = min(plan, self._realised, key=lambda each: each.effective_energy_j)
        if self._variation is None:
            return plan
        return hastened(
            self.pipeline,
            self._graph,
            plan,
            self._variation,
            self.deadline_s * (1 + self._tolerance),
            in_runs=self._set_latency_s > 0,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Frontier:
    """The result of :func:`solve` for one pipeline. Plain data: it can be pickled.

    Attributes:
        pipeline: the problem that was solved.
        baseline: the all-max plan.
        points: realised plans by rising deadline, from T_min to T_slow, evenly spaced in effective energy, so
            that they are close where the frontier is steep. Effective energy never rises along them.
        t_star_index: index of the point whose deadline is T*.
        margin: the margin added to measured times, so that plans keep their predictions; None without one.
        set_latency_s: the GPUs' set latency; 0 for plans whose clocks change at once.
        hull_tolerance: how far computations' curves were simplified, as a share of their energy.
        bound_slack: the most by which a point's bound is below that of the exact curves, as a share of its
            energy. It is 0 without tolerance, unless two measurements differ so little in time that the
            curve between them is too steep for exact arithmetic.
    """

    pipeline: Pipeline
    baseline: Plan
    points: tuple[FrontierPoint, ...]
    t_star_index: int
    margin: Margin | None
    set_latency_s: float
    hull_tolerance: float
    bound_slack: float
    _graph: EventGraph = field(repr=False)
    _sweep: Sweep = field(repr=False)
    _choices: NDArray[np.int16] = field(repr=False)
    """By rounded deadline and computation, the index of the chosen option."""
    _choice_times_ps: tuple[int, ...] = field(repr=False)
    """Each choice's iteration time, on the measured times."""
    _plans: PlanTable = field(repr=False)
    """The points' plans; several points may share one."""
    _rows: tuple[int, ...] = field(repr=False)
    """Each point's row in that table."""

    @property
    def t_min_s(self) -> float:
        """The shortest iteration time."""
        return self._sweep.t_min_s

    @property
    def t_star_s(self) -> float:
        """The iteration time of least energy without stragglers."""
        return self.points[self.t_star_index].deadline_s

    @property
    def t_slow_s(self) -> float:
        """The iteration time with every computation at its least effective energy."""
        return self._sweep.t_slow_s

    @property
    def margin_energy_share(self) -> float:
        """The margin's cost as a share of the energy, where plans are 5 % slower than the fastest.

        Without the margin, a plan of such an iteration time would be made like the plan of one that is longer
        by the margin.
        """
        if self.margin is None:
            return 0.0
        time_s = _PRICED_AT * self.t_min_s
        longer_s = time_s * (1 + self.margin.time_share)
        saved_j = self._sweep.effective_energy_j_at(time_s) - self._sweep.effective_energy_j_at(longer_s)
        return saved_j / self.bound_energy_j(time_s)

    def bound_energy_j(self, iteration_time_s: float) -> float:
        """Return the lower bound on the energy of any plan of that iteration time, waiting included.

        Raises:
            DeadlineError: the iteration time is shorter than T_min.
        """
        self._deadline_ps(iteration_time_s)
        return _bound_energy_j(self.pipeline, self._sweep, iteration_time_s)

    def plan(self, iteration_time_s: float) -> Plan:
        """Return the plan made for that iteration time: never slower, at the least effective energy found.

        Beyond T_slow it is the plan of T_slow. With a set latency it keeps its clocks long enough, or it is
        one of the points' plans.

        Raises:
            DeadlineError: the iteration time is shorter than T_min.
        """
        if self.is_exact(iteration_time_s):
            return self.plan_within(iteration_time_s)
        return self.refinement(iteration_time_s).plan()

    def refinement(
        self, iteration_time_s: float, variation: Variation | None = None, tolerance: float = 0.0
    ) -> Refinement:
        """Return the input for doing the work of `plan` elsewhere; it takes about as long as a few sweeps.

        Where computations vary, the plan's iterations keep to that time on average, as they were seen to
        vary, up to a tolerance (a share); then its `iteration_time_s` is that mean.

        Raises:
            DeadlineError: the iteration time is shorter than T_min.
        """
        deadline_ps = self._deadline_ps(iteration_time_s)
        within = bisect_right(self._choice_times_ps, deadline_ps) - 1
        return Refinement(
            pipeline=self.pipeline,
            deadline_s=self.pipeline.scale.to_s(deadline_ps),
            _graph=self._graph,
            _target=_target(self.pipeline, self._sweep, deadline_ps),
            _others=self._choices[max(0, within - REFINED_BESIDE) : within + REFINED_BESIDE + 1],
            _set_latency_s=self.set_latency_s,
            _realised=self.plan_within(iteration_time_s),
            _variation=variation,
            _tolerance=tolerance,
        )

    def is_exact(self, iteration_time_s: float) -> bool:
        """Return whether `plan_within` and `plan` return the same for that iteration time.

        Raises:
            DeadlineError: the iteration time is shorter than T_min.
        """
        # T_min's plan was refined; at T_slow nothing is left to choose.
        ends_ps = self._sweep.t_min_ps, self._sweep.t_slow_ps
        return self._deadline_ps(iteration_time_s) in ends_ps

    def plan_within(self, iteration_time_s: float) -> Plan:
        """Return the slowest of the points' plans that is not slower than that: a look-up, without solving.

        Raises:
            DeadlineError: the iteration time is shorter than T_min.
        """
        return self._plans.plan(self._rows[self._index_within(iteration_time_s)])

    def plans(self) -> Iterator[Plan]:
        """Yield all plans: the all-max plan, and each of the points' plans once."""
        yield self.baseline
        yield from map(self._plans.plan, sorted({*self._rows}))

    def point_within(self, iteration_time_s: float) -> FrontierPoint:
        """Return the point of that plan.

        Raises:
            DeadlineError: the iteration time is shorter than T_min.
        """
        return self.points[self._index_within(iteration_time_s)]

    def _index_within(self, iteration_time_s: float) -> int:
        to_ps = self.pipeline.scale.to_ps
        deadline_ps = self._deadline_ps(iteration_time_s)
        return bisect_right(self.points, deadline_ps, key=lambda point: to_ps(point.iteration_time_s)) - 1

    def _deadline_ps(self, iteration_time_s: float) -> int:
        return _check_deadline(iteration_time_s, self._sweep)


def solve(
    pipeline: Pipeline,
    *,
    point_count: int = 100,
    hull_tolerance: float | None = None,
    confidence: float | None = None,
    set_latency_s: float = 0.0,
    on_progress: Callable[[float], None] | None = None,
) -> Frontier:
    """Solve for the whole frontier and realise ``point_count`` plans, evenly spaced in effective energy.

    They include T_min and, where there is room, the all-max plan's iteration time and T*.

    With a ``set_latency_s``, plans keep their clocks long enough for it; there may be fewer points then
    (:mod:`perseus.solver.dwelled_plans`).

    ``hull_tolerance`` makes large problems quicker: computations are planned on curves that are lower by at
    most this share of their energy (:mod:`perseus.solver.coarse_hull`). Bounds stay bounds, lower by at most
    that share of all computations' energy (``bound_slack`` of the result); plans still use measured clocks
    only. The default is 0 up to 4096 computations, and 0.002 beyond.

    ``confidence`` is the probability with which plans keep their iteration times, as far as the standard
    errors of the measured times show; it adds a margin (:mod:`perseus.solver.margin`), which says the
    probability that is kept if that is less (`MAX_CONFIDENCE`).

    ``on_progress`` is called with the share of the work that is done, from 0 to 1, several times per plan; an
    exception from it ends the work. A frontier of a single iteration time has a single point.

    Raises:
        SolverError: ``point_count`` is below 3 (T_min, T*, T_slow), the tolerance is no share, the confidence
            no probability from 0.5 to less than 1, or the latency no finite number of 0 or more; or standard
            errors are out of all proportion to the times.
        ProfileError: there is a latency, and settings are more than a clock
            (:func:`perseus.solver.latency.check_clocks`).
    """
    check_latency(set_latency_s)
    if set_latency_s:
        check_clocks(pipeline)
    if point_count < MIN_POINT_COUNT:
        raise SolverError(
            f"point_count: expected at least {MIN_POINT_COUNT}, found {point_count}", found=point_count
        )
    if hull_tolerance is None:
        hull_tolerance = automatic_tolerance(pipeline)
    if not 0 <= hull_tolerance < 1:
        raise SolverError(
            f"hull_tolerance: expected a share from 0 to less than 1, found {hull_tolerance}",
            found=hull_tolerance,
        )
    report = on_progress or (lambda _: None)
    if confidence is not None:
        check_confidence(confidence)
    if confidence is None or not has_errors(pipeline):
        return _solve(pipeline, point_count, hull_tolerance, set_latency_s, report)
    confidence = min(confidence, MAX_CONFIDENCE)
    emulation = Emulation(pipeline, confidence)
    # Few plans show approximately which margin all of them need.
    frontier = _solve(
        padded(pipeline, first_error_count(confidence)),
        min(point_count, _FIRST_POINTS),
        hull_tolerance,
        0.0,
        lambda share: report(_FIRST_SHARE * share),
    )
    needed, error_count, left = emulation.error_count(frontier.plans()), -1.0, 1 - _FIRST_SHARE
    while needed > error_count:
        error_count = needed
        frontier = _solve(
            padded(pipeline, error_count),
            point_count,
            hull_tolerance,
            set_latency_s,
            partial(_report_half, report, left),
        )
        left /= 2
        needed = emulation.error_count(frontier.plans())
    report(1.0)
    all_max_s = fastest_clock_plan(pipeline).iteration_time_s
    time_share = frontier.baseline.iteration_time_s / all_max_s - 1
    return replace(frontier, margin=Margin(confidence, error_count, time_share))


def _report_half(report: Callable[[float], None], left: float, share: float) -> None:
    """Report the progress of one of several solves, of which nobody knows how many there will be."""
    report(1 - left + left / 2 * share)


def with_margin(pipeline: Pipeline, confidence: float) -> tuple[Pipeline, Margin | None]:
    """Return the pipeline with times that plans keep with this probability, and the margin.

    The result has no standard errors of times, since the margin accounts for them. If none were known, the
    pipeline is returned unchanged, without a margin.

    Raises:
        SolverError: the confidence is no probability from 0.5 to below 1.
    """
    frontier = solve(pipeline, point_count=_FIRST_POINTS, confidence=confidence)
    return frontier.pipeline, frontier.margin


def _solve(
    pipeline: Pipeline,
    point_count: int,
    hull_tolerance: float,
    set_latency_s: float,
    report: Callable[[float], None],
) -> Frontier:
    scale = pipeline.scale
    graph = build_event_graph(pipeline, hull_tolerance)
    sweep = sweep_frontier(graph, lambda share: report(_SWEEP_SHARE * share))
    baseline = fastest_clock_plan(pipeline)
    t_star_ps = _t_star_ps(pipeline, sweep)
    all_max_ps = min(scale.to_ps(baseline.iteration_time_s), sweep.t_slow_ps)
    deadlines_ps = _space_deadlines_ps(sweep, (t_star_ps, all_max_ps), point_count)
    realiser = Realiser(graph)
    choices = realiser.realise(
        [partial(_target, pipeline, sweep, deadline_ps) for deadline_ps in deadlines_ps],
        lambda share: report(_SWEEP_SHARE + (1 - _SWEEP_SHARE) * share),
    )
    plans = tabulate(pipeline, graph, realiser.columns, choices)
    choice_times_ps = tuple(map(scale.to_ps, plans.iteration_times_s))
    # What waiting saves at lower clocks is known only now: a faster plan may turn out to be cheaper.
    effective_j = plans.effective_energies_j
    cheapest = [0]
    for row in range(1, len(deadlines_ps)):
        cheapest.append(row if effective_j[row] <= effective_j[cheapest[-1]] else cheapest[-1])
    found = [
        LatencyPoint(scale.to_s(at_ps), row, 0.0) for at_ps, row in zip(deadlines_ps, cheapest, strict=True)
    ]
    if set_latency_s:
        marks_ps = {sweep.t_min_ps, all_max_ps, t_star_ps, sweep.t_slow_ps}
        step = max(1, len(deadlines_ps) // dwelled_count(len(graph.computations)))
        kept = LatencyPlans(pipeline, baseline, set_latency_s)
        for row, deadline_ps in enumerate(deadlines_ps):
            is_needed = deadline_ps in marks_ps or row % step == 0
            kept.take(scale.to_s(deadline_ps), plans.plan(row), is_needed=is_needed)
            report(1.0)
        found, plans = kept.finish()
    points = tuple(_measure_point(pipeline, sweep, plans, point) for point in found)
    return Frontier(
        pipeline=pipeline,
        baseline=baseline,
        points=points,
        t_star_index=[point.deadline_s for point in found].index(scale.to_s(t_star_ps)),
        margin=None,
        set_latency_s=set_latency_s,
        hull_tolerance=hull_tolerance,
        bound_slack=_bound_slack(hull_tolerance, graph, sweep, points),
        _graph=graph,
        _sweep=sweep,
        _choices=choices,
        _choice_times_ps=choice_times_ps,
        _plans=plans,
        _rows=tuple(point.row for point in found),
    )


def automatic_tolerance(pipeline: Pipeline) -> float:
    """Return the default hull tolerance of :func:`solve`."""
    computation_count = sum(map(len, pipeline.schedule.orders))
    return _AUTOMATIC_TOLERANCE if computation_count > MANY_COMPUTATIONS else 0.0


def plan_at(
    pipeline: Pipeline, iteration_time_s: float, on_progress: Callable[[float], None] = lambda _: None
) -> Plan:
    """Return the plan for one iteration time without solving for the rest of the frontier.

    ``on_progress`` is called with the share of the work that is done, from 0 to 1.

    Raises:
        DeadlineError: the iteration time is shorter than T_min.
    """
    graph = build_event_graph(pipeline, automatic_tolerance(pipeline))
    fastest_ps = iteration_time_s * (1 - max(_AROUND_SHARES)) * graph.scale.ps_per_s
    sweep = sweep_frontier(graph, lambda share: on_progress(share / 2), stop_ps=fastest_ps)
    deadline_ps = _check_deadline(iteration_time_s, sweep)
    fastest_ps = int(sweep.iteration_times_ps[-1])
    around_ps = {round(deadline_ps * (1 + sign * share)) for share in _AROUND_SHARES for sign in (-1, 1)}
    deadlines_ps = sorted(
        {deadline_ps, *(min(max(fastest_ps, one_ps), sweep.t_slow_ps) for one_ps in around_ps)}
    )
    realiser = Realiser(graph)
    around = realiser.realise(
        [partial(_target, pipeline, sweep, one_ps) for one_ps in deadlines_ps],
        lambda share: on_progress((1 + share / 2) / 2),
    )
    target = _target(pipeline, sweep, deadline_ps)
    choice = realiser.refine(target, around, lambda share: on_progress((3 + share) / 4))
    return _assemble(pipeline, graph, choice)


def _check_deadline(iteration_time_s: float, sweep: Sweep) -> int:
    """Return the deadline in scaled picoseconds, at most T_slow."""
    if iteration_time_s >= sweep.t_slow_s:
        return sweep.t_slow_ps
    if not iteration_time_s * sweep.scale.ps_per_s >= sweep.t_min_ps - _GRACE_PS:
        raise DeadlineError(
            f"expected an iteration time of at least T_min, {sweep.t_min_s:.12g} s, "
            f"found {iteration_time_s} s",
            t_min_s=sweep.t_min_s,
            found=iteration_time_s,
        )
    return max(sweep.scale.to_ps(iteration_time_s), sweep.t_min_ps)


def _target(pipeline: Pipeline, sweep: Sweep, deadline_ps: int) -> Target:
    scale, deadline_s = sweep.scale, sweep.scale.to_s(deadline_ps)
    return Target(
        deadline_ps=deadline_ps,
        relaxed_ps=sweep.event_times_at(deadline_ps),
        bound_j=sweep.effective_energy_j_at(deadline_s) * scale.energy,
        energy_j=_bound_energy_j(pipeline, sweep, deadline_s) * scale.energy,
    )


def _bound_slack(
    hull_tolerance: float,
    graph: EventGraph,
    sweep: Sweep,
    points: Iterable[FrontierPoint],
) -> float:
    """Return the largest share of a point's bound that coarse or limited hulls may have cost.

    Coarse hulls cost at most the sum of all computations' tolerances. On the exact hulls a relaxed plan costs
    no less than the best one, so the exact bound is at most that cost.
    """
    is_limited = math.isfinite(graph.steepest_uw)
    if not (hull_tolerance or is_limited):
        return 0.0
    cost = RelaxedCost(convex_hulls(graph.options), graph.profile_of)
    tolerated_j = hull_tolerance * sum(graph.options[p][-1].energy_j for p in graph.profile_of.tolist())
    tolerated_j /= graph.scale.energy
    maximum = 0.0
    for point in points:
        times_ps = sweep.event_times_at(max(graph.scale.to_ps(point.iteration_time_s), sweep.t_min_ps))
        relaxed_j = cost.effective_energy_j(times_ps[graph.finish_event] - times_ps[graph.start_event])
        slack_j = relaxed_j / graph.scale.energy - sweep.effective_energy_j_at(point.iteration_time_s)
        if not is_limited:
            slack_j = min(slack_j, tolerated_j)
        maximum = max(maximum, slack_j / point.bound_energy_j)
    return maximum


def _t_star_ps(pipeline: Pipeline, sweep: Sweep) -> int:
    """Return the time below which the frontier is steeper than the blocking power."""
    corner = np.searchsorted(sweep.slopes_w, sum(pipeline.blocking_power_w))
    return int(sweep.iteration_times_ps[corner])


def _space_deadlines_ps(sweep: Sweep, wanted_ps: Iterable[int], point_count: int) -> list[int]:
    """Return deadlines from T_min to T_slow, evenly spaced in effective energy, including the wanted ones.

    Each wanted deadline replaces the nearest free one, as long as there is one.
    """
    energies_j = np.linspace(
        sweep.effective_energies_j[-1], sweep.effective_energies_j[0], point_count, dtype=np.float64
    )
    times_ps = np.interp(energies_j, sweep.effective_energies_j, sweep.iteration_times_ps.astype(np.float64))
    deadlines_ps = [sweep.t_min_ps, *map(round, times_ps[1:-1].tolist()), sweep.t_slow_ps]
    free = set(range(1, point_count - 1))
    for one_ps in wanted_ps:
        if free and one_ps not in deadlines_ps:
            nearest = min(free, key=lambda k: abs(deadlines_ps[k] - one_ps))
            deadlines_ps[nearest] = one_ps
            free.remove(nearest)
    return sorted({*deadlines_ps})


def _assemble(pipeline: Pipeline, graph: EventGraph, choice: Choice) -> Plan:
    options = (graph.options[p][k] for p, k in zip(graph.profile_of, choice, strict=True))
    return assemble_plan(
        pipeline,
        graph.computations,
        graph.dependencies,
        [
            (option.setting, option.time_ps, option.effective_energy_j / graph.scale.energy)
            for option in options
        ],
    )


def _measure_point(pipeline: Pipeline, sweep: Sweep, plans: PlanTable, point: LatencyPoint) -> FrontierPoint:
    time_s, effective_energy_j = plans.iteration_times_s[point.row], plans.effective_energies_j[point.row]
    return FrontierPoint(
        deadline_s=point.deadline_s,
        iteration_time_s=time_s,
        energy_j=effective_energy_j + plans.blocking_power_w * time_s,
        effective_energy_j=effective_energy_j,
        bound_energy_j=_bound_energy_j(pipeline, sweep, time_s),
        latency_cost_j=point.latency_cost_j,
    )


def _bound_energy_j(pipeline: Pipeline, sweep: Sweep, iteration_time_s: float) -> float:
    return sweep.effective_energy_j_at(iteration_time_s) + sum(pipeline.blocking_power_w) * iteration_time_s
