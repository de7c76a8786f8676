"""Random pipelines, the published profiles, and two independent judges: a replay and a linear program."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any

import highspy
import numpy as np
import pytest
from hypothesis import strategies as st

from perseus.solver import (
    Computation,
    Kind,
    Measurement,
    Path,
    Pipeline,
    Plan,
    ProfileKey,
    Schedule,
    read_profile_csv,
    realisation,
)
from perseus.solver import one_forward_one_backward as one_f_one_b
from perseus.solver.realisation import SearchSettings
from tests.published_data import PUBLISHED_DATA

BLOCKING_POWER_W = {"a100-sxm": 83.64, "a40": 70.38}
GPUS_PER_STAGE = 8


@contextmanager
def little_search() -> Iterator[None]:
    """Take all steps of realising, but with few tries: for properties that hold for any search budget."""
    little = SearchSettings(search_tries=2, refine_rounds=2, refine_tries=2, exchange_rounds=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(realisation, "USUAL_SEARCH", little)
        patch.setattr(realisation, "SEARCH_OF_LARGE", little)
        yield


def published_profile_path(gpu: str) -> FilePath:
    path = PUBLISHED_DATA / "profiles" / f"gpt3-175b-{gpu}.csv"
    if not path.exists():
        pytest.skip(f"the published profile {path.name} is not at ../shared/data")
    return path


def published_pipeline(gpu: str, microbatch_count: int) -> Pipeline:
    profiles = read_profile_csv(published_profile_path(gpu), GPUS_PER_STAGE)
    return Pipeline(one_f_one_b(8, microbatch_count), profiles, (GPUS_PER_STAGE * BLOCKING_POWER_W[gpu],) * 8)


def measurements(*rows: tuple[int, float, float]) -> tuple[Measurement, ...]:
    return tuple(Measurement(*row) for row in rows)


FAST_AND_SLOW = measurements((1000, 1.0, 300.0), (500, 2.0, 200.0))


def pipeline_of(
    schedule: Schedule,
    measured: tuple[Measurement, ...] = FAST_AND_SLOW,
    blocking_power_w: tuple[float, ...] = (),
    **more: Any,
) -> Pipeline:
    """Return a pipeline whose computations are all alike; waiting draws nothing, unless given."""
    keys = {(c.stage, c.chunk, c.kind) for c in clocked(schedule)}
    blocking_power_w = blocking_power_w or (0.0,) * schedule.stage_count
    return Pipeline(schedule, dict.fromkeys(keys, measured), blocking_power_w, **more)


def clocked(schedule: Schedule) -> list[Computation]:
    """Return the computations that have a clock."""
    return [c for c in schedule.computations if c.kind is not Kind.FIXED]


def remeasured(pipeline: Pipeline, change: Callable[[Measurement], Measurement]) -> Pipeline:
    """Return the pipeline with each of its measurements changed."""
    profiles = {key: tuple(map(change, some)) for key, some in pipeline.profiles.items()}
    return replace(pipeline, profiles=profiles)


def small_pipeline(blocking_power_w: float = 50.0) -> Pipeline:
    """Two stages, two microbatches; stage 1 is the heavier, so stage 0 has time to save energy."""
    profiles: dict[ProfileKey, tuple[Measurement, ...]] = {}
    for stage, weight in ((0, 1.0), (1, 1.5)):
        for kind, work in ((Kind.FORWARD, 1.0), (Kind.BACKWARD, 2.0)):
            profiles[stage, 0, kind] = measurements(
                (1400, 0.010 * weight * work, 4.0 * weight * work),
                (1200, 0.011 * weight * work, 3.4 * weight * work),
                (1000, 0.013 * weight * work, 3.0 * weight * work),
            )
    return Pipeline(one_f_one_b(2, 2), profiles, (blocking_power_w, blocking_power_w))


def awaited(c: Computation, everything: Collection[Computation], paths: Sequence[Path]) -> list[Computation]:
    """Return a computation's dependencies besides its stage's order, independently from the definition."""
    if c.kind is Kind.FIXED:
        return []
    (path,) = (path for path in paths if (c.stage, c.chunk) in path)
    place = path.index((c.stage, c.chunk))
    wanted: list[tuple[tuple[int, int], Kind]] = []
    if c.kind is Kind.FORWARD and place:
        wanted = [(path[place - 1], Kind.FORWARD)]
    elif c.kind is Kind.RECOMPUTATION:
        wanted = [(path[place], Kind.FORWARD)]
    elif c.kind is Kind.BACKWARD_WEIGHT:
        wanted = [(path[place], Kind.BACKWARD_INPUT)]
    elif c.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
        wanted = [(path[place], Kind.FORWARD), (path[place], Kind.RECOMPUTATION)]
        if place + 1 < len(path):
            wanted += [(path[place + 1], Kind.BACKWARD), (path[place + 1], Kind.BACKWARD_INPUT)]
    earlier = [Computation(stage, kind, c.microbatch, chunk) for (stage, chunk), kind in wanted]
    return [each for each in earlier if each in everything]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any valid order: chunks on any paths, split backwards, recomputations, fixed-time computations.

    Orders come from executing ready computations at random, so they can't deadlock.
    """
    stage_count = draw(st.integers(1, 3))
    chunk_count = draw(st.integers(1, 2))
    microbatch_count = draw(st.integers(1, 3))
    pending: list[Computation] = []
    for stage in range(stage_count):
        for chunk in range(chunk_count):
            kinds: tuple[Kind, ...] = (Kind.FORWARD, Kind.BACKWARD)
            if draw(st.booleans()):
                kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
            if draw(st.booleans()):
                kinds = (*kinds, Kind.RECOMPUTATION)
            pending += [Computation(stage, kind, m, chunk) for kind in kinds for m in range(microbatch_count)]
        pending += [Computation(stage, Kind.FIXED, n) for n in range(draw(st.integers(0, 2)))]
    places = draw(
        st.permutations([(stage, chunk) for chunk in range(chunk_count) for stage in range(stage_count)])
    )
    cut = draw(st.integers(1, len(places)))
    paths = tuple(path for path in (tuple(places[:cut]), tuple(places[cut:])) if path)
    everything = {*pending}
    waiting_for = {c: set(awaited(c, everything, paths)) for c in pending}
    orders: list[list[Computation]] = [[] for _ in range(stage_count)]
    random = draw(st.randoms(use_true_random=False))
    while waiting_for:
        c = random.choice([c for c, others in waiting_for.items() if not others])
        del waiting_for[c]
        for others in waiting_for.values():
            others.discard(c)
        orders[c.stage].append(c)
    return Schedule(tuple(tuple(order) for order in orders), paths)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """Noisy, non-monotone profiles of 1 to 5 clocks on any schedule; lags and fixed times, some of them 0."""
    schedule = draw(schedules())
    # No two times so close that the step between them is too steep for exact arithmetic.
    times_s = st.integers(10, 1000).map(lambda tenths_ms: tenths_ms / 10_000)
    energies_j = st.floats(0.5, 60.0)
    amounts_s = st.sampled_from([0.0, 0.0, 0.004, 0.05])
    profiles: dict[ProfileKey, tuple[Measurement, ...]] = {
        key: tuple(
            Measurement(1000 + 15 * k, draw(times_s), draw(energies_j))
            for k in range(draw(st.integers(1, 5)))
        )
        for key in sorted({(c.stage, c.chunk, c.kind) for c in clocked(schedule)})
    }
    links = [(a, b) for a in range(schedule.stage_count) for b in range(schedule.stage_count) if a != b]
    return Pipeline(
        schedule,
        profiles,
        tuple(draw(st.sampled_from([0.0, 60.0, 300.0])) for _ in range(schedule.stage_count)),
        activation_lags_s={link: draw(amounts_s) for link in links},
        gradient_lags_s={link: draw(amounts_s) for link in links},
        fixed_times_s={c: draw(amounts_s) for c in schedule.computations if c.kind is Kind.FIXED},
        extra_lags_s={pair: draw(amounts_s) for pair in draw(_further_pairs(schedule))},
    )


