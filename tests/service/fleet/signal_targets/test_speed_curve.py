"""Spending extra time by a signal, against a linear program and known optima."""

import math

import highspy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.signals import HOUR_S, ExtraTime, WorkWindow
from perseus.service.fleet.signal_targets.replanning import hours_ahead, replan
from perseus.service.fleet.signal_targets.speed_curve import Floats, SpeedCurve, SpeedPoint


def curve_of(*rows: tuple[float, float]) -> SpeedCurve:
    """Return the curve of rows of iteration time and power."""
    return SpeedCurve([SpeedPoint(time_s, 1 / time_s, power_w) for time_s, power_w in rows])


CURVE = curve_of((1.0, 1000.0), (1.05, 900.0), (1.1, 840.0), (1.2, 750.0), (1.5, 590.0))

curves = st.lists(
    st.tuples(st.integers(100, 300), st.integers(100, 2000)),
    min_size=1,
    max_size=6,
    unique_by=lambda row: row[0],
).map(lambda rows: curve_of(*((time / 100, float(power_w)) for time, power_w in rows)))
signals = st.lists(st.integers(-50, 500).map(float), min_size=1, max_size=6).map(np.array)


def least_cost(curve: SpeedCurve, durations_s: Floats, signal: Floats, iteration_count: float) -> float:
    """Return the least cost by a linear program over shares of time at each point."""
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    columns = []
    for duration_s, value in zip(durations_s, signal, strict=True):
        own = [solver.addVariable(lb=0.0, obj=duration_s * value * point.power_w) for point in curve.points]
        solver.addConstr(sum(own) == 1.0)
        columns += [(x, duration_s * point.speed_per_s) for x, point in zip(own, curve.points, strict=True)]
    solver.addConstr(sum(x * gained for x, gained in columns) >= iteration_count)
    solver.run()
    return float(solver.getInfo().objective_function_value)


@given(curves, signals, st.floats(0, 1))
def test_nothing_costs_less(curve: SpeedCurve, signal: Floats, share: float) -> None:
    durations_s = np.full(len(signal), HOUR_S)
    minimum, maximum = (speed * HOUR_S * len(signal) for speed in (curve.slowest_per_s, curve.fastest_per_s))
    wanted = minimum + share * (maximum - minimum)
    speeds = curve.spend(durations_s, signal, wanted)
    assert float(speeds @ durations_s) >= wanted * (1 - 1e-9)
    cost = sum(
        duration_s * value * curve.power_w(speed)
        for duration_s, value, speed in zip(durations_s, signal, speeds, strict=True)
    )
    least = least_cost(curve, durations_s, signal, wanted * (1 - 1e-9))
    assert cost <= least + 1e-6 * abs(least) + 1e-3


def test_too_much_work_runs_at_full_speed_and_little_work_at_the_slowest() -> None:
    hours, signal = np.full(2, HOUR_S), np.array([1.0, 2.0])
    assert CURVE.spend(hours, signal, 1e9).tolist() == pytest.approx([1.0, 1.0])
    assert CURVE.spend(hours, signal, 0.0).tolist() == pytest.approx([CURVE.slowest_per_s] * 2)


def test_points_that_need_more_energy_than_a_faster_one_are_left_out() -> None:
    curve = curve_of((1.0, 1000.0), (2.0, 400.0), (3.0, 300.0))
    assert [point.iteration_time_s for point in curve.points] == [1.0, 2.0]


def test_a_point_is_never_slower_than_requested() -> None:
    assert CURVE.at_least(1 / 1.07).iteration_time_s == 1.05
    assert CURVE.at_least(1 / 1.1).iteration_time_s == 1.1
    assert CURVE.at_least(2.0).iteration_time_s == 1.0


def test_a_curve_needs_a_point() -> None:
    with pytest.raises(InvalidFieldError, match="points: expected at least one, found none"):
        SpeedCurve([])


# ---------------------------------------------------------------------- the policy


def ahead_h(begin_h: float, end_h: float, *signal: float) -> list[float]:
    durations_s, values = hours_ahead(begin_h * HOUR_S, end_h * HOUR_S, np.array(signal))
    assert values.tolist() == [signal[0], *signal]
    return [float(round(duration_s / HOUR_S, 9)) for duration_s in durations_s]


