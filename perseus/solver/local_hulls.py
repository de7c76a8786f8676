"""Relaxing again around a plan of measured clocks.

Where measured clocks lie far above their hull (a cliff in the profile), a relaxed plan mixes clocks that no
real plan can mix. On *local* hulls, of the few measured clocks around those of a real plan, it mixes only
what is near to it. How all computations move together is what such a relaxation finds, and no search of
trades.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from perseus.solver.graph import EventGraph, Int64Array, convex_hulls
from perseus.solver.profile import PS_PER_S, Option
from perseus.solver.sweep import sweep_frontier


def relax_around(
    graph: EventGraph,
    durations_ps: Int64Array,
    deadline_ps: int,
    reach: int,
    hull_tolerance: float,
    report: Callable[[float], None],
) -> Int64Array:
    """Return the events' times in a relaxed plan on local hulls around a real one that keeps the deadline.

    Args:
        graph: the iteration.
        durations_ps: per computation, of the real plan.
        deadline_ps: the iteration time.
        reach: how many options to either side the hulls reach.
        hull_tolerance: of these hulls, where exact ones would take long.
        report: called with the share of the work that is done, from 0 to 1.
    """
    local = with_local_hulls(graph, durations_ps, reach, hull_tolerance)
    sweep = sweep_frontier(local, report, stop_s=deadline_ps / PS_PER_S)
    return sweep.event_times_at(deadline_ps)


def with_local_hulls(
    graph: EventGraph, durations_ps: Int64Array, reach: int, hull_tolerance: float = 0.0
) -> EventGraph:
    """Return the graph with each computation planned on the hull of the options around its duration.

    ``reach`` options on either side; the option that fits the duration is always among them, so that what was
    feasible stays it.
    """
    index_of: dict[tuple[int, int, int], int] = {}
    options: list[tuple[Option, ...]] = []
    profile_of = np.empty_like(graph.profile_of)
    times_ps = [[option.time_ps for option in some] for some in graph.options]
    for i, (p, duration_ps) in enumerate(zip(graph.profile_of.tolist(), durations_ps.tolist(), strict=True)):
        fits = bisect_right(times_ps[p], duration_ps) - 1
        slower = fits + (times_ps[p][fits] != duration_ps)
        window = (p, max(0, slower - reach), fits + reach + 1)
        if window not in index_of:
            index_of[window] = len(options)
            options.append(graph.options[p][window[1] : window[2]])
        profile_of[i] = index_of[window]
    return replace(
        graph,
        profile_of=profile_of,
        options=tuple(options),
        hulls=convex_hulls(options, profile_of, hull_tolerance),
    )
