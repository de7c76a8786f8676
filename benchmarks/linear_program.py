"""The relaxed problem as a linear program for HiGHS, built independently from the measurements.

It shares only the problem statement with the solver, so that it can check the solver and compete with it.
Each computation has one variable per piece of its hull, the leanest formulation that we know.
"""

from itertools import pairwise

import highspy
import numpy as np

from perseus.solver import Computation, Kind, Measurement, Pipeline

_INF = highspy.kHighsInf


class LinearProgram:
    """Minimise effective energy for a deadline that can be changed; HiGHS starts from its last basis.

    ``tolerance`` is HiGHS's primal and dual feasibility tolerance; None for its default.
    """

    def __init__(self, pipeline: Pipeline, tolerance: float | None = None) -> None:
        costs: list[float] = []
        uppers: list[float] = []

        def variable(cost: float, upper: float) -> int:
            costs.append(cost)
            uppers.append(upper)
            return len(costs) - 1

        self._constant_j = 0.0
        fastest_s: dict[Computation, float] = {}
        start: dict[Computation, int] = {}
        pieces: dict[Computation, list[int]] = {}
        for c in pipeline.schedule.computations:
            start[c] = variable(0.0, _INF)
            if c.kind is Kind.FIXED:
                fastest_s[c], pieces[c] = pipeline.fixed_times_s[c], []
                continue
            measured = pipeline.profiles[c.stage, c.chunk, c.kind]
            hull = effective_hull(measured, pipeline.blocking_power_w[c.stage])
            fastest_s[c] = hull[0][0]
            self._constant_j += hull[0][1]
            pieces[c] = [
                variable((slow_j - fast_j) / (slow_s - fast_s), slow_s - fast_s)
                for (fast_s, fast_j), (slow_s, slow_j) in pairwise(hull)
            ]
        self._deadline = variable(0.0, _INF)
        # later − earlier − pieces of earlier ≥ least
        arcs = dependencies(pipeline)
        awaited = {earlier for earlier, _, _ in arcs}
        rows = [(start[later], earlier, lag_s) for earlier, later, lag_s in arcs]
        rows += [(self._deadline, c, 0.0) for c in start if c not in awaited]
        columns = [[later, start[earlier], *pieces[earlier]] for later, earlier, _ in rows]
        values = [[1.0, -1.0, *[-1.0] * len(pieces[earlier])] for _, earlier, _ in rows]
        self._highs = highspy.Highs()  # type: ignore[no-untyped-call]
        self._highs.setOptionValue("output_flag", False)
        self._highs.setOptionValue("threads", 1)
        if tolerance is not None:
            self._highs.setOptionValue("primal_feasibility_tolerance", tolerance)
            self._highs.setOptionValue("dual_feasibility_tolerance", tolerance)
        none = np.array([], dtype=np.int32)
        self._highs.addCols(
            len(costs), np.array(costs), np.zeros(len(costs)), np.array(uppers), 0, none, none, np.array([])
        )
        self._highs.addRows(
            len(rows),
            np.array([fastest_s[earlier] + lag_s for _, earlier, lag_s in rows]),
            np.full(len(rows), _INF),
            sum(map(len, columns)),
            np.cumsum([0, *map(len, columns[:-1])]).astype(np.int32),
            np.array([column for row in columns for column in row], dtype=np.int32),
            np.array([value for row in values for value in row]),
        )

    def min_effective_energy_j(self, iteration_time_s: float) -> float:
        """Solve for one deadline."""
        self._highs.changeColBounds(self._deadline, 0.0, iteration_time_s)
        self._highs.run()
        if self._highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            raise RuntimeError(f"HiGHS found no optimum at {iteration_time_s} s")
        return self._constant_j + float(self._highs.getInfo().objective_function_value)


def effective_hull(measured: tuple[Measurement, ...], blocking_power_w: float) -> list[tuple[float, float]]:
    """Return the falling part of the lower hull of (time in s, effective energy in J), fastest first."""
    points = sorted((m.time_s, m.energy_j - blocking_power_w * m.time_s) for m in measured)
    hull: list[tuple[float, float]] = []
    for x, y in points:
        if hull and y >= hull[-1][1]:
            continue
        while len(hull) >= 2 and (hull[-1][1] - hull[-2][1]) * (x - hull[-1][0]) >= (y - hull[-1][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        if hull and x == hull[-1][0]:
            hull.pop()
        hull.append((x, y))
    return hull


def dependencies(pipeline: Pipeline) -> list[tuple[Computation, Computation, float]]:
    """Return all (earlier, later, lag in s): the stages' orders, activations and gradients."""
    arcs = [(a, b, 0.0) for order in pipeline.schedule.orders for a, b in pairwise(order)]
    for earlier, later in pipeline.schedule.dependencies:
        lags_s = pipeline.activation_lags_s if later.kind is Kind.FORWARD else pipeline.gradient_lags_s
        arcs.append((earlier, later, lags_s.get((earlier.stage, later.stage), 0.0)))
    return arcs
