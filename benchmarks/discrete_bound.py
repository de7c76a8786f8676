"""A lower bound for discrete clocks, for plans that are far above the relaxed bound.

The iteration is cut into windows of a few microbatches each. The dependencies from one window to another are
priced instead of kept (Lagrangian relaxation, at the prices of the relaxed optimum, HiGHS's dual solution).
Every window is then its own integer program, and HiGHS's bounds of all windows add up to a bound for all
plans of measured clocks. With windows of single computations it would be the relaxed bound. Every start also
stays between its earliest and its latest time for the deadline.

The price of the deadline is a slope, with which a bound also holds for shorter deadlines: bounds proved at a
few deadlines cover the points between.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from benchmarks.harness import Column, Table, main, published_pipeline
from perseus.solver import Frontier, solve
from perseus.solver.graph import EventGraph, build_event_graph

_INF = highspy.kHighsInf

_WINDOW = 6
"""Microbatches per window."""

_LIMIT_S = 20.0
"""Time limit of one window's program; the bound proved by then counts."""

_PROVED_AT = (1.002, 1.005, 1.01, 1.022, 1.05)
"""Deadlines, as factors of T_min."""

_MICROBATCH_COUNTS = (12, 24, 48, 96)
_ENOUGH_PERCENT = 0.5


@dataclass(frozen=True, slots=True)
class Proof:
    """A bound of effective energy for every deadline of at most ``deadline_s``: a line that falls to it."""

    deadline_s: float
    bound_j: float
    slope_w: float

    def bound_j_at(self, deadline_s: float) -> float:
        """Return the bound for that deadline; none for a longer one."""
        if deadline_s > self.deadline_s:
            return -float("inf")
        return self.bound_j + self.slope_w * (self.deadline_s - deadline_s)


@dataclass(frozen=True, slots=True)
class _Relaxed:
    """The relaxed optimum: per computation its start in ms, per arc and last computation a price in J/ms."""

    starts_ms: list[float]
    arc_prices: list[float]
    end_prices: list[float]


