"""Rounds of held clocks: which pipelines count, when a round has ended, and how long the others may take."""

import math
from collections.abc import Set
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from perseus.service.domain.commands import Announce, Command
from perseus.service.domain.measured import JobIteration
from perseus.service.domain.model import STOCK_MHZ, HoldClocks, StockIteration
from perseus.service.domain.profiling import ProfilingBudget, ProfilingCost, ProfilingProgress
from perseus.service.domain.records import Counters, JobRecord
from perseus.service.domain.specification import OperatingPolicy, Parallelism
from perseus.service.domain.telemetry import EnergyEstimate
from perseus.service.job.command_buffer import CommandBuffer
from perseus.service.job.profiling.profiler import HOLD_LIMIT, Profiler
from perseus.service.job.profiling.progress_estimate import ProgressEstimate
from perseus.service.job.profiling.sample_allocation import MAX_HOLD_FACTOR
from perseus.service.job.rules import Rules
from perseus.solver import Kind, one_forward_one_backward
from perseus.v1 import event_pb2
from tests.service.service_fakes import BLOCKING_POWER_W, CLOCKS_MHZ, energy_j, estimate, time_s

SHAPE = Parallelism(2, 2, 1)
SCHEDULE = one_forward_one_backward(2, 3)
ITERATIONS = 2
USABLE_MHZ = [CLOCKS_MHZ] * 2


def new_profiler(buffer: CommandBuffer) -> Profiler:
    rules = Rules(profile_iterations=ITERATIONS)
    return Profiler(JobRecord(OperatingPolicy()), Counters(), SHAPE, SCHEDULE, rules, buffer)


class Bench:
    """A profiler in its first round, in which all stages hold the highest clock."""

    def __init__(self, iteration_time_s: float = 0.8) -> None:
        self.iteration_time_s = iteration_time_s
        self.informed: dict[int, NDArray[np.float64]] = {}
        self.buffer = CommandBuffer()
        self.profiler = new_profiler(self.buffer)
        held = self.profiler.next_round(None, USABLE_MHZ)
        assert held == HoldClocks((1400, 1400))
        self.held = held
        self.number = 0
        self.noise = 0.0

    def iterate(self, disturbed: Set[int] = frozenset(), measured: Set[int] = frozenset({0, 1})) -> None:
        """Run an iteration, with estimates from these pipelines; a disturbed one is three times as slow."""
        self.number += 1
        for place in SHAPE.all_coordinates():
            if place.pipeline in measured:
                slowness = 3.0 if place.pipeline in disturbed else 1.0
                order = SCHEDULE.orders[place.stage]
                found = estimate(order, 1, self.number, 1400, slowness)
                if self.noise:
                    share = self.noise / math.sqrt(self.number)
                    noisy = (replace(each, time_se_s=share * each.time_s) for each in found.samples)
                    found = replace(found, samples=tuple(noisy))
                if place.pipeline in self.informed:
                    found = with_information(found, self.informed[place.pipeline])
                self.profiler.take_estimate(place, found)
        iteration = JobIteration(self.number, (1, 1), True, self.iteration_time_s, (1.0, 1.0))
        self.profiler.take_iteration(iteration, True, disturbed, StockIteration(self.iteration_time_s, 2.0))

    def goes_on(self) -> bool:
        return self.profiler.next_round(self.held, USABLE_MHZ) is self.held

    def measured_s(self) -> dict[int, float]:
        return {
            profile.stage: profile.measurements[0, Kind.FORWARD].time_s for profile in self.profiler.profiles
        }

    def events(self) -> list[event_pb2.JobEventType.ValueType]:
        commands: list[Command] = self.buffer.take()
        return [command.event.type for command in commands if isinstance(command, Announce)]


def with_information(found: EnergyEstimate, matrix: NDArray[np.float64]) -> EnergyEstimate:
    """Return an estimate with joint information, and without energies where that determines none."""
    powers_w = np.array([*(each.energy_j / each.time_s for each in found.samples), BLOCKING_POWER_W])
    if np.linalg.matrix_rank(matrix) < len(matrix):
        lacking = tuple(replace(each, energy_j=0.0, energy_se_j=0.0) for each in found.samples)
        found = replace(found, samples=(), undetermined=lacking)
    return replace(
        found,
        power_information=tuple(matrix[np.tril_indices(len(matrix))].tolist()),
        power_information_vector=tuple((matrix @ powers_w).tolist()),
    )


