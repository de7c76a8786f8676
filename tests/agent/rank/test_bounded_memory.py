"""A year of training takes no more memory than a month: the session, and the ring of its telemetry."""

import gc
from collections import deque
from itertools import pairwise
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

from perseus.agent.energy.counter import CounterChange
from perseus.agent.link.computation import Computation, Kind, Rank
from perseus.agent.link.packets import ComputationMark, Edge, IterationMark
from perseus.agent.rank.commands import EstimateEnergy, Send
from perseus.agent.rank.events import Connected, Event, Heard, Tick, TrainerJoined
from perseus.agent.rank.messages import (
    GpuDescription,
    Hold,
    PlanId,
    PlanOffer,
    RankAccepted,
    StageClocks,
    Telemetry,
)
from perseus.agent.rank.sampling import FinishedComputation, FinishedIteration, Sampler
from perseus.agent.rank.session import Session
from perseus.agent.stream.telemetry import TelemetryRing

RANK = Rank("job", 0, 0, 0)
ORDER = (Computation(Kind.FORWARD, 0), Computation(Kind.BACKWARD, 0))
GPU = GpuDescription("GPU-a", "A40", (1400, 1000, 800))
YEAR_S = 365 * 86_400.0
ITERATION_S = 3 * 3600.0
LEASE_S = 1e9
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


class Year:
    """One rank whose telemetry is never acknowledged; the counter moves, or not."""

    def __init__(self, *, has_counter: bool) -> None:
        self.session = Session(RANK, GPU, is_registered=True)
        self.ring = TelemetryRing(capacity=64)
        self.now_s = 100.0
        self.iteration = 0
        self._has_counter = has_counter
        for event in (TrainerJoined(), Connected(LEASE_S), RankAccepted(RANK, ORDER)):
            self._do(event)

    def go_on(self, duration_s: float) -> None:
        until_s = self.now_s + duration_s
        while self.now_s < until_s:
            if self.iteration in (0, 100):
                self._offer()
            self._iterate()

    def size(self) -> int:
        return object_count(self.session) + object_count(self.ring)

    def _offer(self) -> None:
        """A clock to hold at first, and then a plan that stays in force for the rest of the year."""
        clocks: Hold | StageClocks = Hold(1000) if not self.iteration else StageClocks(ORDER, (1400, 800))
        self._do(PlanOffer(RANK, PlanId("e", 1 + self.iteration), self.iteration + 1, LEASE_S, clocks))

    def _iterate(self) -> None:
        number = self.iteration
        self._mark(IterationMark(Edge.BEGIN, number, self._now_ns()))
        for ordinal, computation in enumerate(ORDER):
            self._pass(1.0)
            self._mark(ComputationMark(Edge.BEGIN, number, ordinal, computation, self._now_ns()))
            self._pass(ITERATION_S / 3)
            self._mark(ComputationMark(Edge.END, number, ordinal, computation, self._now_ns()))
        self._mark(IterationMark(Edge.END, number, self._now_ns()))
        self._pass(ITERATION_S / 3)
        self.iteration += 1

    def _pass(self, duration_s: float) -> None:
        self.now_s += duration_s
        if self._has_counter:
            self._do(CounterChange(self.now_s, 100.0 * self.now_s, 0.002))
        self._do(Heard())
        self._do(Tick())

    def _mark(self, mark: IterationMark | ComputationMark) -> None:
        self._do(mark)

    def _do(self, event: Event) -> None:
        for command in self.session.handle(event, self.now_s):
            match command:
                case Send(Telemetry() as telemetry):
                    self.ring.append(telemetry)
                case EstimateEnergy(request):
                    assert len(request.iterations) < 1000
                case _:
                    pass

    def _now_ns(self) -> int:
        return int(self.now_s * 1e9)


def check_flat(year: Year) -> None:
    year.go_on(YEAR_S / 12)
    after_a_month = year.size()
    year.go_on(YEAR_S * 11 / 12)
    assert year.iteration > 2_900
    assert year.size() < 1.2 * after_a_month


def test_a_year_of_iterations_keeps_memory_flat() -> None:
    check_flat(Year(has_counter=True))


def test_a_year_without_an_energy_counter_does_so_too() -> None:
    check_flat(Year(has_counter=False))


def finished(number: int, computation_count: int) -> FinishedIteration:
    begin_s = 0.01 * number
    each = FinishedComputation(ORDER[0], begin_s, begin_s + 0.001, 1000, is_pure=True)
    return FinishedIteration(begin_s, begin_s + 0.01, (each,) * computation_count, is_regular=True)


def test_with_a_stopped_counter_memory_is_bounded_by_iteration_content() -> None:
    sampler, request = Sampler(1), None
    for number in range(300):
        sampler.add(finished(number, 1000))
        found = sampler.estimate_request([CounterChange(0.0, 0.0, 0.0), CounterChange(1.0, 1.0, 0.0)])
        request = found or request
    assert request is not None
    assert sum(len(each.computations) for each in request.iterations) <= 32_768


def test_memory_is_bounded_for_computations_split_by_waits() -> None:
    sampler, request = Sampler(1), None
    waits_s = tuple((0.001 * part, 0.001 * part) for part in range(99))
    each = FinishedComputation(ORDER[0], 0.0, 0.1, 1000, is_pure=True, waits_s=waits_s)
    for number in range(300):
        sampler.add(FinishedIteration(0.1 * number, 0.1 * (number + 1), (each,) * 10, is_regular=True))
        changes = [CounterChange(0.0, 0.0, 0.0), CounterChange(100.0, 1.0, 0.0)]
        request = sampler.estimate_request(changes) or request
    assert request is not None
    assert sum(each.part_count for each in request.iterations) <= 32_768


def test_an_estimate_is_refreshed_for_as_long_as_a_plan_is_in_force() -> None:
    """Intervals grow, but never beyond the maximum."""
    sampler, requested = Sampler(1), []
    for number in range(20_000):
        sampler.add(finished(number, 1))
        now_s = 0.01 * (number + 1)
        changes = [CounterChange(max(0.0, now_s - 1), 0.0, 0.0), CounterChange(now_s, 1.0, 0.0)]
        if sampler.estimate_request(changes) is not None:
            requested.append(number)
    between = [later - earlier for earlier, later in pairwise(requested)]
    assert max(between) == 1000
    assert len(requested) < 200
