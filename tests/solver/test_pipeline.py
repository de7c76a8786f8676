"""A pipeline's figures are checked before anything is solved."""

import math
from dataclasses import replace

import pytest

from perseus.solver import (
    Computation,
    Kind,
    Pipeline,
    PipelineError,
    ProfileError,
    ProfileKey,
    Schedule,
    ScheduleError,
    SolverError,
)
from tests.solver.pipelines import measurements, small_pipeline

FIXED = Computation(0, Kind.FIXED, 0)
FIRST, LATER = Computation(0, Kind.FORWARD, 0), Computation(1, Kind.FORWARD, 1)
LAST = [Computation(1, kind, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in (0, 1)]
SMALL = small_pipeline()
WITH_FIXED = Schedule(((FIXED, *SMALL.schedule.orders[0]), *SMALL.schedule.orders[1:]))
TOO_LONG = r"at most 4e\+06 s together"
"""Each time is within its bounds, but their sum would exceed 64 bits of picoseconds."""


def profiled(key: ProfileKey, *rows: tuple[int, float, float]) -> dict[str, object]:
    return {"profiles": {**SMALL.profiles, key: measurements(*rows)}}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"blocking_power_w": (80.0,)}, PipelineError, "expected one value for each of 2 stages, found 1"),
        *(
            (
                {"blocking_power_w": (80.0, power_w)},
                PipelineError,
                rf"blocking_power_w, stage 1: expected .* to 1e\+10, found {power_w}",
            )
            for power_w in (math.nan, math.inf, -1.0)
        ),
        (
            {"blocking_power_w": (80.0, 1e308)},
            PipelineError,
            r"blocking_power_w, stage 1: expected .* to 1e\+10, found 1e\+308",
        ),
        *(
            ({name: {link: lag_s}}, PipelineError, f"{name}{message}")
            for name in ("activation_lags_s", "gradient_lags_s")
            for link, lag_s, message in (
                ((0, 1), -0.1, ", stages 0 → 1: .*found -0.1"),
                ((0, 1), 1e308, r", stages 0 → 1: .* to 1e\+06, found 1e\+308"),
                ((1, 2), 0.1, ": expected stages 0 to 1, found 1 → 2"),
            )
        ),
        (
            {"extra_lags_s": {(FIRST, LATER): -0.1}},
            PipelineError,
            r"extra_lags_s, stage 0 forward .*0 → stage 1 .*found -0\.1",
        ),
        (
            {"extra_lags_s": {(FIXED, FIRST): 0.1}},
            ScheduleError,
            "stage 0 fixed of microbatch 0 is in no stage's order",
        ),
        ({"schedule": WITH_FIXED}, PipelineError, "stage 0 fixed of microbatch 0 has no time"),
        (
            {"fixed_times_s": {FIXED: 0.1}},
            PipelineError,
            r"stage 0 fixed .*is not a fixed-time computation of the schedule",
        ),
        (
            {"schedule": WITH_FIXED, "fixed_times_s": {FIXED: math.nan}},
            PipelineError,
            r"fixed_times_s, stage 0 fixed .*found nan",
        ),
        (
            profiled((0, 0, Kind.FORWARD), (1400, 0.01, 4.0), (1400, 0.011, 4.0)),
            ProfileError,
            r"stage 0, chunk 0, forward: .* found 2 at 1400 MHz",
        ),
        (
            {"profiles": dict.fromkeys(SMALL.profiles, measurements((1400, 9e5, 4.0)))},
            PipelineError,
            rf"{TOO_LONG}, found .*e\+06 s",
        ),
        ({"activation_lags_s": {(0, 1): 1e6}}, PipelineError, TOO_LONG),
        ({"extra_lags_s": {(FIRST, c): 1e6 for c in LAST}}, PipelineError, TOO_LONG),
    ],
)
def test_impossible_figures_are_refused(
    changed: dict[str, object], error: type[SolverError], message: str
) -> None:
    with pytest.raises(error, match=message):
        replace(SMALL, **changed)  # type: ignore[arg-type]


def test_every_computation_is_profiled() -> None:
    profiles = {key: some for key, some in SMALL.profiles.items() if key != (1, 0, Kind.BACKWARD)}
    with pytest.raises(ProfileError, match="stage 1, chunk 0, backward: expected at least one measured"):
        Pipeline(SMALL.schedule, profiles, SMALL.blocking_power_w)


def test_a_lag_against_the_order_is_a_deadlock_that_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"deadlock: .*stage 0 forward of microbatch 0") as caught:
        replace(SMALL, extra_lags_s={(LATER, FIRST): 0.0})
    assert "stage 1 forward of microbatch 1" in caught.value.details["cycle"]
