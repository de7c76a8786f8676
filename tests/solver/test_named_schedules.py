"""The named schedules have their known properties: with equal times, their bubbles have the known sizes."""

import inspect
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.schedule_name import ScheduleName
from perseus.solver import (
    Computation,
    Kind,
    Path,
    Pipeline,
    Schedule,
    ScheduleError,
    dual_pipe_v,
    early_recomputation,
    interleaved_one_forward_one_backward,
    max_computations,
    named_schedule,
    named_schedules,
    one_forward_one_backward,
    replay,
    zero_bubble_h1,
    zero_bubble_v,
)
from tests.solver.pipelines import measurements

INTERLEAVED = ScheduleName.INTERLEAVED_ONE_FORWARD_ONE_BACKWARD

stage_counts = st.integers(1, 6)
group_counts = st.integers(1, 4)


def pipeline_of(schedule: Schedule, time_s: Mapping[Kind, float]) -> Pipeline:
    keys = {(c.stage, c.chunk, c.kind) for c in schedule.computations}
    profiles = {key: measurements((1000, time_s[key[2]], 1.0)) for key in keys}
    return Pipeline(schedule, profiles, (0.0,) * schedule.stage_count)


def iteration_time_s(schedule: Schedule, **time_s: float) -> float:
    times_s = {Kind[name.upper()]: value for name, value in time_s.items()}
    return replay(pipeline_of(schedule, times_s), dict.fromkeys(schedule.computations, 1000)).iteration_time_s


def test_every_schedule_has_a_name_and_every_name_a_schedule() -> None:
    written_down = [
        each
        for name, each in vars(named_schedules).items()
        if inspect.isfunction(each) and each.__annotations__.get("return") is Schedule and name[0] != "_"
    ]
    named = {name: named_schedule(name, 2, 4, 2 * (name is INTERLEAVED)) for name in ScheduleName}
    built = []
    for each in set(written_down) - {named_schedule}:
        counts = {"stage_count": 2, "microbatch_count": 4, "chunk_count": 2}
        built.append(each(**{name: counts[name] for name in inspect.signature(each).parameters}))
    assert len(built) == len(named)
    assert all(schedule in built for schedule in named.values())


@pytest.mark.parametrize("name", ScheduleName)
@given(stage_count=stage_counts, groups=st.integers(2, 4), chunk_count=st.integers(1, 4))
def test_a_named_schedule_has_at_most_the_stated_size(
    name: ScheduleName, stage_count: int, groups: int, chunk_count: int
) -> None:
    counts = stage_count, groups * stage_count, chunk_count * (name is INTERLEAVED)
    size = len(list(named_schedule(name, *counts).computations))
    assert size <= max_computations(name, *counts) <= 1.5 * size


@given(stage_count=stage_counts, groups=group_counts, chunk_count=st.integers(1, 4))
def test_interleaving_divides_the_bubble(stage_count: int, groups: int, chunk_count: int) -> None:
    microbatch_count = groups * stage_count
    schedule = interleaved_one_forward_one_backward(stage_count, microbatch_count, chunk_count)
    # A chunk is one part of chunk_count of a stage's work.
    time_s = iteration_time_s(schedule, forward=1.0, backward=2.0)
    assert time_s == 3.0 * chunk_count * microbatch_count + 3.0 * (stage_count - 1)


