"""Replays of some minutes: the controller against stock, and what a disturbance leads to."""

import re
from pathlib import Path

import numpy as np
import pytest

from perseus.serving.controller import MAX_STATS_AGE_S, Controller, StockReason
from perseus.serving.engine import Engine, Request, StepTable
from perseus.serving.model import StepModel
from perseus.serving.replay import (
    INTERVAL_S,
    SET_LATENCY_S,
    Controlled,
    Disturbance,
    FixedClock,
    Foreseen,
    LowestClock,
    Policy,
    ReplayResult,
    replay,
)
from tests.serving.profiles import CLOCKS_MHZ, LIMITS, OBJECTIVES, model

STEPS = model()
TABLE = StepTable(STEPS, LIMITS)
END_S = 120.0


def requests(rate: float = 1.0, end_s: float = END_S) -> list[Request]:
    generator = np.random.default_rng(3)
    times_s = np.cumsum(generator.exponential(1 / rate, int(rate * end_s)))
    return [Request(float(t), 300, 80) for t in times_s if t < end_s]


def controlled(steps: StepModel = STEPS, refused_s: tuple[float, float] = (0.0, 0.0)) -> Controlled:
    return Controlled(lambda now_s: Controller(steps, LIMITS, OBJECTIVES, now_s), refused_s=refused_s)


def run(policy: Policy, disturbance: Disturbance | None = None) -> ReplayResult:
    return replay(Engine(TABLE, LIMITS, requests()), policy, OBJECTIVES, END_S, disturbance)


def test_controller_saves_energy_and_keeps_the_objectives() -> None:
    stock, ours = run(FixedClock(None)), run(controlled())
    assert ours.energy_j < 0.85 * stock.energy_j
    assert ours.tokens == stock.tokens
    assert ours.ttft_attainment >= 0.99
    assert ours.itl_attainment >= 0.95


def test_rising_load_raises_the_clock_as_far_as_it_has_to() -> None:
    generator = np.random.default_rng(3)
    low = [Request(float(t), 480, 80) for t in np.cumsum(generator.exponential(3, 40))]
    high = [Request(120 + float(t), 480, 80) for t in np.cumsum(generator.exponential(1 / 3, 240))]
    load = [each for each in low if each.arrival_s < 120] + high
    result = replay(Engine(TABLE, LIMITS, load), controlled(), OBJECTIVES, 200.0)
    before = [column for time_s, column in result.clocks if time_s < 120]
    after = [CLOCKS_MHZ[column or 0] for time_s, column in result.clocks if time_s > 120]
    assert before[-1] == 0
    assert (after[0], after[-1]) == (750, 990)
    assert result.itl_attainment > 0.98


def test_policies_differ_only_in_clocks() -> None:
    stock = run(FixedClock(None))
    lowest = run(LowestClock(STEPS, LIMITS, OBJECTIVES))
    foreseen = run(Foreseen(OBJECTIVES))
    for result in (lowest, foreseen):
        assert result.tokens == stock.tokens
        assert result.energy_j < stock.energy_j
    assert foreseen.energy_j <= min(run(FixedClock(i)).energy_j for i in range(len(CLOCKS_MHZ))) * 1.05


@pytest.mark.parametrize(
    "disturbance",
    [Disturbance(no_stats_s=(60.0, 80.0)), Disturbance(engine_away_s=(60.0, 70.0))],
    ids=["no statistics", "the engine restarts"],
)
def test_an_engine_that_is_silent_is_at_stock_within_a_second_for_as_long(disturbance: Disturbance) -> None:
    policy = controlled()
    result = run(policy, disturbance)
    stock_s, *_ = [time_s for time_s, column in result.clocks if column is None and time_s > 10]
    assert stock_s - 60.0 <= MAX_STATS_AGE_S
    until_s = max(disturbance.no_stats_s[1], disturbance.engine_away_s[1])
    assert [column for time_s, column in result.clocks if stock_s < time_s < until_s] == []
    assert policy.reasons[0] == (stock_s, StockReason.NO_STATS)
    assert result.clocks[-1][1] is not None
    assert len(result.engine.totals.ttft) >= len(requests())


def test_refused_clock_leads_to_stock() -> None:
    policy = controlled(refused_s=(0.0, 200.0))
    result = run(policy)
    assert policy.reasons[0][1] is StockReason.CLOCK_REFUSED
    assert {column for _, column in result.clocks} == {None}


def test_dead_agent_leads_to_stock_by_its_supervisor() -> None:
    result = run(controlled(), Disturbance(no_agent_s=(60.0, 80.0), restored_after_s=1.0))
    (stock_s,) = [time_s for time_s, column in result.clocks if column is None and time_s > 10]
    assert 61.0 <= stock_s <= 61.0 + INTERVAL_S
    after = [column for time_s, column in result.clocks if time_s > 80]
    assert after[0] == len(CLOCKS_MHZ) - 1


@pytest.mark.parametrize(("time", "power"), [(1.2, 0.8), (0.8, 1.2)])
def test_wrong_profile_is_corrected(time: float, power: float) -> None:
    policy = controlled(steps=STEPS.scaled(1 / time, 1 / power))
    ours = run(policy)
    assert policy.controller.model.time.scale == pytest.approx(time, rel=0.05)
    assert policy.controller.model.power.scale == pytest.approx(power, rel=0.08)
    assert ours.ttft_attainment >= 0.99
    assert ours.itl_attainment >= 0.95


def test_clocks_take_effect_after_the_set_latency() -> None:
    engine = Engine(TABLE, LIMITS, [Request(0.0, 10, 400)])
    replay(engine, FixedClock(0), OBJECTIVES, 5.0)
    slow = float(STEPS.time_s(1, 0, 0)[0])
    first = next(end_s for end_s, time_s, _ in engine.totals.itl if time_s > 0.99 * slow)
    assert first - slow >= INTERVAL_S + SET_LATENCY_S


def test_example_of_the_documentation_saves_energy(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(example, {})
    stock, ours = (float(line.split()[0]) for line in capsys.readouterr().out.splitlines())
    assert ours < stock
