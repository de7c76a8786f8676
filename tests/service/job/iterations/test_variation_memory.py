"""How computations varied, from their times and clocks."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np
import pytest

from perseus.service.domain.measured import JobIteration
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import KINDS, ComputationColumns
from perseus.service.job.iterations.variation_memory import MIN_ITERATIONS, VariationMemory
from perseus.solver import Kind, Measurement, Pipeline, Variation, one_forward_one_backward

SCHEDULE = one_forward_one_backward(2, 2)
TIMES_S = {1000: 0.2, 1200: 0.16, 1400: 0.1}
PROFILED = Pipeline(
    SCHEDULE,
    {
        (stage, 0, kind): tuple(Measurement(mhz, time_s, 50.0) for mhz, time_s in TIMES_S.items())
        for stage in range(2)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    },
    (60.0, 60.0),
)
TOLERANCE = 0.003
REGULAR = JobIteration(0, (1, 1), is_regular=True, iteration_time_s=1.0, pipeline_energy_j=(1.0, 1.0))


class Seen:
    """A job of so many pipelines of two stages, and what is kept of its iterations."""

    def __init__(self, pipelines: int = 1) -> None:
        self.pipelines = pipelines
        self.memory = VariationMemory(SCHEDULE, pipelines)
        self.iteration = 0

    def run(self, factors: Sequence[float], clock_mhz: int = 1200, **changes: Any) -> None:
        """Run an iteration whose microbatches take so many times as long as profiled."""
        self.iteration += 1
        self.memory.take(replace(REGULAR, iteration=self.iteration, **changes))
        for pipeline in range(self.pipelines):
            for stage, order in enumerate(SCHEDULE.orders):
                times_s = [factors[c.microbatch] * TIMES_S[clock_mhz or 1400] for c in order]
                self.memory.add(
                    Coordinates(pipeline, stage, 0),
                    ComputationColumns(
                        [*repeat(self.iteration, len(order))],
                        [KINDS.index(c.kind) for c in order],
                        [c.microbatch for c in order],
                        [c.chunk for c in order],
                        [0.0] * len(order),
                        times_s,
                        [clock_mhz] * len(order),
                    ),
                )

    def variation(self) -> Variation | None:
        return self.memory.variation(PROFILED, TOLERANCE)


def test_times_are_relative_to_the_profile_at_their_clocks() -> None:
    seen = Seen()
    for number in range(MIN_ITERATIONS + 1):
        seen.run([1.2, 0.8], clock_mhz=(0, 1000, 1200)[number % 3])
    assert seen.memory.is_known
    variation = seen.variation()
    assert variation is not None
    assert variation.tolerance == TOLERANCE
    assert variation.factors.shape == (MIN_ITERATIONS, 1, 8)
    expected = [(1.2, 0.8)[c.microbatch] for c in SCHEDULE.computations]
    assert np.allclose(variation.factors, expected, atol=1e-6)


def test_a_profile_that_is_off_is_no_variation() -> None:
    seen = Seen()
    for number in range(2 * MIN_ITERATIONS):
        seen.run([1.3 + 0.001 * (number % 2)] * 2)
    assert seen.variation() is None


@pytest.mark.parametrize(
    "changes",
    [{"is_regular": False}, {"has_straggler": True}, {"versions": None}, {"has_clock_change": True}],
)
def test_iterations_that_say_nothing_are_left_out(changes: dict[str, Any]) -> None:
    seen = Seen()
    for _ in range(2 * MIN_ITERATIONS):
        seen.run([1.2, 0.8], **changes)
    assert not seen.memory.is_known
    assert seen.variation() is None


def test_clocks_that_are_not_profiled_are_left_out() -> None:
    seen = Seen()
    TIMES_S[1300] = 0.12
    for _ in range(2 * MIN_ITERATIONS):
        seen.run([1.2, 0.8], clock_mhz=1300)
    del TIMES_S[1300]
    assert seen.memory.is_known
    assert seen.variation() is None


def test_a_bounded_number_of_iterations_and_pipelines_is_kept() -> None:
    seen = Seen(pipelines=9)
    for _ in range(100):
        seen.run([1.2, 0.8])
    variation = seen.variation()
    assert variation is not None
    assert variation.factors.shape == (32, 3, 8)
    seen.memory.forget()
    assert not seen.memory.is_known
