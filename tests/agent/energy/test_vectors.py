"""The examples' test vectors of energy estimates, for agents in other languages, hold for this one.

`python -m tests.agent.energy.test_vectors` makes them anew, from a simulated GPU that draws 280 W in
forwards, 300 W in backwards and 75 W while it waits.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from perseus.agent.energy.counter import ChangeDetector
from perseus.agent.link.computation import Computation, Kind
from perseus.agent.rank.messages import EnergyEstimate, EnergySample
from perseus.agent.rank.sampling import EstimateRequest, FinishedComputation, FinishedIteration, estimate
from perseus.gpu import ClockEventReason
from tests.agent.counter_simulation import one_forward_one_backward, simulate

PATH = Path(__file__).parents[3] / "examples" / "energy_estimate" / "vectors.json"
DESCRIPTION = (
    "A counter's readings, the iterations and computations meanwhile, and the EnergyEstimate that follows "
    "from them by the pseudocode of docs/protocol.md; null where there is none. A reading was made between "
    "begin_s and end_s; those like both their neighbours are left out. All computations are of chunk 0, and "
    "at one clock unless is_at_one_clock is false. Counts are exact; tolerance.value is the largest relative "
    "error of values. Standard errors depend on random numbers: tolerance.standard_error_ratio is their "
    "largest ratio. So does power_information: along each of its eigenvectors, the error is the inverse root "
    "of the eigenvalue, and what it says about the powers may differ by one such error; those with an "
    "eigenvalue below tolerance.least_information say nothing."
)
TOLERANCE = {"value": 0.001, "standard_error_ratio": 5.0, "least_information": 1e-4}

CLOCK_MHZ = 1200
STAGE = one_forward_one_backward(1, stage_count=4, microbatch_count=8)
LONG_WAITS = [("forward", 0.04), ("wait", 0.05), ("backward", 0.08), ("wait", 0.12)]
NO_WAITS = [("forward", 0.05), ("backward", 0.1)]
SHORT = [("forward", 0.006), ("wait", 0.004), ("backward", 0.012), ("wait", 0.004), ("gap", 0.005)]
IN_STEP = [("forward", 0.005), ("wait", 0.002), ("backward", 0.01), ("wait", 0.003)]
DISTURBED = "a power cap, an evaluation, an irregular iteration and a changed clock"
SIMULATIONS: dict[str, tuple[list[tuple[str, float]], dict[str, Any]]] = {
    "a stage of a pipeline, read every 5 ms": (STAGE, {"iterations": 5}),
    "few readings, every 40 ms": (STAGE, {"iterations": 8, "poll_interval_s": 0.04}),
    "long waits between computations": (LONG_WAITS, {"iterations": 25}),
    "a counter that moves every 20 ms": (STAGE, {"iterations": 2, "counter_period_s": 0.02}),
    "a counter without a steady update period": (STAGE, {"iterations": 8, "counter_jitter_s": 0.03}),
    DISTURBED: (STAGE, {"iterations": 9}),
    "no waits, and so no blocking power": (NO_WAITS, {"iterations": 30}),
    "too few windows for an estimate": (LONG_WAITS, {"iterations": 2}),
    "short iterations with a gap after each": (SHORT, {"iterations": 60}),
    "short iterations in step with the counter": (IN_STEP, {"iterations": 50, "duration_noise": 0.0}),
}

READING = ("begin_s", "end_s", "energy_j", "clock_event_reasons")
VECTORS = json.loads(PATH.read_text())


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
def test_the_agents_estimates_are_those_of_the_vectors(case: Mapping[str, Any]) -> None:
    found, expected = estimated(case), case["expected"]
    if found is None or expected is None:
        assert found == expected
        return
    for ours, theirs in zip([found, *found["samples"]], [expected, *expected["samples"]], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if name.startswith("power_information"):
                continue
            if name == "undetermined":
                assert [(each["kind"], each["computation_count"]) for each in ours[name]] == [
                    (each["kind"], each["computation_count"]) for each in value
                ]
            elif "_se_" in name:
                ratio = VECTORS["tolerance"]["standard_error_ratio"]
                assert value / ratio <= ours[name] <= value * ratio
            elif isinstance(value, float):
                assert ours[name] == pytest.approx(value, rel=VECTORS["tolerance"]["value"])
            elif name != "samples":
                assert ours[name] == value
    (matrix, vector), (expected_matrix, expected_vector) = information(found), information(expected)
    strengths, directions = np.linalg.eigh(expected_matrix)
    for strength, direction in zip(strengths, directions.T, strict=True):
        if strength > VECTORS["tolerance"]["least_information"]:
            ratio = (direction @ matrix @ direction / strength) ** 0.5
            assert 1 / VECTORS["tolerance"]["standard_error_ratio"] <= ratio
            assert ratio <= VECTORS["tolerance"]["standard_error_ratio"]
            ours, theirs = (
                direction @ np.linalg.lstsq(of, by, rcond=1e-12)[0]
                for of, by in ((matrix, vector), (expected_matrix, expected_vector))
            )
            assert abs(ours - theirs) <= strength**-0.5


def information(estimate: Mapping[str, Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return an estimate's information and its vector, the keys in the order of samples and undetermined."""
    vector = np.array(estimate["power_information_vector"])
    lower = np.zeros((len(vector), len(vector)))
    lower[np.tril_indices(len(vector))] = estimate["power_information"]
    return lower + np.tril(lower, -1).T, vector