def _further_pairs(schedule: Schedule) -> st.SearchStrategy[list[tuple[Computation, Computation]]]:
    """A few random pairs whose later computation never precedes the earlier one."""
    level_of = dict(zip(schedule.computations, schedule.levels.tolist(), strict=True))
    one = st.sampled_from(list(level_of))
    pairs = st.tuples(one, one).filter(lambda pair: level_of[pair[0]] < level_of[pair[1]])
    return st.lists(pairs, max_size=2, unique=True)


def arcs_of(pipeline: Pipeline) -> list[tuple[Computation, Computation, float]]:
    """All (earlier, later, lag in s)."""
    everything, paths = {*pipeline.schedule.computations}, pipeline.schedule.paths
    arcs = [(a, b, 0.0) for order in pipeline.schedule.orders for a, b in pairwise(order)]
    arcs += [(earlier, later, lag_s) for (earlier, later), lag_s in pipeline.extra_lags_s.items()]
    for later in pipeline.schedule.computations:
        lags_s = pipeline.activation_lags_s if later.kind is Kind.FORWARD else pipeline.gradient_lags_s
        for earlier in awaited(later, everything, paths):
            arcs.append((earlier, later, lags_s.get((earlier.stage, later.stage), 0.0)))
    return arcs


def replayed_iteration_time_s(
    pipeline: Pipeline, plan: Plan, factors: Mapping[Computation, float] = MappingProxyType({})
) -> float:
    """Replay a plan's clocks on the measured times in plain floats: relax all arcs until nothing changes.

    Computations take their `factors`, 1 by default, times as long.
    """
    duration_s: dict[Computation, float] = dict(pipeline.fixed_times_s)
    for c, clock_mhz in ((p.computation, p.clock_mhz) for stage in plan.stages for p in stage):
        times_s = [m.time_s for m in pipeline.profiles[c.stage, c.chunk, c.kind] if m.clock_mhz == clock_mhz]
        (duration_s[c],) = times_s
    duration_s = {c: time_s * factors.get(c, 1.0) for c, time_s in duration_s.items()}
    start_s = dict.fromkeys(pipeline.schedule.computations, 0.0)
    arcs = arcs_of(pipeline)
    changed = True
    while changed:
        changed = False
        for earlier, later, lag_s in arcs:
            ready_s = start_s[earlier] + duration_s[earlier] + lag_s
            if ready_s > start_s[later]:
                start_s[later], changed = ready_s, True
    return max(start_s[c] + duration_s[c] for c in start_s)


