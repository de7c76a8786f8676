"""The named schedules have their known properties: with equal times, their bubbles have the known sizes."""

import inspect
from collections.abc import Callable, Iterable
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.schedule_name import ScheduleName
from perseus.solver import (
    Computation,
    Kind,
    Pipeline,
    Schedule,
    ScheduleError,
    dual_pipe_v,
    early_recomputation,
    gpipe,
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


def iteration_time_s(schedule: Schedule, **time_s: float) -> float:
    keys = {(c.stage, c.chunk, c.kind) for c in schedule.computations}
    profiles = {key: measurements((1000, time_s[key[2].name.lower()], 1.0)) for key in keys}
    pipeline = Pipeline(schedule, profiles, (0.0,) * schedule.stage_count)
    return replay(pipeline, dict.fromkeys(schedule.computations, 1000)).iteration_time_s


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


def max_activations(order: Iterable[Computation], last_use: Kind) -> int:
    """How many microbatches' activations a stage has at most; none is left at the end."""
    counts = list(accumulate({Kind.FORWARD: 1, last_use: -1}.get(c.kind, 0) for c in order))
    assert counts[-1] == 0
    return max(counts)


@given(stage_count=stage_counts, microbatch_count=st.integers(1, 12))
def test_1f1b_keeps_few_activations(stage_count: int, microbatch_count: int) -> None:
    for stage, order in enumerate(one_forward_one_backward(stage_count, microbatch_count).orders):
        assert max_activations(order, Kind.BACKWARD) == min(stage_count - stage, microbatch_count)


@given(stage_count=stage_counts, microbatch_count=st.integers(1, 12))
def test_zero_bubble_h1(stage_count: int, microbatch_count: int) -> None:
    schedule = zero_bubble_h1(stage_count, microbatch_count)
    assert all(max_activations(order, Kind.BACKWARD_WEIGHT) <= stage_count for order in schedule.orders)
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


def test_early_recomputation_does_not_wait_for_the_gradient() -> None:
    schedule = early_recomputation(2, 2)
    times_s = {"forward": 1.0, "backward": 2.0, "recomputation": 1.0}
    # Stage 0 recomputes microbatch 0 while stage 1 is on it; microbatch 1 while stage 1 is on that.
    assert iteration_time_s(schedule, **times_s) == iteration_time_s(
        one_forward_one_backward(2, 2), **times_s
    )


@pytest.mark.parametrize(
    ("make", "counts", "message"),
    [
        (gpipe, (0, 4), "stage_count: expected at least 1, found 0"),
        (one_forward_one_backward, (4, -1), "microbatch_count: expected at least 1, found -1"),
        (dual_pipe_v, (4, 7), "microbatch_count: expected at least 8, two for each stage, found 7"),
        (
            interleaved_one_forward_one_backward,
            (2, 3, 2),
            "microbatch_count: expected a multiple of 2, the number of stages, found 3",
        ),
        (interleaved_one_forward_one_backward, (2, 2, 0), "chunk_count: expected at least 1, found 0"),
    ],
)
def test_counts_that_make_no_schedule_are_refused(
    make: Callable[..., Schedule], counts: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        make(*counts)
