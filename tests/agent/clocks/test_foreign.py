"""Judging whether another client of the driver holds a GPU's clock."""

from collections.abc import Callable
from itertools import cycle

import pytest

from perseus.agent.clocks.foreign import WINDOW_S, ForeignClock, ForeignClockJudge
from perseus.gpu import ClockEventReason

HIGHEST_MHZ = 1410


def judge_of(
    clocks_mhz: Callable[[int], int],
    wanted_mhz: int | None,
    reasons: Callable[[int], int] = lambda _: 0,
    highest_mhz: int = HIGHEST_MHZ,
) -> ForeignClockJudge:
    """Return the judge after 20 s of readings, one each 0.1 s."""
    judge = ForeignClockJudge(highest_mhz)
    for number in range(200):
        judge.read(number / 10, clocks_mhz(number), wanted_mhz, reasons(number))
    return judge


@pytest.mark.parametrize("read_mhz", [705, 1410])
def test_a_lasting_difference_from_the_set_clock_is_foreign_in_both_directions(read_mhz: int) -> None:
    assert judge_of(lambda _: read_mhz, 1200).verdict == ForeignClock(read_mhz, 1200)


def test_at_stock_a_constant_clock_far_below_the_highest_is_foreign() -> None:
    assert judge_of(lambda _: 705, None).verdict == ForeignClock(705, None)


def test_a_verdict_says_when_stock_is_wanted_instead() -> None:
    judge = judge_of(lambda _: 705, 1200)
    for number in range(200, 400):
        judge.read(number / 10, 705, None, 0)
    assert judge.verdict == ForeignClock(705, None)


@pytest.mark.parametrize(("read_mhz", "wanted_mhz"), [(1395, 1410), (1215, 1200), (1200, 1200), (1350, None)])
def test_heat_and_boost_that_stay_near_the_clock_are_not_foreign(
    read_mhz: int, wanted_mhz: int | None
) -> None:
    assert judge_of(lambda _: read_mhz, wanted_mhz).verdict is None


@pytest.mark.parametrize(
    ("reason", "wanted_mhz", "period"),
    [
        (ClockEventReason.SW_POWER_CAP, 1200, 1),
        (ClockEventReason.HW_THERMAL_SLOWDOWN, 1200, 1),
        (ClockEventReason.SYNC_BOOST, 1200, 1),
        (ClockEventReason.SW_POWER_CAP, None, 3),
    ],
)
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


@pytest.mark.parametrize("wanted_mhz", [None, 3105, 3090])
def test_a_gpu_that_never_reaches_its_highest_clock_is_not_held(wanted_mhz: int | None) -> None:
    """As an RTX 4090: 3105 MHz are listed, and it runs at about 2730, less when it is warm."""
    judge = judge_of(lambda number: 2745 if number < 100 else 2685, wanted_mhz, highest_mhz=3105)
    assert judge.verdict is None


@pytest.mark.parametrize(("wanted_mhz", "read_mhz"), [(None, 1200), (1410, 1200), (1395, 1350)])
def test_a_gpu_that_has_reached_a_clock_is_expected_to_reach_it_again(
    wanted_mhz: int | None, read_mhz: int
) -> None:
    judge = judge_of(lambda number: 1410 if number < 20 else read_mhz, wanted_mhz)
    assert judge.verdict == ForeignClock(read_mhz, wanted_mhz)


def test_a_clock_above_that_of_stock_is_not_expected_at_stock() -> None:
    """As where clocks are held for measuring, and the node's own stock is lower."""
    judge = ForeignClockJudge(1000)
    for number in range(200):
        judge.read(number / 10, 1410 if number < 100 else 1000, 1410 if number < 100 else None, 0)
    assert judge.verdict is None


@pytest.mark.parametrize("wanted_mhz", [None, 1200])
def test_a_verdict_ends_where_the_clock_at_stock_varies_again(wanted_mhz: int | None) -> None:
    judge = judge_of(lambda _: 705, wanted_mhz)
    for number, clock_mhz in zip(range(200, 300), cycle([705, 990, 1140, 870]), strict=False):
        judge.read(number / 10, clock_mhz, None, 0)
    assert judge.verdict is None


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