OF_ALL = np.eye(3)
OF_SUM = 4.0 * np.outer([0.3, 0.6, 0.1], [0.3, 0.6, 0.1])


def true_s(stage: int) -> float:
    return time_s(stage, Kind.FORWARD, 1400)


def test_a_pipeline_that_was_slow_in_a_round_does_not_count_in_it() -> None:
    bench = Bench()
    assert bench.profiler.progress == ProfilingProgress(0, min(12, len(CLOCKS_MHZ)), None)
    bench.iterate({1})
    assert bench.goes_on()
    bench.iterate()
    assert not bench.goes_on()
    assert bench.measured_s() == pytest.approx({stage: true_s(stage) for stage in range(2)})
    assert bench.events() == [event_pb2.JOB_EVENT_TYPE_CLOCK_PROFILED]
    progress = bench.profiler.progress
    assert progress.tried_clock_count == 1
    assert progress.remaining_s == pytest.approx((progress.max_clock_count - 1) * 2 * 0.8)


def test_a_clock_is_held_until_plans_can_be_made_of_its_times() -> None:
    """Of one iteration, they are known to 3 %; of five and two pipelines to 1 %."""
    bench = Bench()
    bench.noise = 0.03
    while bench.number < MAX_HOLD_FACTOR * ITERATIONS and (not bench.number or bench.goes_on()):
        bench.iterate()
    assert not bench.goes_on()
    assert bench.number == 5


def test_if_all_pipelines_are_slow_all_of_them_count() -> None:
    bench = Bench()
    bench.iterate({0})
    bench.iterate({0, 1})
    assert not bench.goes_on()
    assert bench.measured_s() == pytest.approx({stage: 3.0 * true_s(stage) for stage in range(2)})
    assert bench.events() == [event_pb2.JOB_EVENT_TYPE_CLOCK_PROFILED], "nothing is given up"


def test_a_slow_pipeline_need_not_be_measured() -> None:
    bench = Bench()
    for _ in range(ITERATIONS):
        bench.iterate({1}, {0})
    assert not bench.goes_on()
    assert bench.measured_s() == pytest.approx({stage: true_s(stage) for stage in range(2)})


def test_slow_pipelines_are_forgotten_with_the_round() -> None:
    bench = Bench()
    bench.iterate({0})
    assert bench.profiler.next_round(None, USABLE_MHZ) == bench.held
    for _ in range(ITERATIONS):
        bench.iterate(measured={0})
    assert bench.goes_on(), "pipeline 1 counts again, and is not measured"


def test_a_clock_that_is_not_measured_is_given_up() -> None:
    bench = Bench()
    for _ in range(HOLD_LIMIT * ITERATIONS - 1):
        bench.iterate(measured={0})
    assert bench.goes_on()
    bench.iterate(measured={0})
    following = bench.profiler.next_round(bench.held, USABLE_MHZ)
    assert following == HoldClocks((1300, 1300))
    assert bench.events() == [event_pb2.JOB_EVENT_TYPE_CLOCK_GIVEN_UP] * 2


def test_estimates_at_stock_count_for_a_stage_that_stays_there() -> None:
    """Estimates become rarer the longer a plan is in force, so the next one may be far away."""
    profiler = new_profiler(CommandBuffer())
    for place in SHAPE.all_coordinates():
        profiler.take_estimate(place, estimate(SCHEDULE.orders[place.stage], 0, 100, STOCK_MHZ))
    usable_mhz = [CLOCKS_MHZ, CLOCKS_MHZ[:1]]
    held = profiler.next_round(None, usable_mhz)
    assert held == HoldClocks((1400, STOCK_MHZ))
    assert profiler.next_round(held, usable_mhz) is held, "stage 0 holds a clock that is not measured"
    for place in SHAPE.all_coordinates():
        if place.stage == 0:
            profiler.take_estimate(place, estimate(SCHEDULE.orders[0], 1, ITERATIONS, 1400))
    following = profiler.next_round(held, usable_mhz)
    assert isinstance(following, HoldClocks)
    assert following.clocks_mhz[1] == STOCK_MHZ
    assert [(profile.stage, profile.clock_mhz) for profile in profiler.profiles] == [(0, 1400), (1, 1400)]


