"""A pipeline's figures are checked before anything is solved."""

import math
from dataclasses import replace

import pytest

from perseus.solver import Computation, Kind, Pipeline, PipelineError, ProfileError, Schedule, ScheduleError
from tests.solver.pipelines import measurements, small_pipeline

FIXED = Computation(0, Kind.FIXED, 0)


def with_fixed(pipeline: Pipeline) -> Schedule:
    first, *rest = pipeline.schedule.orders
    return Schedule(((FIXED, *first), *rest))


def test_every_stage_has_a_blocking_power() -> None:
    with pytest.raises(PipelineError, match="expected one value for each of 2 stages, found 1"):
        replace(small_pipeline(), blocking_power_w=(80.0,))


@pytest.mark.parametrize("power_w", [math.nan, math.inf, -1.0])
def test_blocking_power_is_possible(power_w: float) -> None:
    with pytest.raises(PipelineError, match=f"blocking_power_w, stage 1: .*found {power_w}"):
        replace(small_pipeline(), blocking_power_w=(80.0, power_w))


@pytest.mark.parametrize("name", ["activation_lags_s", "gradient_lags_s"])
def test_lags(name: str) -> None:
    with pytest.raises(PipelineError, match=f"{name}, stages 0 → 1: .*found -0.1"):
        replace(small_pipeline(), **{name: {(0, 1): -0.1}})  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match=f"{name}: expected stages 0 to 1, found 1 → 2"):
        replace(small_pipeline(), **{name: {(1, 2): 0.1}})  # type: ignore[arg-type]


def test_extra_lags() -> None:
    first, later = Computation(0, Kind.FORWARD, 0), Computation(1, Kind.FORWARD, 1)
    with pytest.raises(PipelineError, match=r"extra_lags_s, stage 0 forward .*0 → stage 1 .*found -0\.1"):
        replace(small_pipeline(), extra_lags_s={(first, later): -0.1})
    with pytest.raises(ScheduleError, match="stage 0 fixed of microbatch 0 is in no stage's order"):
        replace(small_pipeline(), extra_lags_s={(FIXED, first): 0.1})
    with pytest.raises(ScheduleError, match=r"deadlock: .*stage 0 forward of microbatch 0") as caught:
        replace(small_pipeline(), extra_lags_s={(later, first): 0.0})
    assert "stage 1 forward of microbatch 1" in caught.value.details["cycle"]


def test_fixed_times() -> None:
    pipeline = small_pipeline()
    with pytest.raises(PipelineError, match="stage 0 fixed of microbatch 0 has no time"):
        replace(pipeline, schedule=with_fixed(pipeline))
    with pytest.raises(
        PipelineError, match=r"stage 0 fixed .*is not a fixed-time computation of the schedule"
    ):
        replace(pipeline, fixed_times_s={FIXED: 0.1})
    with pytest.raises(PipelineError, match=r"fixed_times_s, stage 0 fixed .*found nan"):
        replace(pipeline, schedule=with_fixed(pipeline), fixed_times_s={FIXED: math.nan})


def test_every_computation_is_profiled() -> None:
    pipeline = small_pipeline()
    profiles = dict(pipeline.profiles)
    del profiles[1, 0, Kind.BACKWARD]
    with pytest.raises(
        ProfileError, match="stage 1, chunk 0, backward: expected at least one measured clock"
    ):
        replace(pipeline, profiles=profiles)


def test_a_clock_is_measured_once() -> None:
    pipeline = small_pipeline()
    twice = measurements((1400, 0.01, 4.0), (1400, 0.011, 4.0))
    with pytest.raises(ProfileError, match=r"stage 0, chunk 0, forward: .* found 2 at 1400 MHz"):
        replace(pipeline, profiles={**pipeline.profiles, (0, 0, Kind.FORWARD): twice})


def test_figures_out_of_bounds_are_refused() -> None:
    pipeline = small_pipeline()
    with pytest.raises(
        PipelineError, match=r"blocking_power_w, stage 1: expected .* to 1e\+10, found 1e\+308"
    ):
        replace(pipeline, blocking_power_w=(80.0, 1e308))
    with pytest.raises(PipelineError, match=r"activation_lags_s, stages 0 → 1: .* to 1e\+06, found 1e\+308"):
        replace(pipeline, activation_lags_s={(0, 1): 1e308})


def test_all_computations_together_fit_the_arithmetic() -> None:
    """Each is within its bounds, but their sum would exceed 64 bits of picoseconds."""
    pipeline = small_pipeline()
    slow = {key: measurements((1400, 9e5, 4.0)) for key in pipeline.profiles}
    with pytest.raises(PipelineError, match=r"at most 4e\+06 s together, found .*e\+06 s"):
        replace(pipeline, profiles=slow)
    lags_s = {(0, 1): 1e6}
    with pytest.raises(PipelineError, match=r"at most 4e\+06 s together"):
        replace(pipeline, activation_lags_s=lags_s)
    later = [Computation(1, kind, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in (0, 1)]
    with pytest.raises(PipelineError, match=r"at most 4e\+06 s together"):
        replace(pipeline, extra_lags_s={(Computation(0, Kind.FORWARD, 0), c): 1e6 for c in later})
