from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, pairwise
from typing import Any

import numpy as np
import pytest

from perseus.agent.energy.counter import CounterChange
from perseus.agent.energy.regression import (
    Estimate,
    NotDetermined,
    PowerFit,
    Span,
    computation_energy_j,
    cumulative_energy_j,
    estimate_power,
    typical_duration_s,
)
from perseus.agent.link.computation import Kind
from perseus.agent.rank.messages import EnergyEstimate
from perseus.agent.rank.sampling import estimate
from tests.agent.counter_simulation import POWER_W, Simulation, one_forward_one_backward, simulate

SEEDS = range(40)
LONG = [("forward", 0.050), ("wait", 0.030), ("backward", 0.100), ("wait", 0.030)]


def stage_program(stage: int) -> list[tuple[str, float]]:
    return one_forward_one_backward(stage, stage_count=4, microbatch_count=8)


def fit(simulation: Simulation, **more: Any) -> PowerFit[str]:
    """Return the fit to a simulation; `more`: what differs from all of it."""
    own = {
        "changes": simulation.changes,
        "spans": simulation.spans,
        "begin_s": 0.0,
        "end_s": simulation.end_s,
    }
    result = estimate_power(**{**own, **more})
    assert isinstance(result, PowerFit)
    return result


def powers_w(result: PowerFit[str]) -> dict[str, Estimate]:
    assert result.blocking_power_w is not None
    return {**result.power_w, "wait": result.blocking_power_w}


