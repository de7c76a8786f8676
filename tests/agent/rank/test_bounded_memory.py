"""A year of training takes no more memory than a month: the session, and the ring of its telemetry."""

import gc
from collections import deque
from itertools import pairwise
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import pytest

from perseus.agent.energy.counter import CounterChange
from perseus.agent.rank.commands import Command, EstimateEnergy
from perseus.agent.rank.events import Event, Heard
from perseus.agent.rank.messages import Hold, PlanId, PlanOffer
from perseus.agent.rank.sampling import FinishedComputation, FinishedIteration, Sampler
from perseus.agent.stream.telemetry import TelemetryRing
from tests.agent.rank.bench import B0, F0, RANK, TICK, Bench, begin, end, stage, telemetry

ORDER = (F0, B0)
YEAR_S = 365 * 86_400.0
ITERATION_S = 3 * 3600.0
_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


def object_count(root: object) -> int:
    """All objects that can be reached from one, except code."""
    seen: set[int] = set()
    left = deque([root])
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, _SHARED):
            continue
        seen.add(id(each))
        left.extend(gc.get_referents(each))
    return len(seen)


class Year(Bench):
    """One rank whose telemetry is never acknowledged; the counter moves, or not."""

    def __init__(self, *, has_counter: bool) -> None:
        super().__init__(ORDER, lease_s=1e9)
        self.ring = TelemetryRing(capacity=64)
        self.accepted()
        self._has_counter = has_counter

    def go_on(self, duration_s: float) -> None:
        until_s = self.now_s + duration_s
        while self.now_s < until_s:
            number = self.iteration + 1
            if number in (0, 100):  # a clock to hold, and then a plan that stays in force
                clocks = stage(1400, 800, order=ORDER) if number else Hold(1000)
                self.do(PlanOffer(RANK, PlanId("e", 1 + number), number + 1, 1e9, clocks))
            self.do(begin(number))
            for computation in ORDER:
                self._pass(1.0)
                self.do(begin(computation))
                self._pass(ITERATION_S / 3)
                self.do(end(computation))
            self.do(end(number))
            self._pass(ITERATION_S / 3)

    def size(self) -> int:
        return object_count(self.session) + object_count(self.ring)

    def _pass(self, duration_s: float) -> None:
        self.now_s += duration_s
        if self._has_counter:
            self.do(CounterChange(self.now_s, 100.0 * self.now_s, 0.002))
        self.do(Heard(), TICK)

    def _handle(self, event: Event) -> list[Command]:
        commands = self.session.handle(event, self.now_s)
        for message in telemetry(commands):
            self.ring.append(message)
        estimates = [command for command in commands if isinstance(command, EstimateEnergy)]
        assert all(len(each.request.iterations) < 1000 for each in estimates)
        return commands


@pytest.mark.parametrize("has_counter", [True, False])
def test_a_year_of_iterations_keeps_memory_flat(has_counter: bool) -> None:
    year = Year(has_counter=has_counter)
    year.go_on(YEAR_S / 12)
    after_a_month = year.size()
    year.go_on(YEAR_S * 11 / 12)
    assert year.iteration > 2_900
    assert year.size() < 1.2 * after_a_month


@pytest.mark.parametrize(("computation_count", "wait_count"), [(1000, 0), (10, 99)])
def test_with_a_stopped_counter_memory_is_bounded_by_iterations_content(
    computation_count: int, wait_count: int
) -> None:
    sampler, request = Sampler(1), None
    waits_s = tuple((0.001 * part, 0.001 * part) for part in range(wait_count))
    each = FinishedComputation(ORDER[0], 0.0, 0.1, 1000, is_pure=True, waits_s=waits_s)
    for number in range(300):
        computations = (each,) * computation_count
        sampler.add(FinishedIteration(0.1 * number, 0.1 * (number + 1), computations, is_regular=True))
        changes = [CounterChange(0.0, 0.0, 0.0), CounterChange(100.0, 1.0, 0.0)]
        request = sampler.estimate_request(changes) or request
    assert request is not None
    assert sum(each.part_count for each in request.iterations) <= 32_768


def test_an_estimate_is_refreshed_for_as_long_as_a_plan_is_in_force() -> None:
    """Intervals grow, but never beyond the maximum."""
    sampler, requested = Sampler(1), []
    for number in range(20_000):
        now_s = 0.01 * (number + 1)
        sampler.add(FinishedIteration(now_s - 0.01, now_s, (), is_regular=True))
        changes = [CounterChange(max(0.0, now_s - 1), 0.0, 0.0), CounterChange(now_s, 1.0, 0.0)]
        if sampler.estimate_request(changes) is not None:
            requested.append(number)
    between = [later - earlier for earlier, later in pairwise(requested)]
    assert max(between) == 1000
    assert len(requested) < 200
