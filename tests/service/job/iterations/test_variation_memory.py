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
from perseus.solver import one_forward_one_backward

SCHEDULE = one_forward_one_backward(2, 2)
REGULAR = JobIteration(0, (1, 1), is_regular=True, iteration_time_s=1.0, pipeline_energy_j=(1.0, 1.0))


class Seen:
    """A job of so many pipelines of two stages, and what is kept of its iterations."""

    def __init__(self, pipelines: int = 1) -> None:
        self.pipelines = pipelines
        self.memory = VariationMemory(SCHEDULE, pipelines)
        self.iteration = 0

    def run(self, times_s: Sequence[float], clock_mhz: int = 1200, count: int = 1, **changes: Any) -> None:
        """Run iterations that are reported together, whose microbatches take so long."""
        numbers = range(self.iteration, self.iteration + count)
        self.iteration += count
        for pipeline in range(self.pipelines):
            for stage, order in enumerate(SCHEDULE.orders):
                rows = ComputationColumns(
                    [number for number in numbers for _ in order],
                    [KINDS.index(c.kind) for c in order] * count,
                    [c.microbatch for c in order] * count,
                    [c.chunk for c in order] * count,
                    [0.0] * len(order) * count,
                    [times_s[c.microbatch] for c in order] * count,
                    [*repeat(clock_mhz, len(order) * count)],
                )
                self.memory.add(Coordinates(pipeline, stage, 0), rows)
                self.memory.add(
                    Coordinates(pipeline, stage, 1), rows._replace(duration_s=[9.0] * len(rows[0]))
                )
        for number in numbers:
            self.memory.take(replace(REGULAR, iteration=number, **changes))

    def factors(self) -> np.ndarray[Any, Any]:
        variation = self.memory.variation()
        assert variation is not None
        return variation.factors


@pytest.mark.parametrize("count", [1, 6])
def test_times_are_relative_to_the_mean_of_their_kind_at_their_clock(count: int) -> None:
    """Whether iterations are reported one by one or together."""
    seen = Seen()
    for number in range(MIN_ITERATIONS // count):
        slower = 1 + number % 3
        assert seen.memory.variation() is None
        seen.run([1.2 * slower, 0.8 * slower], (0, 1000, 1200)[number % 3], count)
    expected = [(1.2, 0.8)[c.microbatch] for c in SCHEDULE.computations]
    assert seen.factors().shape == (MIN_ITERATIONS, 1, 8)
    assert np.allclose(seen.factors(), expected, atol=1e-6)


def test_clocks_alone_are_no_variation() -> None:
    seen = Seen()
    for number in range(MIN_ITERATIONS):
        seen.run([1.0 + number % 4] * 2, 1000 + number % 4)
    variation = seen.memory.variation()
    assert variation is not None
    assert variation.is_negligible


@pytest.mark.parametrize(
    "changes",
    [{"is_regular": False}, {"has_straggler": True}, {"versions": None}, {"has_clock_change": True}],
)
def test_iterations_that_say_nothing_are_left_out(changes: dict[str, Any]) -> None:
    seen = Seen()
    for _ in range(2 * MIN_ITERATIONS):
        seen.run([1.2, 0.8], **changes)
    assert seen.memory.variation() is None


def test_a_bounded_number_of_iterations_and_pipelines_is_kept_and_later_ones_replace_them() -> None:
    seen = Seen(pipelines=9)
    for _ in range(100):
        seen.run([1.0, 1.0])
    assert seen.factors().shape == (64, 3, 8)
    for _ in range(7 * 64):
        seen.run([1.2, 0.8])
    assert seen.factors().std() == pytest.approx(0.2, rel=1e-4)
    seen.memory.forget()
    assert seen.memory.variation() is None