@given(stage_count=stage_counts, microbatch_count=st.integers(1, 12))
def test_zero_bubble_h1(stage_count: int, microbatch_count: int) -> None:
    schedule = zero_bubble_h1(stage_count, microbatch_count)
    for order in schedule.orders:
        held = maximum = 0
        for c in order:
            held += {Kind.FORWARD: 1, Kind.BACKWARD_WEIGHT: -1}.get(c.kind, 0)
            maximum = max(maximum, held)
        assert held == 0
        assert maximum <= stage_count
    if microbatch_count >= 2 * stage_count:
        times_s = {"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0}
        assert iteration_time_s(schedule, **times_s) == 3.0 * microbatch_count + 1.0 * (stage_count - 1)


@given(stage_count=stage_counts, more=st.integers(-1, 12))
def test_v_shaped_schedules_wait_only_for_the_first_activations(stage_count: int, more: int) -> None:
    """Their orders are compared with torch's in `tests/frameworks`."""
    microbatch_count = 2 * stage_count + more
    times_s = {"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0, "backward": 2.0}
    # Both chunks' forward, input and weight parts, after the first microbatch's way to the last stage.
    shortest_s = 6.0 * microbatch_count + 1.0 * (stage_count - 1)
    assert iteration_time_s(zero_bubble_v(stage_count, microbatch_count), **times_s) == shortest_s
    if more >= 0:
        assert iteration_time_s(dual_pipe_v(stage_count, microbatch_count), **times_s) == shortest_s


def test_dual_pipe_v_needs_two_microbatches_a_stage() -> None:
    with pytest.raises(
        ScheduleError, match="microbatch_count: expected at least 8, two for each stage, found 7"
    ):
        dual_pipe_v(4, 7)


def test_early_recomputation_does_not_wait_for_the_gradient() -> None:
    schedule = early_recomputation(2, 2)
    kinds = [[f"{c.kind.name[0]}{c.microbatch}" for c in order] for order in schedule.orders]
    assert kinds == [["F0", "F1", "R0", "B0", "R1", "B1"], ["F0", "B0", "F1", "B1"]]
    times_s = {"forward": 1.0, "backward": 2.0, "recomputation": 1.0}
    # Stage 0 recomputes microbatch 0 while stage 1 is on it; microbatch 1 while stage 1 is on that.
    assert iteration_time_s(schedule, **times_s) == iteration_time_s(
        one_forward_one_backward(2, 2), **times_s
    )


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((2, 3, 2), "microbatch_count: expected a multiple of 2, the number of stages, found 3"),
        ((2, 2, 0), "chunk_count: expected at least 1, found 0"),
    ],
)
def test_interleaving_refuses(counts: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        interleaved_one_forward_one_backward(*counts)


def _c(stage: int, letter: str, microbatch: int, chunk: int) -> Computation:
    return Computation(stage, {"F": Kind.FORWARD, "B": Kind.BACKWARD}[letter], microbatch, chunk)


V: tuple[Path, ...] = (((0, 0), (1, 0), (1, 1), (0, 1)),)
V_ORDERS = (
    (_c(0, "F", 0, 0), _c(0, "F", 0, 1), _c(0, "B", 0, 1), _c(0, "B", 0, 0)),
    (_c(1, "F", 0, 0), _c(1, "F", 0, 1), _c(1, "B", 0, 1), _c(1, "B", 0, 0)),
)


def test_v_shape_turns_round_at_the_last_stage() -> None:
    schedule = Schedule(V_ORDERS, V)
    assert set(schedule.dependencies) == {
        (_c(0, "F", 0, 0), _c(1, "F", 0, 0)),
        (_c(1, "F", 0, 1), _c(0, "F", 0, 1)),
        (_c(0, "B", 0, 1), _c(1, "B", 0, 1)),
        (_c(1, "B", 0, 0), _c(0, "B", 0, 0)),
    }
    assert iteration_time_s(schedule, forward=1.0, backward=2.0) == 12.0


def test_dual_schedule_runs_from_both_ends() -> None:
    paths: tuple[Path, ...] = (((0, 0), (1, 0)), ((1, 1), (0, 1)))
    orders = (
        (_c(0, "F", 0, 0), _c(0, "F", 1, 1), _c(0, "B", 1, 1), _c(0, "B", 0, 0)),
        (_c(1, "F", 1, 1), _c(1, "F", 0, 0), _c(1, "B", 0, 0), _c(1, "B", 1, 1)),
    )
    assert iteration_time_s(Schedule(orders, paths), forward=1.0, backward=2.0) == 6.0


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ((V[0][:3],), "stage 0 chunk 1 forward of microbatch 0 is on no path"),
        ((V[0], ((0, 0),)), "expected each stage's chunk once, found stage 0, chunk 0 again"),
        ((V[0][:2], ((2, 1),)), "paths: expected stages 0 to 1 .* found stage 2, chunk 1"),
        ((V[0], ((1, 2), (0, 2))), None),
        (((*V[0], (1, 2)),), "stage 1, chunk 2, microbatch 0: .* found nothing"),
    ],
)
def test_wrong_paths_are_refused(paths: tuple[Path, ...], message: str | None) -> None:
    if message is None:
        assert Schedule(V_ORDERS, paths).paths == paths
        return
    with pytest.raises(ScheduleError, match=message):
        Schedule(V_ORDERS, paths)
