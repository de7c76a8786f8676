"""The examples' test vectors of energy estimates, for agents in other languages, hold for this one.

Their readings are of a simulated GPU that draws 280 W in forwards, 300 W in backwards and 75 W while it waits
(`tests/agent/counter_simulation.py`). `python -m tests.agent.energy.test_vectors` estimates anew.
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

PATH = Path(__file__).parents[3] / "examples" / "energy_estimate" / "vectors.json"
CLOCK_MHZ = 1200
READING = ("begin_s", "end_s", "energy_j", "clock_event_reasons")
VECTORS = json.loads(PATH.read_text())


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
def test_the_agents_estimates_are_those_of_the_vectors(case: Mapping[str, Any]) -> None:
    found, expected = estimated(case), case["expected"]
    if found is None or expected is None:
        assert found == expected
        return
    rows = ([each, *each["samples"], *each["undetermined"]] for each in (found, expected))
    for ours, theirs in zip(*rows, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if name in ("samples", "undetermined") or name.startswith("power_information"):
                continue
            if "_se_" in name:
                ratio = VECTORS["tolerance"]["standard_error_ratio"]
                assert value / ratio <= ours[name] <= value * ratio
            elif isinstance(value, float):
                assert ours[name] == pytest.approx(value, rel=VECTORS["tolerance"]["value"])
            else:
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


if __name__ == "__main__":
    cases = [{**case, "expected": estimated(case)} for case in VECTORS["cases"]]
    text = json.dumps({**VECTORS, "cases": cases}, indent=1)
    flat = re.sub(
        r"\[[^\[\]{}]*\]", lambda column: re.sub(r"\s+", " ", column[0]), text
    )  # a line for a column
    PATH.write_text(f"{flat}\n")