def errors(simulations: Iterator[Simulation]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Per key: relative errors, and errors in units of the stated standard error."""
    relative: dict[str, list[float]] = {key: [] for key in POWER_W}
    standardised: dict[str, list[float]] = {key: [] for key in POWER_W}
    for simulation in simulations:
        for key, power_w in powers_w(fit(simulation)).items():
            relative[key].append(power_w.value / POWER_W[key] - 1)
            standardised[key].append((power_w.value - POWER_W[key]) / power_w.standard_error)
    return relative, standardised


@pytest.mark.parametrize(
    ("program", "iterations", "jitter_s"),
    [
        pytest.param(LONG, 70, 0.0, id="50 and 100 ms, with 30 ms waits"),
        pytest.param(stage_program(0), 3, 0.0, id="three iterations of the first stage"),
        pytest.param(stage_program(3), 3, 0.0, id="three iterations of the last stage"),
        pytest.param(stage_program(1), 6, 0.001, id="a counter whose update period varies by 1 ms"),
        pytest.param(stage_program(1), 6, 0.030, id="a counter whose update period varies by 30 ms"),
    ],
)
def test_powers_are_accurate_and_their_errors_as_stated(
    program: list[tuple[str, float]], iterations: int, jitter_s: float
) -> None:
    relative, standardised = errors(
        simulate(program, seed=seed, iterations=iterations, counter_jitter_s=jitter_s) for seed in SEEDS
    )
    for key, tolerance in (("forward", 0.05), ("backward", 0.05), ("wait", 0.05 if jitter_s else 0.10)):
        assert np.mean(np.abs(relative[key]) <= tolerance) >= (0.9 if jitter_s else 0.95)
        assert np.mean(np.abs(standardised[key]) <= 2) >= 0.90
        if not jitter_s:
            assert np.abs(np.mean(standardised[key])) <= 0.6  # no bias: 4 standard errors of this mean


def test_standard_errors_nearly_hold_where_power_varies_from_computation_to_computation() -> None:
    """Nearly: a computation that reaches into two windows lifts both, which the noise model leaves out."""
    _, standardised = errors(simulate(LONG, seed=seed, iterations=70, power_noise=0.03) for seed in SEEDS)
    for of_key in standardised.values():
        assert np.mean(np.abs(of_key) <= 2) >= 0.8


@pytest.mark.parametrize(
    ("duration_noise", "counter_jitter_s"), [(0.0, 0.0), (0.001, 0.0003), (0.01, 0.0), (0.01, 0.0003)]
)
def test_an_iteration_of_whole_counter_periods_gives_honest_answers_or_none(
    duration_noise: float, counter_jitter_s: float
) -> None:
    """The counter then samples the same few moments again and again: the errors must reflect the lack of
    data."""
    program = [("forward", 0.024), ("backward", 0.048), ("wait", 0.020)] * 3
    program += [("forward", 0.024), ("backward", 0.048), ("wait", 0.052)]
    within, total = 0, 0
    for seed in SEEDS:
        simulation = simulate(
            program,
            seed=seed,
            iterations=15,
            duration_noise=duration_noise,
            counter_jitter_s=counter_jitter_s,
        )
        result = estimate_power(simulation.changes, simulation.spans, begin_s=0.0, end_s=simulation.end_s)
        if isinstance(result, PowerFit):
            found = {**result.power_w, "wait": result.blocking_power_w}
            for key, power_w in found.items():
                if power_w is not None:
                    total += 1
                    within += abs(power_w.value - POWER_W[key]) <= 2 * power_w.standard_error
    assert within >= 0.85 * total
    if duration_noise >= 0.01 and counter_jitter_s == 0:
        assert total >= 0.9 * len(POWER_W) * len(SEEDS)


@pytest.mark.parametrize("stage", [0, 3])
def test_occasional_late_marks_do_little_harm(stage: int) -> None:
    program = stage_program(stage)
    dropped_count, errors_of_forward = 0, []
    for seed in SEEDS:
        simulation = simulate(program, seed=seed, iterations=4, late_mark_share=0.01)
        result = fit(simulation)
        dropped_count += result.dropped_window_count
        errors_of_forward.append(result.power_w["forward"].value / POWER_W["forward"] - 1)
    assert dropped_count > 0
    assert np.quantile(np.abs(errors_of_forward), 0.8) <= 0.01


def test_without_an_update_period_the_standard_errors_follow_the_poll_interval() -> None:
    coarse, fine = (
        fit(simulate(LONG, seed=1, iterations=70, counter_jitter_s=0.03, poll_interval_s=poll_interval_s))
        for poll_interval_s in (0.010, 0.001)
    )
    assert fine.power_w["forward"].standard_error < 0.25 * coarse.power_w["forward"].standard_error


def test_windows_outside_of_the_observed_stretch_are_not_used() -> None:
    simulation = simulate(LONG, seed=4, iterations=70)
    result = fit(simulation, begin_s=5.0, end_s=10.0)
    assert 45 <= result.window_count <= 50
    assert result.power_w["backward"].value == pytest.approx(POWER_W["backward"], rel=0.05)


def test_too_few_windows_are_not_enough() -> None:
    simulation = simulate(LONG, seed=5, iterations=2)
    result = estimate_power(simulation.changes, simulation.spans, begin_s=0.0, end_s=simulation.end_s)
    assert isinstance(result, NotDetermined)
    assert "expected at least 6 windows for 2 keys and waiting, found" in result.reason
    assert estimate_power([], [], begin_s=0.0, end_s=1.0) == NotDetermined(
        "expected at least 4 windows for 0 keys and waiting, found 0", 0, 0
    )


def test_keys_that_always_come_together_are_not_separated_but_the_others_are() -> None:
    simulation = simulate(LONG, seed=6, iterations=70, counter_jitter_s=0.03)
    spans = []
    for span in simulation.spans:
        if span.key == "backward":
            edges_s = np.linspace(span.begin_s, span.end_s, 51)
            slices = zip(cycle(("odd", "even")), pairwise(edges_s), strict=False)
            spans += [Span(key, begin_s, end_s) for key, (begin_s, end_s) in slices]
        else:
            spans.append(span)
    result = fit(simulation, spans=spans)
    assert set(result.power_w) == {"forward"}
    assert result.power_w["forward"].value == pytest.approx(POWER_W["forward"], rel=0.05)


def test_a_steady_mixture_determines_only_the_mean_power() -> None:
    """Windows that all have the same shares, because a computation takes a tenth of the counter's step."""
    changes = [CounterChange(0.1 * step, 20.0 * step, 1e-6) for step in range(50)]
    spans = [Span("forward", 0.01 * step, 0.01 * step + 0.005) for step in range(490)]
    result = estimate_power(changes, spans, begin_s=-1.0, end_s=5.0)
    assert isinstance(result, PowerFit)
    assert result.power_w == {}
    assert result.blocking_power_w is None
    least, most = np.linalg.eigvalsh(result.joint.matrix)
    assert abs(least) < 1e-6 * most
    assert result.joint.vector == pytest.approx(result.joint.matrix @ [200.0, 200.0], rel=1e-3)


SHORT = [("forward", 0.002), ("wait", 0.001), ("backward", 0.004), ("wait", 0.002)]


@pytest.mark.parametrize("duration_noise", [0.001, 0.05])
def test_the_joint_information_on_short_computations_is_honest(duration_noise: float) -> None:
    """It holds in all directions, however little of it there is: errors are no larger than stated."""
    true_w = np.array(list(POWER_W.values()))
    found = []
    for seed in SEEDS:
        joint = fit(simulate(SHORT, seed=seed, iterations=120, duration_noise=duration_noise)).joint
        assert joint.keys == ("forward", "backward")
        error = joint.vector - joint.matrix @ true_w
        found.append(error @ np.linalg.pinv(joint.matrix, rcond=1e-12, hermitian=True) @ error / 3)
    assert np.mean(found) <= 1.2
    assert np.mean(np.array(found) <= 2.6) >= 0.9, "95 % of χ²/3 with 3 degrees of freedom"


def test_determined_powers_follow_from_the_joint_information() -> None:
    result = fit(simulate(LONG, seed=1, iterations=20))
    covariance = np.linalg.inv(result.joint.matrix)
    own = powers_w(result)
    assert list(own) == [*result.joint.keys, "wait"]
    assert covariance @ result.joint.vector == pytest.approx([each.value for each in own.values()])
    assert np.sqrt(np.diag(covariance)) == pytest.approx([each.standard_error for each in own.values()])


def test_information_on_some_powers_is_that_without_the_others() -> None:
    joint = fit(simulate(LONG, seed=1, iterations=20)).joint
    some = joint.of(["backward"])
    assert some.keys == ("backward",)
    assert np.linalg.inv(some.matrix) == pytest.approx(np.linalg.inv(joint.matrix)[1:, 1:])
    assert np.linalg.solve(some.matrix, some.vector) == pytest.approx(
        np.linalg.solve(joint.matrix, joint.vector)[1:]
    )
    turned = joint.of(["backward", "forward"])
    assert turned.matrix == pytest.approx(joint.matrix[np.ix_([1, 0, 2], [1, 0, 2])])


def test_overlapping_spans_are_refused() -> None:
    spans = [Span("forward", 0.0, 1.0), Span("backward", 0.5, 1.5)]
    with pytest.raises(ValueError, match=r"backward: expected begin_s >= 1\.0 .* found 0\.5 to 1\.5"):
        estimate_power([], spans, begin_s=0.0, end_s=2.0)


def test_energy_of_a_computation_propagates_both_errors() -> None:
    energy_j = computation_energy_j(Estimate(300.0, 3.0), Estimate(0.1, 0.002))
    assert energy_j.value == pytest.approx(30.0)
    assert energy_j.standard_error == pytest.approx(np.hypot(3.0 * 0.1, 300.0 * 0.002))


def test_the_typical_duration_has_a_correct_error_and_no_late_mark_moves_it() -> None:
    random = np.random.default_rng(0)
    found = [typical_duration_s((0.1 + 0.01 * random.standard_normal(25)).tolist()) for _ in range(400)]
    spread_s = np.std([each.value for each in found])
    assert np.mean([each.standard_error for each in found]) == pytest.approx(spread_s, rel=0.15)
    assert typical_duration_s([0.1]) == Estimate(0.1, 0.0)
    assert typical_duration_s([0.1, 0.101, 0.099, 0.1, 0.5]).value == pytest.approx(0.1)


CHANGES = [
    CounterChange(time_s, energy_j, 0.0) for time_s, energy_j in ((1.0, 10.0), (2.0, 30.0), (4.0, 50.0))
]


@pytest.mark.parametrize(
    ("time_s", "expected_j"),
    [(0.9, None), (1.0, 10.0), (1.5, 20.0), (2.0, 30.0), (3.0, 40.0), (4.0, 50.0), (4.1, None)],
)
def test_cumulative_energy(time_s: float, expected_j: float | None) -> None:
    assert cumulative_energy_j(CHANGES, time_s) == expected_j
    assert cumulative_energy_j([], time_s) is None


# --- The agent's estimates of iterations from these powers --------------------------------------------------

WITH_GAPS = [("forward", 0.006), ("wait", 0.004), ("backward", 0.012), ("wait", 0.004), ("gap", 0.005)]


def estimated(program: list[tuple[str, float]], iterations: int, seed: int, **more: Any) -> EnergyEstimate:
    """Return the agent's estimate after a program, of which each repetition is an iteration."""
    made = estimate(simulate(program, seed=seed, iterations=iterations, **more).request(iterations, 1200))
    assert made is not None
    return made


def test_energies_and_blocking_power_are_right_within_their_stated_errors() -> None:
    """There is a gap in every window, as short as an optimizer step."""
    deviations = []
    for seed in range(16):
        made = estimated(WITH_GAPS, 250, seed, duration_noise=0.05)
        assert {sample.kind for sample in made.samples} == {Kind.FORWARD, Kind.BACKWARD}
        assert made.undetermined == ()
        assert made.blocking_power_w is not None
        assert made.blocking_power_w == pytest.approx(POWER_W["wait"], rel=0.1)
        deviations.append((made.blocking_power_w - POWER_W["wait"]) / made.blocking_power_se_w)
        for sample in made.samples:
            true_j = POWER_W[sample.kind.name.lower()] * sample.time_s
            assert sample.energy_j == pytest.approx(true_j, rel=0.10)
            deviations.append((sample.energy_j - true_j) / sample.energy_se_j)
    assert np.mean(np.abs(deviations) <= 2) >= 0.9
    assert abs(np.mean(deviations)) <= 0.6


def test_computations_before_the_plans_clock_was_set_take_no_joint_information_from_the_others() -> None:
    """Each iteration begins at stock; computations much shorter than a window leave single powers open."""
    request = simulate(8 * [("forward", 0.004), ("backward", 0.004)], seed=0, iterations=60).request(60, 1200)
    iterations = tuple(
        replace(each, computations=(replace(each.computations[0], clock_mhz=None), *each.computations[1:]))
        for each in request.iterations
    )
    made = estimate(replace(request, iterations=iterations, clocks_mhz=frozenset({1200})))
    assert made is not None
    found = sorted((each.kind, each.clock_mhz) for each in made.samples + made.undetermined)
    assert found == [(Kind.FORWARD, 1200), (Kind.BACKWARD, 1200)]
    assert (len(made.power_information), len(made.power_information_vector)) == (6, 3)


def test_late_marks_do_not_stretch_the_time_of_a_computation() -> None:
    made = estimated(LONG * 2, 40, 1, late_mark_share=0.2)
    assert {sample.kind.name: sample.time_s for sample in made.samples} == {
        "FORWARD": pytest.approx(0.050, rel=0.005),
        "BACKWARD": pytest.approx(0.100, rel=0.005),
    }
