"""The exact frontier: every optimal relaxed plan from T_slow down to T_min, without a time quantum.

A relaxed plan gives every event a time; a computation costs the value of its hull at the time between its
start and its finish. For each iteration time T the cheapest such plan is a minimum-cost-flow problem seen
from its dual side: the flow on a computation's arc is the slope at which it trades energy for time, so it
lies between the hull's slopes on the slower and on the faster side of its duration. On a dependency the flow
is arbitrary without slack, and zero with slack. The sweep keeps both sides optimal while T falls (a
primal-dual, or parametric, method):

1. A maximum-flow computation augments the present flow until it can't grow. Its value is the slope of the
   frontier here.
2. With that flow fixed, the durations that stay optimal are intervals: one vertex where the flow lies
   strictly between two slopes, the whole piece where it equals one. How far each event may move down within
   them is its distance from the first event over these margins (Dijkstra). All events move at once, until the
   last one reaches its distance.

Each round is one linear piece of the frontier. Times are integer picoseconds, slopes integer microwatts, so
nothing is rounded and no tolerance is needed. The residual graph is laid out once; only capacities and
weights change.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import igraph
import numpy as np
from numpy.typing import NDArray

from perseus.solver.event_times import EventTimes, EventTimesRecorder
from perseus.solver.graph import EventGraph, Int64Array
from perseus.solver.plan import earliest_finishes_ps
from perseus.solver.scale import UW_PER_W, Scale

FloatArray = NDArray[np.float64]

MAX_BYTES = 2**27
"""Approximate limit on the memory for the events' times."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """The corners of the relaxed frontier, slowest first, and the relaxed plan at each.

    Attributes:
        scale: the conversion between seconds and the units of ``_ps``, which are scaled.
        t_min_ps, t_slow_ps: the ends of the whole frontier.
        iteration_times_ps: falling; the first is T_slow, the last T_min or ``stop_ps`` of the sweep.
        effective_energies_j: rising, convex in the iteration time.
        slopes_w: between one corner and the next, the effective energy that one second less costs.
        event_times: the events' times in the relaxed plans.
    """

    scale: Scale
    t_min_ps: int
    t_slow_ps: int
    iteration_times_ps: Int64Array
    effective_energies_j: FloatArray
    slopes_w: FloatArray
    event_times: EventTimes

    def event_times_at(self, iteration_time_ps: int) -> Int64Array:
        """Return the events' times of the relaxed plan at an iteration time that the sweep covers.

        It is the best one, except where that would take too much memory (:class:`EventTimes`).
        """
        return self.event_times.until(iteration_time_ps)

    @property
    def t_min_s(self) -> float:
        """The shortest iteration time."""
        return self.scale.to_s(self.t_min_ps)

    @property
    def t_slow_s(self) -> float:
        """The longest iteration time at which energy still falls."""
        return self.scale.to_s(self.t_slow_ps)

    def effective_energy_j_at(self, iteration_time_s: float) -> float:
        """Return the least effective energy of any relaxed plan; it is constant beyond T_slow."""
        time_ps = iteration_time_s * self.scale.ps_per_s
        return float(np.interp(time_ps, self.iteration_times_ps[::-1], self.effective_energies_j[::-1]))


def sweep_frontier(
    graph: EventGraph, on_progress: Callable[[float], None] = lambda _: None, stop_ps: float = 0.0
) -> Sweep:
    """Sweep from T_slow down to T_min, or only to ``stop_ps`` where that is longer.

    ``on_progress`` is called with the share of the range that is done.
    """
    hulls = _Hulls(graph)
    end = graph.event_count - 1
    t_min_ps = int(_earliest_event_times(graph, hulls.fastest_ps)[end])
    times_ps = _earliest_event_times(graph, hulls.slowest_ps)
    t_slow_ps = int(times_ps[end])
    stop_ps = round(min(max(t_min_ps, stop_ps), t_slow_ps))
    residual = _Residual(graph, hulls)
    recorder = EventTimesRecorder(times_ps, MAX_BYTES)
    iteration_times_ps = [t_slow_ps]
    slopes_uw: list[float] = []
    while times_ps[end] > stop_ps:
        moves_ps = residual.descend(times_ps, int(times_ps[end]) - stop_ps)
        slopes_uw.append(residual.flow_value_uw)
        times_ps = times_ps - moves_ps
        recorder.record(moves_ps, times_ps)
        iteration_times_ps.append(int(times_ps[end]))
        on_progress((t_slow_ps - iteration_times_ps[-1]) / (t_slow_ps - stop_ps))
    scale = graph.scale
    slopes_w = np.array(slopes_uw) / (UW_PER_W * scale.power)
    slowest_j = sum(graph.hulls[p].slowest_effective_energy_j for p in graph.profile_of) / scale.energy
    steps_j = slopes_w * (-np.diff(iteration_times_ps) / scale.ps_per_s)
    return Sweep(
        scale=scale,
        t_min_ps=t_min_ps,
        t_slow_ps=t_slow_ps,
        iteration_times_ps=np.array(iteration_times_ps, dtype=np.int64),
        effective_energies_j=slowest_j + np.concatenate(([0.0], np.cumsum(steps_j))),
        slopes_w=slopes_w,
        event_times=recorder.finish(),
    )


def _earliest_event_times(graph: EventGraph, durations_ps: Int64Array) -> Int64Array:
    """Return each event's earliest time: the longest path to it."""
    finishes_ps = np.array(earliest_finishes_ps(graph.dependencies, durations_ps.tolist()), dtype=np.int64)
    times_ps = np.zeros(graph.event_count, dtype=np.int64)
    np.maximum.at(times_ps, graph.start_event, finishes_ps - durations_ps)
    np.maximum.at(times_ps, graph.finish_event, finishes_ps)
    return times_ps


