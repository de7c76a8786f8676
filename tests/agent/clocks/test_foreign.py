"""Judging whether another client of the driver holds a GPU's clock."""

from collections.abc import Callable
from itertools import cycle

import pytest

from perseus.agent.clocks.foreign import WINDOW_S, ForeignClock, ForeignClockJudge
from perseus.gpu import ClockEventReason

HIGHEST_MHZ = 1410


def judge_of(
    clocks_mhz: Callable[[int], int], wanted_mhz: int | None, reasons: Callable[[int], int] = lambda _: 0
) -> ForeignClockJudge:
    """Return the judge after 20 s of readings, one each 0.1 s."""
    judge = ForeignClockJudge(HIGHEST_MHZ)
    for number in range(200):
        judge.read(number / 10, clocks_mhz(number), wanted_mhz, reasons(number))
    return judge


@pytest.mark.parametrize("read_mhz", [705, 1410])
def test_a_lasting_difference_from_the_set_clock_is_foreign_in_both_directions(read_mhz: int) -> None:
    assert judge_of(lambda _: read_mhz, 1200).verdict == ForeignClock(read_mhz, 1200)


def test_at_stock_a_constant_clock_far_below_the_highest_is_foreign() -> None:
    assert judge_of(lambda _: 705, None).verdict == ForeignClock(705, None)


@pytest.mark.parametrize(("read_mhz", "wanted_mhz"), [(1395, 1410), (1215, 1200), (1200, 1200), (1350, None)])
def test_heat_and_boost_that_stay_near_the_clock_are_not_foreign(
    read_mhz: int, wanted_mhz: int | None
) -> None:
    assert judge_of(lambda _: read_mhz, wanted_mhz).verdict is None


@pytest.mark.parametrize(
    "reason",
    [ClockEventReason.SW_POWER_CAP, ClockEventReason.HW_THERMAL_SLOWDOWN, ClockEventReason.SYNC_BOOST],
)
@pytest.mark.parametrize("wanted_mhz", [1200, None])
@pytest.mark.parametrize("period", [1, 3])
def test_a_lower_clock_that_the_driver_explains_is_not_foreign(
    reason: int, wanted_mhz: int | None, period: int
) -> None:
    """Also if the reason comes and goes faster than the clock."""
    judge = judge_of(lambda _: 705, wanted_mhz, lambda number: reason * (number % period == 0))
    assert judge.verdict is None


def test_a_power_cap_does_not_explain_a_higher_clock() -> None:
    judge = judge_of(lambda _: 1410, 1200, lambda _: ClockEventReason.SW_POWER_CAP)
    assert judge.verdict == ForeignClock(1410, 1200)


def test_a_varying_clock_at_stock_is_the_gpus_own() -> None:
    clocks = cycle([705, 990, 1140, 870])
    assert judge_of(lambda _: next(clocks), None).verdict is None


def test_a_clock_that_both_clients_set_in_turn_is_foreign_when_it_is_mostly_the_others() -> None:
    judge = judge_of(lambda number: 1200 if number % 3 == 0 else 705, 1200)
    assert judge.verdict == ForeignClock(705, 1200)
    assert judge_of(lambda number: 705 if number % 3 == 0 else 1200, 1200).verdict is None


def test_it_begins_once_it_lasts_follows_the_other_client_and_ends() -> None:
    judge = ForeignClockJudge(HIGHEST_MHZ)
    verdicts: list[tuple[float, ForeignClock | None]] = []
    for number in range(400):
        read_mhz = 705 if number < 150 else 900 if number < 300 else 1200
        judge.read(number / 10, read_mhz, 1200, 0)
        if not verdicts or judge.verdict != verdicts[-1][1]:
            verdicts.append((number / 10, judge.verdict))
    assert [verdict for _, verdict in verdicts] == [
        None,
        ForeignClock(705, 1200),
        ForeignClock(900, 1200),
        None,
    ]
    assert verdicts[1][0] >= WINDOW_S
    assert 30.0 < verdicts[3][0] <= 30.0 + WINDOW_S


def test_few_readings_prove_nothing_however_long_they_take() -> None:
    judge = ForeignClockJudge(HIGHEST_MHZ)
    for number in range(7):
        judge.read(10.0 * number, 705, 1200, 0)
    assert judge.verdict is None
    judge.read(70.0, 705, 1200, 0)
    assert judge.verdict == ForeignClock(705, 1200)