def test_there_are_vectors_of_every_simulation() -> None:
    assert [case["name"] for case in VECTORS["cases"]] == list(SIMULATIONS)


def estimated(case: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the agent's estimate for a case, as a vector has it."""
    detector = ChangeDetector()
    polls = zip(*(case["readings"][name] for name in READING), strict=True)
    changes = tuple(change for each in polls if (change := detector.poll(*each)) is not None)
    computations: list[list[FinishedComputation]] = [[] for _ in case["iterations"]["begin_s"]]
    for iteration, kind, begin_s, end_s, is_pure in zip(*case["computations"].values(), strict=True):
        computation = Computation(Kind[kind], 0)
        computations[iteration].append(FinishedComputation(computation, begin_s, end_s, CLOCK_MHZ, is_pure))
    iterations = tuple(
        FinishedIteration(begin_s, end_s, tuple(own), is_regular)
        for own, begin_s, end_s, is_regular in zip(computations, *case["iterations"].values(), strict=True)
    )
    found = estimate(EstimateRequest(0, iterations, changes))
    return None if found is None else _vector(found)


def _vector(found: EnergyEstimate) -> dict[str, Any]:
    times = ("computation_count", "time_s", "time_se_s")
    return {
        "iteration_count": found.iteration_count,
        "samples": [_sample(each, *times, "energy_j", "energy_se_j") for each in found.samples],
        "blocking_power_w": _rounded(found.blocking_power_w),
        "blocking_power_se_w": _rounded(found.blocking_power_se_w),
        "window_count": found.window_count,
        "discarded_window_count": found.discarded_window_count,
        "undetermined": [_sample(each, *times) for each in found.undetermined],
        "power_information": [float(f"{value:.12g}") for value in found.power_information],
        "power_information_vector": [float(f"{value:.12g}") for value in found.power_information_vector],
    }


def _sample(sample: EnergySample, *names: str) -> dict[str, Any]:
    return {"kind": sample.kind.name, **{name: _rounded(getattr(sample, name)) for name in names}}


def _rounded(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.6g}")


def _make(name: str, seed: int) -> dict[str, Any]:
    program, options = SIMULATIONS[name]
    made = simulate(program, seed=seed, **options)
    readings = [
        (round(begin_s, 6), round(end_s, 6), round(energy_j, 3), 0)
        for begin_s, end_s, energy_j in made.readings
    ]
    moved = [row for row in range(1, len(readings)) if readings[row][2] != readings[row - 1][2]]
    kept = sorted({0, *moved, *(row - 1 for row in moved)})
    spans = [(span.key.upper(), round(span.begin_s, 6), round(span.end_s, 6)) for span in made.spans]
    size = len(spans) // options["iterations"]
    has_gaps = "gap" in dict(program)
    kinds, begins_s, ends_s = (list(column) for column in zip(*spans, strict=True))
    edges_s = [0.0, *begins_s[size::size], round(made.end_s, 6)]
    case: dict[str, Any] = {
        "name": name,
        "readings": {
            column: list(values)
            for column, values in zip(
                READING, zip(*(readings[row] for row in kept), strict=True), strict=True
            )
        },
        "iterations": {
            "begin_s": [round(begin_s, 6) for begin_s, _ in made.iterations_s] if has_gaps else edges_s[:-1],
            "end_s": [round(end_s, 6) for _, end_s in made.iterations_s] if has_gaps else edges_s[1:],
            "is_regular": [True] * options["iterations"],
        },
        "computations": {
            "iteration": [row // size for row in range(len(spans))],
            "kind": kinds,
            "begin_s": begins_s,
            "end_s": ends_s,
            "is_at_one_clock": [True] * len(spans),
        },
    }
    if name == DISTURBED:
        case["readings"]["clock_event_reasons"][20:24] = [int(ClockEventReason.SW_POWER_CAP)] * 4
        case["iterations"]["end_s"][3] = ends_s[4 * size - 1]  # until the next one there is an evaluation
        case["iterations"]["is_regular"][5] = False
        case["computations"]["is_at_one_clock"][7 * size] = False
    return {**case, "expected": estimated(case)}


if __name__ == "__main__":
    cases = [_make(name, seed) for seed, name in enumerate(SIMULATIONS)]
    text = json.dumps({"description": DESCRIPTION, "tolerance": TOLERANCE, "cases": cases}, indent=1)
    flat = re.sub(
        r"\[[^\[\]{}]*\]", lambda column: re.sub(r"\s+", " ", column[0]), text
    )  # a line for a column
    PATH.write_text(f"{flat}\n")