class _Hulls:
    """All hulls in flat arrays, to look up all computations at once.

    Profile p's vertices are stored as their time plus p's offset, so that all of them form one sorted array.
    Entry k of the slopes belongs to the piece on the faster side of vertex k: infinite before a hull's first
    vertex. One more vertex after a hull's last, with slope 0, represents the flat rest.
    """

    def __init__(self, graph: EventGraph) -> None:
        vertices: list[int] = []
        slopes_uw: list[float] = []
        offsets: list[int] = []
        for hull in graph.hulls:
            offsets.append(vertices[-1] + 1 if vertices else 0)
            vertices += [offsets[-1] + time_ps for time_ps in (*hull.times_ps, hull.times_ps[-1] + 2)]
            slopes_uw += [np.inf, *hull.slopes_uw, 0]
        fastest_ps = [hull.times_ps[0] for hull in graph.hulls]
        slowest_ps = [hull.times_ps[-1] for hull in graph.hulls]
        self.fastest_ps = np.array(fastest_ps, dtype=np.int64)[graph.profile_of]
        self.slowest_ps = np.array(slowest_ps, dtype=np.int64)[graph.profile_of]
        steepest_uw = np.array([max(hull.slopes_uw, default=0) for hull in graph.hulls], dtype=np.float64)
        self.steepest_uw = steepest_uw[graph.profile_of]
        self._vertices = np.array(vertices, dtype=np.int64)
        self._slopes_uw = np.array(slopes_uw, dtype=np.float64)
        self._offsets = np.array(offsets, dtype=np.int64)[graph.profile_of]

    def locate(self, durations_ps: Int64Array) -> "_Position":
        """Return each computation's position on its hull."""
        keys = self._offsets + np.minimum(durations_ps, self.slowest_ps + 1)
        at_or_after = self._vertices.searchsorted(keys, "left")
        after = self._vertices.searchsorted(keys, "right")
        return _Position(
            faster_slope_uw=self._slopes_uw[at_or_after],
            slower_slope_uw=self._slopes_uw[after],
            to_faster_ps=durations_ps - (self._vertices[at_or_after - 1] - self._offsets),
            to_slower_ps=self._vertices[after] - self._offsets - durations_ps,
        )


@dataclass(frozen=True, slots=True)
class _Position:
    """Per computation: the slopes on both sides of its duration, and the distances to the next vertices."""

    faster_slope_uw: FloatArray
    slower_slope_uw: FloatArray
    to_faster_ps: Int64Array
    to_slower_ps: Int64Array


