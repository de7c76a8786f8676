"""Evaluation of the power budget demo: from samples only, and once with all its processes."""

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from perseus.demo import grid_scenario
from perseus.demo.grid_scenario import (
    CUT,
    DEEPER,
    FREE,
    OVER,
    STEPS,
    GridOutcome,
    GridScript,
    draw,
    judge_grid,
    run_grid_scenario,
)
from perseus.demo.power_log import PowerLog, Sample, summary
from tests.small_jobs import planned_soon

PHASES = [(FREE, 0.0, 10.0), (CUT, 10.0, 30.0), (DEEPER, 30.0, 50.0), (OVER, 50.0, 70.0)]
LIMITS_W = {FREE: float("inf"), CUT: 900.0, DEEPER: 800.0, OVER: float("inf")}


def outcome(power_w: Callable[[str], float]) -> GridOutcome:
    samples = [
        Sample(float(second), {"a": power_w(name)}, {}, LIMITS_W[name])
        for name, begin_s, end_s in PHASES
        for second in range(int(begin_s) + 1, int(end_s) + 1)
    ]
    return GridOutcome(PowerLog(samples), PHASES)


def test_kept_and_ended_budgets_are_accepted() -> None:
    assert judge_grid(outcome({FREE: 1000.0, CUT: 890.0, DEEPER: 801.0, OVER: 990.0}.__getitem__)) == []


def test_a_violated_budget_and_missing_power_are_reported() -> None:
    (cut, over) = judge_grid(outcome({FREE: 1000.0, CUT: 960.0, DEEPER: 790.0, OVER: 800.0}.__getitem__))
    assert cut == "budget: expected at most 900 W and 2 %, found 960 W"
    assert over == "budget over: expected 1000 W again, found 800 W"


@pytest.mark.slow("three jobs train in real processes, and their power under budgets is measured")
@pytest.mark.nightly("minutes; the grid's end-to-end test has budgets in real processes")
@pytest.mark.timeout(900)
def test_the_whole_scenario_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = [replace(job, gpu=replace(job.gpu, counter_period_s=0.02)) for job in grid_scenario.JOBS]
    monkeypatch.setattr(grid_scenario, "JOBS", quick)
    script = GridScript((0.87, 0.78), free_s=4.0, budget_s=24.0, over_s=8.0, ramp_time_s=1.0, settled_s=14.0)
    witness = Mock()
    with planned_soon():
        reported = asyncio.run(run_grid_scenario(tmp_path, witness, script))
    assert [call.args for call in witness.begin.call_args_list] == [(step,) for step in STEPS]
    witness.refresh.assert_called()
    phases = json.loads((tmp_path / "summary.json").read_text())["phases"]
    assert [phase["name"] for phase in phases] == list(STEPS[1:])
    assert set(phases[2]["speeds"]) == {"easy", "usual", "strict"}
    assert draw(reported.log, reported.phases[0][1]).startswith(b"\x89PNG")


def log_of(*powers_w: float, limit_w: float = math.inf) -> PowerLog:
    """Return a sample a second, from the end of the first, of two jobs with equal power."""
    return PowerLog(
        [
            Sample(
                float(second),
                {"a": power_w / 2, "b": power_w / 2},
                {"a": 1.0, "b": 0.5 + second / 10},
                limit_w,
            )
            for second, power_w in enumerate(powers_w, start=1)
        ]
    )


def test_means_are_of_the_seconds_that_end_within() -> None:
    log = log_of(100.0, 200.0, 300.0, 400.0)
    assert log.mean_w(1.0, 3.0) == 250.0
    assert log.speed("b", 0.0, 2.0) == pytest.approx(0.65)
    assert log.speed("nobody", 0.0, 4.0) is None


def test_the_worst_mean_is_of_a_whole_window() -> None:
    log = log_of(100.0, 100.0, 400.0, 300.0, 100.0)
    assert log.worst_mean_w(0.0, 5.0, window_s=2.0) == 350.0
    assert log.worst_mean_w(0.0, 5.0, window_s=60.0) == 200.0, "the whole span, if it is shorter"


def test_the_worst_mean_is_not_below_that_of_the_whole_span() -> None:
    log = log_of(900.0, 100.0, 100.0, 100.0, 100.0)
    assert log.mean_w(0.6, 5.0) == 260.0
    assert log.worst_mean_w(0.6, 5.0, window_s=3.0) == 260.0, "no window in it has the first sample"


def test_one_second_under_a_limit_is_not_enough() -> None:
    log = log_of(500.0, 300.0, 500.0, 300.0, 290.0, 300.0)
    assert log.under_s(300.0, 0.0) == 4.0
    assert log.under_s(100.0, 0.0) is None


def test_a_summary_without_a_limit_shows_none() -> None:
    (free,) = summary(log_of(100.0, 300.0), [("free", 0.0, 2.0)], ["a"])
    assert (free["name"], free["power_w"], free["limit_w"]) == ("free", 200.0, None)
    assert (free["worst_ten_second_mean_w"], free["speeds"]) == (200.0, {"a": 1.0})
    (held,) = summary(log_of(100.0, limit_w=150.0), [("held", 0.0, 1.0)], [])
    assert held["limit_w"] == 150.0