def test_hours_are_clock_hours_and_the_signal_repeats() -> None:
    assert ahead_h(1.5, 3.25, 1, 2, 3, 4) == [0.5, 0, 1, 0.25, 0]
    assert ahead_h(1.5, 1.6, 1, 2) == [0.1, 0, 0]
    assert ahead_h(0, 10.5, 1, 2, 3) == [1, 3, 3.5, 3]
    assert ahead_h(0.25, 5, 7) == [0.75, 4]
    assert ahead_h(0, 366 * 24, *range(24)) == [1, 365, *[366] * 23]


@given(
    st.floats(0, 1e4),
    st.floats(1, 1e5),
    st.lists(st.floats(0, 9), min_size=1, max_size=9),
    st.floats(1, 3600),
)
def test_hours_cover_all_the_time(now_s: float, length_s: float, signal: list[float], hour_s: float) -> None:
    durations_s, values = hours_ahead(now_s, now_s + length_s, np.array(signal), hour_s)
    assert (durations_s >= 0).all()
    assert durations_s.sum() == pytest.approx(length_s)
    starts_s = [
        now_s,
        *(hour_s * (math.floor(now_s / hour_s) + 1 + i) for i in range(int(length_s / hour_s) + 2)),
    ]
    edges_s = np.minimum([*starts_s, now_s + length_s], now_s + length_s)
    one_by_one = np.resize(np.array(signal), len(starts_s)) @ np.diff(edges_s)
    assert durations_s @ values == pytest.approx(one_by_one, rel=1e-6, abs=1e-6)


POLICY = WorkWindow.within_extra_time(0.0, ExtraTime(5, 105 * HOUR_S), full_speed=1.0)


def test_extra_time_is_a_share_of_the_horizon() -> None:
    assert POLICY.iteration_count == pytest.approx(100 * HOUR_S)


@pytest.mark.parametrize(
    ("now_h", "done_h", "signal", "expected"),
    [
        (0, 0, None, (1.0, True, False)),
        (50, 10, [1.0], (1.0, False, True)),
        (105, 0, [1.0], (1.0, False, True)),
    ],
    ids=["no signal is reported", "a late job is reported", "after its end"],
)
def test_a_job_runs_at_full_speed(
    now_h: float, done_h: float, signal: list[float] | None, expected: tuple[float, bool, bool]
) -> None:
    known = None if signal is None else np.array(signal)
    found = replan(POLICY, CURVE, now_h * HOUR_S, done_h * HOUR_S, known)
    assert (found.point.iteration_time_s, found.has_no_signal, found.is_late) == expected


@given(
    st.lists(st.integers(0, 500).map(float), min_size=1, max_size=48),
    st.integers(1, 30),
    st.lists(st.booleans(), min_size=1, max_size=20),
    st.booleans(),
)
def test_work_is_done_in_time_with_any_knowledge_of_the_signal(
    forecast: list[float], extra_time_percent: int, is_known: list[bool], is_held_up: bool
) -> None:
    """Replan every hour with realised speeds; `is_held_up`: a budget takes two hours' worth of slack."""
    policy = WorkWindow.within_extra_time(0.0, ExtraTime(extra_time_percent, 40 * HOUR_S), full_speed=1.0)
    now_s = done = 0.0
    while now_s < policy.end_s:
        hour = int(now_s // HOUR_S)
        known = np.roll(forecast, -hour) if is_known[hour % len(is_known)] else None
        found = replan(policy, CURVE, now_s, done, known)
        assert not found.is_late
        duration_s = min(HOUR_S, policy.end_s - now_s)
        speed = found.point.speed_per_s
        if is_held_up and now_s == HOUR_S:
            speed *= 0.995 ** (1 + extra_time_percent / 10)
        done += duration_s * speed
        now_s += duration_s
    assert done >= policy.iteration_count * (1 - 1e-9)


def test_impossible_policies_are_refused() -> None:
    with pytest.raises(InvalidFieldError, match="end_s: expected after 5, found 5"):
        WorkWindow(5.0, 5.0, 1.0)
    with pytest.raises(InvalidFieldError, match="iteration_count: expected a finite number above 0"):
        WorkWindow(5.0, 6.0, 0.0)