class _Residual:
    """The residual graph: an arc each way for every computation and every dependency, and the flow so far.

    ``flow_value_uw`` is the flow from the first event to the last: the slope of the frontier.
    """

    def __init__(self, graph: EventGraph, hulls: _Hulls) -> None:
        self._graph = graph
        self._hulls = hulls
        self._end = graph.event_count - 1
        ends = [
            (graph.start_event, graph.finish_event),
            (graph.finish_event, graph.start_event),
            (graph.tail_event, graph.head_event),
            (graph.head_event, graph.tail_event),
        ]
        edges = np.concatenate([np.column_stack(pair) for pair in ends])
        # Flow comes from a separate vertex through one last arc, whose capacity bounds the total flow (see
        # `perseus.solver.graph.steepest_exact_uw`).
        self._source = graph.event_count
        self._igraph = igraph.Graph(
            graph.event_count + 1, [*edges.tolist(), (self._source, 0)], directed=True
        )
        computation_count, dependency_count = len(graph.start_event), len(graph.tail_event)
        bounds = np.cumsum([0, computation_count, computation_count, dependency_count, dependency_count])
        self._forward, self._backward, self._dependency_forward, self._dependency_backward = (
            slice(*ends) for ends in pairwise(bounds.tolist())
        )
        self._arcs = np.empty(bounds[-1] + 1)
        self._flow_uw = np.zeros(computation_count)
        self._dependency_flow_uw = np.zeros(dependency_count)
        self.flow_value_uw = 0.0
        # No flow exceeds this: until T_min is reached, every path has an arc of finite slope.
        self._unbounded_uw = 1 + hulls.steepest_uw.sum()

    def descend(self, event_times_ps: Int64Array, limit_ps: int) -> Int64Array:
        """Augment the flow; return each event's possible move down, at most ``limit_ps`` for the last one."""
        graph = self._graph
        position = self._hulls.locate(event_times_ps[graph.finish_event] - event_times_ps[graph.start_event])
        slack_ps = event_times_ps[graph.head_event] - event_times_ps[graph.tail_event] - graph.lag_ps
        self._augment(position, slack_ps)
        return self._distances_ps(position, slack_ps, limit_ps)

    def _augment(self, position: "_Position", slack_ps: Int64Array) -> None:
        """Augment the flow to a maximum."""
        capacities = self._arcs
        capacities[self._forward] = np.minimum(position.faster_slope_uw - self._flow_uw, self._unbounded_uw)
        capacities[self._backward] = self._flow_uw - position.slower_slope_uw
        capacities[self._dependency_forward] = np.where(slack_ps == 0, self._unbounded_uw, 0.0)
        capacities[self._dependency_backward] = self._dependency_flow_uw
        capacities[-1] = self._unbounded_uw
        value_uw, flow, _, _ = igraph.GraphBase.maxflow(
            self._igraph, self._source, self._end, capacities.tolist()
        )
        self.flow_value_uw += value_uw
        added = np.fromiter(flow, np.float64, len(flow))  # a third quicker than np.array
        self._flow_uw += added[self._forward] - added[self._backward]
        self._dependency_flow_uw += added[self._dependency_forward] - added[self._dependency_backward]

    def _distances_ps(self, position: "_Position", slack_ps: Int64Array, limit_ps: int) -> Int64Array:
        at_faster_slope = self._flow_uw == position.faster_slope_uw
        at_slower_slope = self._flow_uw == position.slower_slope_uw
        to_slower_ps = np.where(position.slower_slope_uw == 0, np.inf, position.to_slower_ps)
        margins = self._arcs
        margins[self._forward] = np.where(at_faster_slope, position.to_faster_ps, 0)
        margins[self._backward] = np.where(at_slower_slope, to_slower_ps, 0.0)
        margins[self._dependency_forward] = slack_ps
        margins[self._dependency_backward] = np.where(self._dependency_flow_uw > 0, 0.0, np.inf)
        margins[-1] = 0.0
        distances = self._igraph.distances(0, weights=margins.tolist())[0][: self._source]
        farthest = min(distances[self._end], limit_ps)
        moves_ps: Int64Array = np.minimum(
            np.fromiter(distances, np.float64, len(distances)), farthest
        ).astype(np.int64)
        return moves_ps