class DiscreteBound:
    """One iteration, its starts, durations and arcs in milliseconds, which HiGHS's tolerances suit."""

    def __init__(self, graph: EventGraph) -> None:
        """Lay out the iteration."""
        ps_per_ms = graph.scale.ps_per_s / 1000
        self._microbatches = [computation.microbatch for computation in graph.computations]
        self._options = [
            [
                (option.time_ps / ps_per_ms, option.effective_energy_j / graph.scale.energy)
                for option in graph.options[p]
            ]
            for p in graph.profile_of.tolist()
        ]
        self._arcs = [(i, j, lag_ps / ps_per_ms) for i, j, lag_ps in graph.dependencies]
        awaited = {i for i, _, _ in self._arcs}
        self._last = [i for i in range(len(self._options)) if i not in awaited]

    def prove(self, deadline_s: float, window: int, limit_s: float) -> Proof:
        """Return a proof for that deadline and shorter ones, with windows of that many microbatches."""
        deadline_ms = 1000 * deadline_s
        relaxed = self._relax(deadline_ms)
        window_of = [microbatch // window for microbatch in self._microbatches]
        bound_j = sum(
            self._window_j(deadline_ms, relaxed, window_of, one, limit_s) for one in sorted(set(window_of))
        )
        for (i, j, lag_ms), price in zip(self._arcs, relaxed.arc_prices, strict=True):
            if window_of[i] != window_of[j]:
                bound_j += price * (relaxed.starts_ms[i] + lag_ms - relaxed.starts_ms[j])
        for i, price in zip(self._last, relaxed.end_prices, strict=True):
            bound_j += price * (relaxed.starts_ms[i] - deadline_ms)
        return Proof(deadline_s, bound_j, 1000 * sum(relaxed.end_prices))

    def _relax(self, deadline_ms: float) -> _Relaxed:
        model = _Model()
        count = len(self._options)
        starts = [model.variable(0.0, 0.0, _INF) for _ in range(count)]
        choices = [[model.variable(cost_j, 0.0, 1.0) for _, cost_j in some] for some in self._options]
        rows = [self._row(starts[i], starts[j], choices[i], i, lag_ms) for i, j, lag_ms in self._arcs]
        rows += [self._row(starts[i], None, choices[i], i, -deadline_ms) for i in self._last]
        for variables in choices:
            model.row(1.0, 1.0, variables, [1.0] * len(variables))
        for minimum, variables, factors in rows:
            model.row(minimum, _INF, variables, factors)
        values, duals, _ = model.solve(None)
        prices = [max(0.0, dual) for dual in duals[count:]]
        return _Relaxed(
            [values[start] for start in starts], prices[: len(self._arcs)], prices[len(self._arcs) :]
        )

    def _row(
        self, start: int, after: int | None, choices: list[int], i: int, lag_ms: float
    ) -> tuple[float, list[int], list[float]]:
        """Return after − start − duration ≥ lag; without ``after``, −start − duration ≥ lag."""
        times = [-time_ms for time_ms, _ in self._options[i]]
        if after is None:
            return lag_ms, [start, *choices], [-1.0, *times]
        return lag_ms, [after, start, *choices], [1.0, -1.0, *times]

    def _window_j(
        self, deadline_ms: float, relaxed: _Relaxed, window_of: list[int], window: int, limit_s: float
    ) -> float:
        """Return the proved bound of one window: energy, and the prices it pays and gets for its starts.

        Starts are counted from the relaxed ones, so that the objective is small where these are good.
        """
        members = [i for i, one in enumerate(window_of) if one == window]
        earliest_ms, latest_ms = self._times_ms(deadline_ms)
        model = _Model()
        offsets_ms = relaxed.starts_ms
        starts = {
            i: model.variable(0.0, earliest_ms[i] - offsets_ms[i], latest_ms[i] - offsets_ms[i])
            for i in members
        }
        choices = {i: [model.variable(cost_j, 0.0, 1.0) for _, cost_j in self._options[i]] for i in members}
        integers = [variable for variables in choices.values() for variable in variables]
        for variables in choices.values():
            model.row(1.0, 1.0, variables, [1.0] * len(variables))

        def pay_to_end(i: int, price: float) -> None:
            model.costs[starts[i]] += price
            for variable, (time_ms, _) in zip(choices[i], self._options[i], strict=True):
                model.costs[variable] += price * time_ms

        for (i, j, lag_ms), price in zip(self._arcs, relaxed.arc_prices, strict=True):
            if i in starts and j in starts:
                minimum, variables, factors = self._row(starts[i], starts[j], choices[i], i, lag_ms)
                model.row(minimum + offsets_ms[i] - offsets_ms[j], _INF, variables, factors)
            elif i in starts:
                pay_to_end(i, price)
            elif j in starts:
                model.costs[starts[j]] -= price
        for i, price in zip(self._last, relaxed.end_prices, strict=True):
            if i in starts:
                pay_to_end(i, price)
                minimum, variables, factors = self._row(starts[i], None, choices[i], i, -deadline_ms)
                model.row(minimum + offsets_ms[i], _INF, variables, factors)
        _, _, bound_j = model.solve(integers, limit_s)
        return bound_j

    def _times_ms(self, deadline_ms: float) -> tuple[list[float], list[float]]:
        """Return the earliest and latest start of each computation in any plan of the deadline."""
        count = len(self._options)
        fastest_ms = [some[0][0] for some in self._options]
        earliest_ms, latest_ms = [0.0] * count, [deadline_ms - one_ms for one_ms in fastest_ms]
        for i, j, lag_ms in self._arcs:  # sorted: all arcs to i come before those from it
            earliest_ms[j] = max(earliest_ms[j], earliest_ms[i] + fastest_ms[i] + lag_ms)
        for i, j, lag_ms in reversed(self._arcs):
            latest_ms[i] = min(latest_ms[i], latest_ms[j] - lag_ms - fastest_ms[i])
        return earliest_ms, latest_ms


class _Model:
    """A program for HiGHS, built row by row."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self._bounds: list[tuple[float, float]] = []
        self._rows: list[tuple[float, float, list[int], list[float]]] = []

    def variable(self, cost: float, minimum: float, maximum: float) -> int:
        self.costs.append(cost)
        self._bounds.append((minimum, maximum))
        return len(self.costs) - 1

    def row(self, minimum: float, maximum: float, variables: list[int], factors: list[float]) -> None:
        self._rows.append((minimum, maximum, variables, factors))

    def solve(
        self, integers: list[int] | None, limit_s: float = _INF
    ) -> tuple[list[float], list[float], float]:
        """Return the values, the rows' duals, and the proved bound of the objective."""
        highs = highspy.Highs()  # type: ignore[no-untyped-call]
        highs.setOptionValue("output_flag", False)
        highs.setOptionValue("threads", 1)
        highs.setOptionValue("time_limit", limit_s)
        none = np.array([], dtype=np.int32)
        minimum, maximum = np.array(self._bounds).T
        highs.addCols(
            len(self.costs), np.array(self.costs), minimum.copy(), maximum.copy(), 0, none, none, np.array([])
        )
        sizes = [len(variables) for _, _, variables, _ in self._rows]
        highs.addRows(
            len(self._rows),
            np.array([row[0] for row in self._rows]),
            np.array([row[1] for row in self._rows]),
            sum(sizes),
            np.cumsum([0, *sizes[:-1]]).astype(np.int32),
            np.array([variable for row in self._rows for variable in row[2]], dtype=np.int32),
            np.array([factor for row in self._rows for factor in row[3]]),
        )
        if integers is not None:
            kinds = np.full(len(integers), highspy.HighsVarType.kInteger)
            highs.changeColsIntegrality(len(integers), np.array(integers, dtype=np.int32), kinds)
        highs.run()
        solution, info = highs.getSolution(), highs.getInfo()
        if integers is None and highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            raise RuntimeError("HiGHS found no relaxed optimum")
        return list(solution.col_value), list(solution.row_dual), float(info.mip_dual_bound)


def run() -> Sequence[Table]:
    rows: list[tuple[str | int | float | None, ...]] = []
    grid: list[tuple[str | int | float | None, ...]] = []
    for microbatch_count in _MICROBATCH_COUNTS:
        frontier = solve(published_pipeline("a40", microbatch_count))
        bound = DiscreteBound(build_event_graph(frontier.pipeline))
        proofs = []
        for slowdown in _PROVED_AT:
            deadline_s = slowdown * frontier.t_min_s
            proof = bound.prove(deadline_s, _WINDOW, _LIMIT_S)
            proofs.append(proof)
            plan = frontier.plan(deadline_s)
            relaxed_j = frontier.bound_energy_j(deadline_s)
            waiting_j = plan.blocking_power_w * deadline_s
            rows.append(
                (
                    microbatch_count,
                    slowdown,
                    100 * (plan.energy_until_j(deadline_s) / relaxed_j - 1),
                    100 * ((proof.bound_j + waiting_j) / relaxed_j - 1),
                    100 * (plan.energy_until_j(deadline_s) / (proof.bound_j + waiting_j) - 1),
                )
            )
        grid.append((microbatch_count, *_grid_above(frontier, proofs)))
    return [
        Table(
            "A bound for discrete clocks, GPT-3 175B, A40, 8 stages, 1F1B",
            (
                Column("microbatches", "d"),
                Column("× T_min", ".3f"),
                Column("plan above the relaxed bound, %", ".3f"),
                Column("proved minimum distance from it, %", ".3f"),
                Column("plan above the proved bound, %", ".3f"),
            ),
            tuple(rows),
            f"Plans requested at that time. Windows of {_WINDOW} microbatches, each given {_LIMIT_S:.0f} s; "
            "HiGHS's default tolerances.",
        ),
        Table(
            "The grid's points against that bound",
            (
                Column("microbatches", "d"),
                Column("points above the relaxed bound by more than 0.5 %", "d"),
                Column("worst, %", ".2f"),
                Column("points above the best proved bound by more than 0.5 %", "d"),
                Column("worst, %", ".2f"),
            ),
            tuple(grid),
            "Bounds proved at the times of the table above, which also hold for the points before each.",
        ),
    ]


def _grid_above(frontier: Frontier, proofs: Sequence[Proof]) -> tuple[int, float, int, float]:
    relaxed, proved = [], []
    for point in frontier.points:
        waiting_j = point.energy_j - point.effective_energy_j
        best_j = max(proof.bound_j_at(point.iteration_time_s) for proof in proofs) + waiting_j
        relaxed.append(100 * (point.energy_j / point.bound_energy_j - 1))
        proved.append(100 * (point.energy_j / max(best_j, point.bound_energy_j) - 1))
    return (
        sum(one > _ENOUGH_PERCENT for one in relaxed),
        max(relaxed),
        sum(one > _ENOUGH_PERCENT for one in proved),
        max(proved),
    )


if __name__ == "__main__":
    main("discrete_bound", run)
