"""The inference demo's load, profile, figures and verdict, without its processes."""

import pytest

from perseus.demo.serving_scenario import (
    CONTROLLED,
    ENGINES,
    GPU,
    HIGH,
    LOW,
    LOW_AGAIN,
    SERVING_SCRIPT,
    STOCK,
    ServingOutcome,
    ServingSample,
    draw_serving,
    judge_serving,
    profile_csv,
)
from perseus.emulation.request_replay import Outcome
from perseus.serving.engine import Request
from perseus.serving.profile_csv import for_gpu, read_profile


def outcome(own_w: float, ttft_s: float) -> ServingOutcome:
    made = ServingOutcome(SERVING_SCRIPT)
    for second in range(1, 106):
        made.samples.append(
            ServingSample(
                second,
                1,
                {STOCK: 1410, CONTROLLED: 705},
                {STOCK: 200.0, CONTROLLED: own_w},
                dict.fromkeys(ENGINES, 10),
            )
        )
        for engine in ENGINES:
            made.outcomes[engine].append(Outcome(Request(0, 1, 10), second - 0.5, ttft_s, [0.02] * 9))
    return made


def test_the_load_rises_and_falls_and_is_the_same_at_each_run() -> None:
    requests = SERVING_SCRIPT.requests()
    assert requests == SERVING_SCRIPT.requests()
    steps = [SERVING_SCRIPT.step_at(each.arrival_s) for each in requests]
    assert steps.count(HIGH) / 25 > 3 * steps.count(LOW) / 35
    assert steps.count(LOW_AGAIN) > 0


def test_the_agent_accepts_the_made_up_profile() -> None:
    steps = for_gpu(read_profile(profile_csv(), "profile"), GPU.clocks_mhz)
    assert set(steps.clocks_mhz) == set(GPU.clocks_mhz)
    assert steps.time_error < 0.1


def test_figures_are_by_step_and_a_picture_shows_them() -> None:
    made = outcome(150.0, 0.1)
    assert made.less() == pytest.approx(0.25)
    assert made.figures(LOW)[STOCK]["requests"] == 35
    assert made.figures()[STOCK]["joules_per_token"] == pytest.approx(20.0)
    assert made.figures(HIGH)[CONTROLLED]["clocks_mhz"] == [705, 705]
    assert draw_serving(made).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("own_w", "ttft_s", "expected"),
    [(150.0, 0.1, []), (150.0, 0.6, ["ttft"]), (199.0, 0.1, ["energy per token"])],
)
def test_an_objective_missed_or_nothing_saved_is_a_problem(
    own_w: float, ttft_s: float, expected: list[str]
) -> None:
    found = judge_serving(outcome(own_w, ttft_s))
    assert [problem.partition(":")[0] for problem in found] == expected


@pytest.mark.parametrize(
    ("late_count", "expected"), [(9, []), (10, ["itl: expected 95 % in time, found 90.48 %"])]
)
def test_a_share_in_time_may_be_too_low_by_chance(late_count: int, expected: list[str]) -> None:
    made = outcome(150.0, 0.1)  # 105 requests, of which 5 % are 5, with a standard error of 2.2
    for late in made.outcomes[CONTROLLED][:late_count]:
        late.itl_s[:] = [0.06] * len(late.itl_s)
    assert judge_serving(made) == expected
