"""The iteration as a graph of events, in plain arrays.

Each computation is an arc from its start event to its finish event. Dependencies (the stage's own order,
activations, gradients) are arcs with a fixed lag. A start that waits for exactly one event without lag is
merged with it, and so is a finish for which exactly one event waits without lag. No optimum is lost, because
a computation may always start earlier or finish later than necessary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perseus.solver.coarse_hull import coarse_hull
from perseus.solver.computation import Computation, Kind
from perseus.solver.pipeline import Pipeline
from perseus.solver.profile import Hull, Option, convex_hull, pareto_options
from perseus.solver.scale import Scale

Int64Array = NDArray[np.int64]

EXACT = 2**53
"""igraph computes in doubles, which hold every integer below this."""


class Dependency(NamedTuple):
    """``later`` starts at least ``lag_ps`` after the end of ``earlier``; both index the computations."""

    earlier: int
    later: int
    lag_ps: int


@dataclass(frozen=True, slots=True)
class EventGraph:
    """One pipeline's iteration, in scaled units (:mod:`perseus.solver.scale`).

    Attributes:
        scale: the conversion to these units.
        computations: in topological order.
        profile_of: per computation, the index of its options and hull.
        options: per profile, its Pareto options.
        hulls: per profile, the convex curve for planning.
        steepest_uw: the limit on their slopes; infinite if none had to be limited.
        dependencies: between computations, by rising index of the earlier one.
        start_event, finish_event: per computation, the ends of its arc. Event 0 begins the iteration, the
            last one ends it.
        tail_event, head_event, lag_ps: per dependency between events that are not merged.
        event_count: number of events.
    """

    scale: Scale
    computations: tuple[Computation, ...]
    profile_of: Int64Array
    options: tuple[tuple[Option, ...], ...]
    hulls: tuple[Hull, ...]
    steepest_uw: float
    dependencies: tuple[Dependency, ...]
    start_event: Int64Array
    finish_event: Int64Array
    tail_event: Int64Array
    head_event: Int64Array
    lag_ps: Int64Array
    event_count: int


def build_event_graph(pipeline: Pipeline, hull_tolerance: float = 0.0) -> EventGraph:
    """Lay the pipeline's iteration out as events.

    ``hull_tolerance`` is a share of each computation's energy at its slowest option (see
    :mod:`perseus.solver.coarse_hull`).
    """
    computations, dependencies = order_computations(pipeline)
    profile_of, options = _collect_options(pipeline, computations)
    event_of, event_count, arcs = _merge_events(len(computations), dependencies)
    columns = np.array(arcs, dtype=np.int64).reshape(-1, 3).T
    steepest_uw = steepest_exact_uw(options, profile_of, hull_tolerance)
    return EventGraph(
        scale=pipeline.scale,
        computations=computations,
        profile_of=profile_of,
        options=options,
        hulls=convex_hulls(options, steepest_uw, hull_tolerance),
        steepest_uw=steepest_uw,
        dependencies=dependencies,
        start_event=event_of[0:-2:2],
        finish_event=event_of[1:-2:2],
        tail_event=columns[0],
        head_event=columns[1],
        lag_ps=columns[2],
        event_count=event_count,
    )


def order_computations(pipeline: Pipeline) -> tuple[tuple[Computation, ...], tuple[Dependency, ...]]:
    """Return the computations in topological order, and the dependencies between them.

    The dependencies are sorted, so that those into a computation come before those out of it. Their lags are
    in the scaled picoseconds of the pipeline.
    """
    to_ps = pipeline.scale.to_ps
    orders = pipeline.schedule.orders
    waits_for: dict[Computation, list[Computation]] = {}
    for earlier, later in chain(pipeline.schedule.dependencies, pipeline.extra_lags_s):
        waits_for.setdefault(later, []).append(earlier)
    index_of: dict[Computation, int] = {}
    next_in = [0] * len(orders)
    # In passes over the stages, each advances until it waits. Its next turn is due when that has ended.
    turns = [(0, stage) for stage in range(len(orders))]
    blocked: dict[Computation, list[int]] = {}
    while turns:
        number, stage = heappop(turns)
        order = orders[stage]
        while next_in[stage] < len(order):
            computation = order[next_in[stage]]
            awaited = next((one for one in waits_for.get(computation, ()) if one not in index_of), None)
            if awaited is not None:
                blocked.setdefault(awaited, []).append(stage)
                break
            index_of[computation] = len(index_of)
            next_in[stage] += 1
            for other in blocked.pop(computation, ()):
                heappush(turns, (number + (other < stage), other))
    dependencies = [
        Dependency(index_of[earlier], index_of[later], 0)
        for order in orders
        for earlier, later in pairwise(order)
    ]
    for earlier, later in pipeline.schedule.dependencies:
        lags_s = pipeline.activation_lags_s if later.kind is Kind.FORWARD else pipeline.gradient_lags_s
        lag_ps = to_ps(lags_s.get((earlier.stage, later.stage), 0.0))
        dependencies.append(Dependency(index_of[earlier], index_of[later], lag_ps))
    dependencies += [
        Dependency(index_of[earlier], index_of[later], to_ps(lag_s))
        for (earlier, later), lag_s in pipeline.extra_lags_s.items()
    ]
    return tuple(index_of), tuple(sorted(dependencies))


def _collect_options(
    pipeline: Pipeline, computations: Sequence[Computation]
) -> tuple[Int64Array, tuple[tuple[Option, ...], ...]]:
    """Return each computation's profile index, and per profile its Pareto options."""
    scale = pipeline.scale
    index_of: dict[object, int] = {}
    options: list[tuple[Option, ...]] = []
    profile_of = np.empty(len(computations), dtype=np.int64)
    for i, c in enumerate(computations):
        fixed = c.kind is Kind.FIXED
        key = c if fixed else (c.stage, c.chunk, c.kind)
        if key not in index_of:
            index_of[key] = len(options)
            power_w = pipeline.blocking_power_w[c.stage]
            if fixed:
                time_s = pipeline.fixed_times_s[c]
                waiting_j = power_w * time_s * scale.energy
                options.append((Option(0, scale.to_ps(time_s), waiting_j, 0.0),))
            else:
                measurements = pipeline.profiles[c.stage, c.chunk, c.kind]
                options.append(pareto_options(measurements, power_w, scale))
        profile_of[i] = index_of[key]
    return profile_of, tuple(options)