def test_short_iterations_count_in_part() -> None:
    """Before, they were given up after as many iterations, in which the energy counter had hardly moved."""
    bench = Bench(iteration_time_s=0.125)
    whole_count = HOLD_LIMIT * ITERATIONS
    for _ in range(4 * whole_count - 1):
        bench.iterate(measured={0})
    assert bench.goes_on()
    bench.iterate(measured={0})
    assert not bench.goes_on()


def test_a_rank_that_does_not_determine_its_energies_is_completed_from_others() -> None:
    bench = Bench()
    bench.informed = {0: OF_ALL, 1: OF_SUM}
    bench.iterate()
    assert bench.goes_on()
    bench.iterate()
    while bench.goes_on():
        bench.iterate()
    assert bench.number < HOLD_LIMIT * ITERATIONS
    assert bench.events() == [event_pb2.JOB_EVENT_TYPE_CLOCK_PROFILED]
    for profile in bench.profiler.profiles:
        for (_, kind), found in profile.measurements.items():
            assert found.energy_j == pytest.approx(energy_j(profile.stage, kind, 1400), rel=0.01)
            assert found.energy_se_j > 0


def test_undetermined_energies_are_awaited_until_their_sum_has_to_do() -> None:
    bench = Bench()
    bench.informed = {0: OF_SUM, 1: OF_SUM}
    for _ in range(HOLD_LIMIT * ITERATIONS - 1):
        bench.iterate()
        assert bench.goes_on()
    assert len(bench.profiler.unmeasured_ranks(bench.held, USABLE_MHZ)) == 4
    bench.iterate()
    assert not bench.goes_on()
    assert bench.events() == [event_pb2.JOB_EVENT_TYPE_CLOCK_PROFILED]
    for profile in bench.profiler.profiles:
        found_j = sum(found.energy_j for found in profile.measurements.values())
        true_j = sum(energy_j(profile.stage, kind, 1400) for _, kind in profile.measurements)
        assert found_j == pytest.approx(true_j, rel=0.05)
        assert all(found.energy_se_j > 0.03 * found.energy_j for found in profile.measurements.values())


# ---------------------------------------------------------------------- the upper bound for the end


NO_LIMIT = ProfilingBudget(extra_time_s=math.inf)


def cost(time_s: float, *, iterations: int = 1, extra_s: float = 0.0, extra_j: float = 0.0) -> ProfilingCost:
    return ProfilingCost(iterations, time_s, extra_s, 1.0, extra_j)


def test_remaining_rounds_are_estimated_from_finished_ones() -> None:
    progress = ProgressEstimate(NO_LIMIT)
    progress.begin_round(cost(100.0), 4, 12)  # resumed, say: earlier rounds do not count
    progress.end_round(cost(110.0))
    progress.begin_round(cost(110.0), 5, 12)
    assert progress.progress(cost(110.0)) == ProfilingProgress(5, 12, 70.0)
    assert progress.progress(cost(114.0)).remaining_s == 66.0
    assert progress.progress(cost(200.0)).remaining_s == 0.0, "it takes longer than estimated"
    progress.end_round(cost(130.0))
    progress.begin_round(cost(130.0), 6, 12)
    assert progress.progress(cost(130.0)).remaining_s == 6 * 15.0
    progress.restart()
    assert progress.progress(cost(130.0)).remaining_s is None


@pytest.mark.parametrize(
    ("budget", "remaining_s"),
    [
        (ProfilingBudget(time_s=25.0, extra_time_s=math.inf), 15.0),
        (ProfilingBudget(iteration_count=40, extra_time_s=math.inf), 30.0),
        (ProfilingBudget(extra_time_s=3.0), 5.0),
        (ProfilingBudget(extra_time_s=math.inf, extra_energy_j=10.0), 15.0),
        (ProfilingBudget(extra_time_s=0.5), 0.0),
        (ProfilingBudget(extra_time_s=1e6), 110.0),
    ],
)
def test_a_budget_may_end_profiling_earlier(budget: ProfilingBudget, remaining_s: float) -> None:
    progress = ProgressEstimate(budget)
    progress.begin_round(cost(0.0), 0, 12)
    ended = cost(10.0, iterations=10, extra_s=2.0, extra_j=4.0)
    progress.end_round(ended)
    progress.begin_round(ended, 1, 12)
    assert progress.progress(ended).remaining_s == pytest.approx(remaining_s)
