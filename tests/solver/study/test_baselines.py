"""The baselines by hand, against the lower bound, and on published profiles."""

import pytest
from hypothesis import given

from perseus.solver import (
    Computation,
    Kind,
    Pipeline,
    Plan,
    ProfileError,
    fastest_clock_plan,
    gpipe,
    one_forward_one_backward,
    solve,
)
from perseus.solver.study import envpipe, zeus_global, zeus_per_stage
from tests.solver.pipelines import little_search, measurements, pipelines, published_pipeline, small_pipeline


def stage_clocks_mhz(plan: Plan) -> list[list[int]]:
    return [[p.clock_mhz for p in stage] for stage in plan.stages]


def test_envpipe_leaves_computations_off_the_critical_path_at_their_slowest_clock() -> None:
    """The critical path is the envelope: stage 0's first forward, all of stage 1, stage 0's last backward."""
    plan = envpipe(small_pipeline())
    assert stage_clocks_mhz(plan) == [[1400, 1000, 1000, 1400], [1400] * 4]
    assert plan.iteration_time_s == fastest_clock_plan(small_pipeline()).iteration_time_s


def test_envpipe_raises_no_further_than_the_envelope_needs() -> None:
    """Stage 1 ends its last backward at 50 ms; stage 0's first backward, from 30 ms on, at 45 at 1200 MHz."""
    one = measurements((1400, 0.010, 4.0))
    profiles = {
        (0, 0, Kind.FORWARD): measurements((1400, 0.010, 4.0), (1100, 0.015, 3.0)),
        (0, 0, Kind.BACKWARD): measurements((1400, 0.010, 4.0), (1200, 0.015, 3.0), (1000, 0.050, 1.0)),
        (1, 0, Kind.FORWARD): one,
        (1, 0, Kind.BACKWARD): one,
    }
    plan = envpipe(Pipeline(one_forward_one_backward(2, 2), profiles, (0.0, 0.0)))
    assert stage_clocks_mhz(plan)[0] == [1400, 1100, 1200, 1400]
    assert plan.iteration_time_s == pytest.approx(0.060)


def test_zeus_global_has_one_clock_for_all() -> None:
    plans = zeus_global(small_pipeline())
    assert [stage_clocks_mhz(plan) for plan in plans] == [[[mhz] * 4] * 2 for mhz in (1400, 1200, 1000)]
    assert plans[0] == fastest_clock_plan(small_pipeline())


def test_zeus_per_stage_balances_forward_times() -> None:
    """Stage 1's fastest forward takes 15 ms, longer than stage 0's slowest: stage 0 is always at 1000 MHz."""
    plans = zeus_per_stage(small_pipeline())
    assert [stage_clocks_mhz(plan) for plan in plans] == [
        [[1000] * 4, [mhz] * 4] for mhz in (1400, 1200, 1000)
    ]


def test_zeus_needs_a_clock_that_all_share() -> None:
    profiles = {
        (0, 0, Kind.FORWARD): measurements((1000, 1.0, 1.0)),
        (0, 0, Kind.BACKWARD): measurements((900, 1.0, 1.0)),
    }
    for baseline in (zeus_global, zeus_per_stage):
        with pytest.raises(ProfileError, match="stage 0: expected a setting at which all computations"):
            baseline(Pipeline(gpipe(1, 1), profiles, (0.0,)))


@given(pipeline=pipelines())
@little_search()
def test_no_baseline_beats_the_bound_and_envpipe_keeps_its_envelope_at_the_highest_clocks(
    pipeline: Pipeline,
) -> None:
    frontier = solve(pipeline, point_count=3)
    for plan in (envpipe(pipeline), *zeus_global(pipeline), *zeus_per_stage(pipeline)):
        assert plan.iteration_time_s >= frontier.t_min_s
        bound_j = frontier.bound_energy_j(plan.iteration_time_s)
        assert plan.energy_j >= bound_j - 1e-9 * (1 + abs(bound_j))
    clocks_mhz, highest_mhz = envpipe(pipeline).clocks_mhz, fastest_clock_plan(pipeline).clocks_mhz
    for order in pipeline.schedule.orders:
        forwards = [c for c in order if c.kind is Kind.FORWARD]
        backwards = [c for c in order if c.kind.value.startswith("backward")]
        envelope: list[Computation] = [forwards[0], backwards[-1]]
        if order is pipeline.schedule.orders[-1]:
            envelope += forwards + backwards
        assert all(clocks_mhz[c] == highest_mhz[c] for c in envelope)


@pytest.mark.parametrize(
    ("gpu", "published_percent", "within"), [("a100-sxm", 14.079, 0.6), ("a40", 11.123, 0.05)]
)
def test_envpipe_saves_as_much_as_published(gpu: str, published_percent: float, within: float) -> None:
    """The published energies are those of a fitted curve; on the A40 it and the measured points agree."""
    pipeline = published_pipeline(gpu, 12)
    baseline, plan = fastest_clock_plan(pipeline), envpipe(pipeline)
    assert plan.iteration_time_s == baseline.iteration_time_s
    assert 100 * (1 - plan.energy_j / baseline.energy_j) == pytest.approx(published_percent, abs=within)
