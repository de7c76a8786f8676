"""The model of steps: monotone whatever was measured, and near to what was."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.serving.errors import ServingError
from perseus.serving.model import MeasuredStep, fit_step_model, relative_errors
from tests.serving.profiles import CLOCKS_MHZ, measured, model, step

AMOUNTS = st.floats(0, 1_000)


@st.composite
def noisy_steps(draw: st.DrawFn) -> list[MeasuredStep]:
    """Draw measurements in any order of size: noise, throttling, a wrong file."""
    clocks = draw(st.lists(st.integers(200, 2_000), min_size=2, max_size=4, unique=True))
    counts = draw(st.lists(st.integers(1, 600), min_size=2, max_size=4, unique=True))
    factors = st.floats(0.2, 5.0)
    return [
        MeasuredStep(
            clock,
            count,
            draw(st.sampled_from((0, 8))),
            draw(AMOUNTS),
            0.02 * draw(factors),
            5 * draw(factors),
        )
        for clock in clocks
        for count in counts
    ]


@given(
    steps=noisy_steps(), shape=st.tuples(AMOUNTS, AMOUNTS, AMOUNTS), more=st.tuples(AMOUNTS, AMOUNTS, AMOUNTS)
)
def test_more_work_and_lower_clocks_take_longer(
    steps: list[MeasuredStep], shape: tuple[float, float, float], more: tuple[float, float, float]
) -> None:
    fitted = fit_step_model(steps, 10.0)
    larger = tuple(a + b for a, b in zip(shape, more, strict=True))
    times, longer = fitted.time_s(*shape), fitted.time_s(*larger)
    assert np.all(np.diff(times) <= 1e-12)
    assert np.all(longer >= times - 1e-12)
    powers, higher = fitted.power_w(*shape[:2]), fitted.power_w(*larger[:2])
    assert np.all(np.diff(powers) >= -1e-9)
    assert np.all(higher >= powers - 1e-9)


def test_context_of_no_account_tells_nothing() -> None:
    steps = [
        MeasuredStep(clock, tokens, 0, 1e-153 if (clock, tokens) == (201, 1) else 0.0, time_s, 5.0)
        for clock, tokens, time_s in ((200, 2, 0.01), (200, 1, 0.02), (201, 2, 0.02), (201, 1, 0.02))
    ]
    fitted = fit_step_model(steps, 10.0)
    assert np.all(fitted.time_s(1, 0, 1e5) == fitted.time_s(1, 0, 0))


def test_fit_tells_prompts_from_decoding_tokens() -> None:
    slower = [
        replace(each, time_s=each.time_s + 1e-4 * each.decoding_count, energy_j=each.energy_j)
        for each in measured()
    ]
    fitted = fit_step_model(slower, 60.0)
    decoding, prefill = fitted.time_s(200, 60, 0)[-1], fitted.time_s(259, 1, 0)[-1]
    assert decoding - prefill == pytest.approx(59 * 1e-4, rel=0.05)


def test_steps_left_out_are_predicted() -> None:
    rest = [each for each in measured() if each.clock_mhz != 990 and each.tokens != 230]
    left_out = [step(990, 200, 30, 40_000), step(1200, 200, 30, 0), step(510, 199, 31, 20_000)]
    times, powers = zip(*relative_errors(fit_step_model(rest, 60.0), left_out), strict=True)
    assert np.abs(times).max() < 0.03
    assert np.abs(powers).max() < 0.06  # the watts bend between 750 and 1200 MHz


def test_whole_tiles_are_found() -> None:
    def stairs(clock_mhz: int, tokens: int) -> MeasuredStep:
        time_s = 0.02 + 0.01 * -(-tokens // 128) * 1410 / clock_mhz
        return MeasuredStep(clock_mhz, tokens, 0, 0, time_s, 200 * time_s)

    counts = (64, 128, 192, 256, 320, 384, 448, 512)
    fitted = fit_step_model([stairs(clock, count) for clock in CLOCKS_MHZ for count in counts], 60.0)
    assert fitted.is_tiled
    jump = fitted.time_s(257, 0, 0) - fitted.time_s(256, 0, 0)
    assert jump[-1] == pytest.approx(0.01, rel=0.1)
    assert fit_step_model(measured(), 60.0).is_tiled is False


def test_other_clocks_lie_between_the_measured_ones() -> None:
    other = model().at_clocks([600, 1410, 600])
    assert other.clocks_mhz == (600, 1410)
    times = model().time_s(100, 10, 0)
    assert times[1] < other.time_s(100, 10, 0)[0] < times[0]
    for clocks in ([], [500], [1411]):
        with pytest.raises(ServingError, match="clocks: expected some in 510 to 1410 MHz"):
            model().at_clocks(clocks)


@pytest.mark.parametrize(
    ("steps", "idle_power_w", "message"),
    [
        ([step(510, 1, 0, 0), step(510, 9, 0, 0)], 60.0, "two clocks or more, found 1"),
        ([step(510, 1, 0, 0), step(990, 1, 0, 0)], 60.0, "two token counts or more, found 1"),
        ([replace(step(510, 1, 0, 0), time_s=0.0)], 60.0, "positive clock, time and energy"),
        ([replace(step(510, 1, 0, 0), energy_j=float("nan"))], 60.0, "positive clock, time and energy"),
        ([step(510, 0, 0, 0)], 60.0, "at least one token"),
        (measured(), -1.0, "idle power: expected 0 W or more, found -1.0"),
    ],
)
def test_impossible_measurements_are_refused(
    steps: list[MeasuredStep], idle_power_w: float, message: str
) -> None:
    with pytest.raises(ServingError, match=message):
        fit_step_model(steps, idle_power_w)
