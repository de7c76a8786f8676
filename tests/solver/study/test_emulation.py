"""A cluster's iteration by hand, against its plans, and against the published accounting."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.solver import Pipeline, Plan, SolverError, fastest_clock_plan, gpipe, plan_at, replay
from perseus.solver.study import EmulatedComputation, Replicas, emulate
from tests.solver.pipelines import little_search, pipeline_of, pipelines, published_pipeline


def two_stages() -> tuple[Pipeline, Plan]:
    """One microbatch; each computation 1 s and 300 J at 1000 MHz, 2 s and 200 J at 500; 10 and 20 W waiting.

    Stage 0 runs its forward at 1000 and its backward at 500 MHz, stage 1 both at 1000: 0–1, 3–5; 1–2, 2–3.
    """
    pipeline = pipeline_of(gpipe(2, 1), blocking_power_w=(10.0, 20.0))
    backward = pipeline.schedule.orders[0][1]
    return pipeline, replay(pipeline, dict.fromkeys(pipeline.schedule.computations, 1000) | {backward: 500})


def test_pipelines_wait_for_the_straggler() -> None:
    pipeline, plan = two_stages()
    iteration = emulate(pipeline, [Replicas(plan, count=3), Replicas(plan, slowdown=2.0)])
    others, straggler = iteration.pipelines
    assert (iteration.iteration_time_s, others.busy_until_s, straggler.busy_until_s) == (10.0, 5.0, 10.0)
    assert others.energy_j == pytest.approx(3 * 300 + 200 + 10 * 7 + 20 * 8)
    assert straggler.energy_j == pytest.approx(2 * (3 * 300 + 200 + 10 * 2 + 20 * 3))
    assert iteration.energy_j == pytest.approx(3 * others.energy_j + straggler.energy_j)
    backward = plan.stages[0][1].computation
    assert straggler.stages[0][1] == EmulatedComputation(backward, 500, 6.0, 4.0, 100.0)


def test_waiting_draws_the_power_of_the_held_clock() -> None:
    """Stage 0 holds its backward's 500 MHz from 1 to 3 s, stage 1 1000 MHz; at the end both are at stock."""
    pipeline, plan = two_stages()
    by_clock = ({1000: 16.0, 500: 8.0}, {1000: 20.0})
    pipeline = replace(pipeline, blocking_power_w=(8.0, 20.0), blocking_powers_w=by_clock)
    iteration = emulate(pipeline, [Replicas(plan), Replicas(plan, slowdown=1.2)])
    others, straggler = iteration.pipelines
    assert others.energy_j == pytest.approx(1100 + 8 * 2 + 16 * 1 + 20 * 4)
    assert straggler.energy_j == pytest.approx(1.2 * (1100 + 8 * 2 + 20 * 3))


@given(pipeline=pipelines(), count=st.integers(1, 200), slowdown=st.floats(1.0, 2.0))
@little_search()
def test_energies_are_those_of_the_plans(pipeline: Pipeline, count: int, slowdown: float) -> None:
    fast, slow = fastest_clock_plan(pipeline), plan_at(pipeline, 1e9)
    alone = emulate(pipeline, [Replicas(fast, count)])
    assert alone.iteration_time_s == fast.iteration_time_s
    assert alone.energy_j == pytest.approx(count * fast.energy_j)
    with_straggler = emulate(pipeline, [Replicas(slow), Replicas(fast, 1, slowdown)])
    assert with_straggler.pipelines[0].energy_j == pytest.approx(
        slow.energy_until_j(with_straggler.iteration_time_s)
    )


def test_impossible_clusters_are_refused() -> None:
    pipeline, plan = two_stages()
    with pytest.raises(SolverError, match="cluster: expected at least one pipeline, found none"):
        emulate(pipeline, [])
    with pytest.raises(SolverError, match="count: expected at least 1 pipeline, found 0"):
        Replicas(plan, count=0)
    for slowdown in (0.99, math.nan, math.inf):
        with pytest.raises(SolverError, match="slowdown: expected a finite factor of 1 or more, found"):
            Replicas(plan, slowdown=slowdown)


def test_savings_with_a_straggler_beat_the_published_ones() -> None:
    """128 pipelines of GPT-3 175B with 12 microbatches on A100 SXM, one of them slowed down by 1.1."""
    pipeline = published_pipeline("a100-sxm", 12)
    baseline = fastest_clock_plan(pipeline)
    at_t_min, waiting = (plan_at(pipeline, factor * baseline.iteration_time_s) for factor in (1.0, 1.1))
    before = emulate(pipeline, [Replicas(baseline, 127), Replicas(baseline, 1, 1.1)])
    after = emulate(pipeline, [Replicas(waiting, 127), Replicas(at_t_min, 1, 1.1)])
    assert after.iteration_time_s == before.iteration_time_s
    assert 100 * (1 - after.energy_j / before.energy_j) > 24.379
