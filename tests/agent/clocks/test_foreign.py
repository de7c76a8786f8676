"""Judging whether another client of the driver holds a GPU's clock."""

from collections.abc import Callable

import pytest

from perseus.agent.clocks.foreign import WINDOW_S, ForeignClock, ForeignClockJudge
from perseus.gpu import ClockEventReason

HIGHEST_MHZ = 1410
VARYING = (705, 990, 1140, 870)


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


CAPPED = ClockEventReason.SW_POWER_CAP


def always(value: int) -> Callable[[int], int]:
    return lambda _: value


@pytest.mark.parametrize(
    ("clocks_mhz", "wanted_mhz", "reasons", "read_mhz"),
    [
        pytest.param(always(705), 1200, always(0), 705, id="lower than the set clock"),
        pytest.param(always(1410), 1200, always(0), 1410, id="higher than the set clock"),
        pytest.param(always(705), None, always(0), 705, id="constant far below the highest at stock"),
        pytest.param(always(1410), 1200, always(CAPPED), 1410, id="a power cap explains no higher clock"),
        pytest.param(lambda n: 1200 if n % 3 == 0 else 705, 1200, always(0), 705, id="mostly the other's"),
        # A GPU that has reached a clock is expected to reach it again.
        pytest.param(lambda n: 1410 if n < 20 else 1200, None, always(0), 1200, id="reached before at stock"),
        pytest.param(lambda n: 1410 if n < 20 else 1200, 1410, always(0), 1200, id="reached before"),
        pytest.param(lambda n: 1410 if n < 20 else 1350, 1395, always(0), 1350, id="reached before, near it"),
        pytest.param(always(1395), 1410, always(0), None, id="heat"),
        pytest.param(always(1215), 1200, always(0), None, id="boost"),
        pytest.param(always(1200), 1200, always(0), None, id="as set"),
        pytest.param(always(1350), None, always(0), None, id="heat at stock"),
        pytest.param(lambda n: 705 if n % 3 == 0 else 1200, 1200, always(0), None, id="mostly ours"),
        pytest.param(lambda n: VARYING[n % 4], None, always(0), None, id="the GPU varies its own at stock"),
        pytest.param(always(705), 1200, always(CAPPED), None, id="power cap"),
        pytest.param(always(705), 1200, always(ClockEventReason.HW_THERMAL_SLOWDOWN), None, id="thermal"),
        pytest.param(always(705), 1200, always(ClockEventReason.SYNC_BOOST), None, id="sync boost"),
        pytest.param(always(705), None, lambda n: CAPPED * (n % 3 == 0), None, id="a reason comes and goes"),
    ],
)
def test_a_lasting_clock_that_nothing_explains_is_foreign(
    clocks_mhz: Callable[[int], int],
    wanted_mhz: int | None,
    reasons: Callable[[int], int],
    read_mhz: int | None,
) -> None:
    expected = None if read_mhz is None else ForeignClock(read_mhz, wanted_mhz)
    assert judge_of(clocks_mhz, wanted_mhz, reasons).verdict == expected


def test_a_verdict_says_when_stock_is_wanted_instead() -> None:
    judge = judge_of(lambda _: 705, 1200)
    for number in range(200, 400):
        judge.read(number / 10, 705, None, 0)
    assert judge.verdict == ForeignClock(705, None)


@pytest.mark.parametrize("wanted_mhz", [None, 3105, 3090])
def test_a_gpu_that_never_reaches_its_highest_clock_is_not_held(wanted_mhz: int | None) -> None:
    """As an RTX 4090: 3105 MHz are listed, and it runs at about 2730, less when it is warm."""
    judge = judge_of(lambda number: 2745 if number < 100 else 2685, wanted_mhz, highest_mhz=3105)
    assert judge.verdict is None


def test_a_clock_above_that_of_stock_is_not_expected_at_stock() -> None:
    """As where clocks are held for measuring, and the node's own stock is lower."""
    judge = ForeignClockJudge(1000)
    for number in range(200):
        judge.read(number / 10, 1410 if number < 100 else 1000, 1410 if number < 100 else None, 0)
    assert judge.verdict is None


@pytest.mark.parametrize("wanted_mhz", [None, 1200])
def test_a_verdict_ends_where_the_clock_at_stock_varies_again(wanted_mhz: int | None) -> None:
    judge = judge_of(lambda _: 705, wanted_mhz)
    for number in range(200, 300):
        judge.read(number / 10, VARYING[number % 4], None, 0)
    assert judge.verdict is None


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