def convex_hulls(
    options: Sequence[tuple[Option, ...]], steepest_uw: float = math.inf, hull_tolerance: float = 0.0
) -> tuple[Hull, ...]:
    """Return each profile's hull, with slopes limited to ``steepest_uw``."""
    return tuple(
        coarse_hull(convex_hull(some, steepest_uw), hull_tolerance * some[-1].energy_j) for some in options
    )


def steepest_exact_uw(
    options: Sequence[tuple[Option, ...]], profile_of: Int64Array, hull_tolerance: float = 0.0
) -> float:
    """Return the highest limit on slopes that keeps all flows exact in doubles; infinite if none is needed.

    One is needed where two measurements have almost the same time: between them, the hull is nearly vertical.
    """
    counts = np.bincount(profile_of, minlength=len(options)).tolist()
    steepest = sorted(
        (max(hull.slopes_uw, default=0), count)
        for hull, count in zip(convex_hulls(options), counts, strict=True)
    )
    # Upper bound on the total flow and on one arc's flow (see sweep.py); an arc's two directions add up, and
    # rounder slopes may be twice as steep.
    left_uw, left_count = EXACT // (8 if hull_tolerance else 4), len(profile_of)
    for slope_uw, count in steepest:
        if slope_uw * left_count >= left_uw:
            return left_uw // left_count
        left_uw -= slope_uw * count
        left_count -= count
    return math.inf


def _merge_events(
    computation_count: int, dependencies: Sequence[Dependency]
) -> tuple[Int64Array, int, list[tuple[int, int, int]]]:
    """Number the events.

    Return the event of each start (entry 2i), each finish (2i + 1) and the iteration's begin and end (the
    last two entries), the number of events, and the (tail, head, lag in ps) of the remaining dependencies.
    """
    begin, end = 2 * computation_count, 2 * computation_count + 1
    waits: list[list[Dependency]] = [[] for _ in range(computation_count)]
    awaited: list[list[Dependency]] = [[] for _ in range(computation_count)]
    for dependency in dependencies:
        waits[dependency.later].append(dependency)
        awaited[dependency.earlier].append(dependency)

    merged_into = list(range(end + 1))

    def root(event: int) -> int:
        while merged_into[event] != event:
            merged_into[event] = merged_into[merged_into[event]]
            event = merged_into[event]
        return event

    for i in range(computation_count):
        start, finish = 2 * i, 2 * i + 1
        if not waits[i]:
            merged_into[root(start)] = root(begin)
        elif len(waits[i]) == 1 and not waits[i][0].lag_ps:
            merged_into[root(start)] = root(2 * waits[i][0].earlier + 1)
        if not awaited[i]:
            merged_into[root(finish)] = root(end)
        elif len(awaited[i]) == 1 and not awaited[i][0].lag_ps:
            merged_into[root(finish)] = root(2 * awaited[i][0].later)

    roots = [root(event) for event in range(end + 1)]
    number: dict[int, int] = {roots[begin]: 0}
    for event in roots[:-2]:
        if event != roots[end]:
            number.setdefault(event, len(number))
    number[roots[end]] = len(number)
    longest: dict[tuple[int, int], int] = {}
    for dependency in dependencies:
        arc = number[roots[2 * dependency.earlier + 1]], number[roots[2 * dependency.later]]
        if arc[0] != arc[1]:
            longest[arc] = max(dependency.lag_ps, longest.get(arc, 0))
    event_of = np.array([number[event] for event in roots], dtype=np.int64)
    return event_of, len(number), [(tail, head, lag_ps) for (tail, head), lag_ps in longest.items()]