class ReferenceProgram:
    """The relaxed problem as a linear program, on the raw measurements, for HiGHS.

    Each computation mixes its measured clocks (weights that add up to 1); its duration is at least the mix of
    their times, its cost the mix of their effective energies.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        computations = list(pipeline.schedule.computations)
        start = {c: column for column, c in enumerate(computations)}
        costs: list[float] = [0.0] * len(computations)
        mixes: dict[Computation, list[tuple[int, float]]] = {}
        for c in computations:
            mixes[c] = []
            if c.kind is Kind.FIXED:
                continue
            for m in pipeline.profiles[c.stage, c.chunk, c.kind]:
                mixes[c].append((len(costs), m.time_s))
                costs.append(m.energy_j - pipeline.blocking_power_w[c.stage] * m.time_s)
        rows: list[tuple[float, float, dict[int, float]]] = []
        rows += [(1.0, 1.0, {column: 1.0 for column, _ in mix}) for mix in mixes.values() if mix]
        for earlier, later, lag_s in arcs_of(pipeline):
            row = {start[later]: 1.0, start[earlier]: -1.0} | {col: -time_s for col, time_s in mixes[earlier]}
            rows.append((lag_s + pipeline.fixed_times_s.get(earlier, 0.0), highspy.kHighsInf, row))
        self._deadline_rows = []
        for c in computations:
            row = {start[c]: 1.0} | dict(mixes[c])
            self._deadline_rows.append((len(rows), pipeline.fixed_times_s.get(c, 0.0)))
            rows.append((-highspy.kHighsInf, highspy.kHighsInf, row))
        self._highs = highspy.Highs()  # type: ignore[no-untyped-call]
        self._highs.setOptionValue("output_flag", False)
        self._highs.setOptionValue("threads", 1)
        self._highs.setOptionValue("primal_feasibility_tolerance", 1e-10)
        self._highs.setOptionValue("dual_feasibility_tolerance", 1e-10)
        for cost in costs:
            self._highs.addCol(cost, 0.0, highspy.kHighsInf, 0, np.array([], dtype=np.int32), np.array([]))
        for lower, upper, row in rows:
            columns = np.array(list(row), dtype=np.int32)
            self._highs.addRow(
                lower, upper, len(row), columns, np.array(list(row.values()), dtype=np.float64)
            )

    def min_effective_energy_j(self, iteration_time_s: float) -> float:
        for row, fixed_s in self._deadline_rows:
            self._highs.changeRowBounds(row, -highspy.kHighsInf, iteration_time_s - fixed_s)
        self._highs.run()
        assert self._highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
        return float(self._highs.getInfo().objective_function_value)
