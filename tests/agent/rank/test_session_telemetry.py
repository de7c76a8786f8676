"""A session's reports on finished iterations, and its energy estimates from the counter."""

from collections.abc import Callable

import pytest

from perseus.agent.clocks.sets import ClockSet
from perseus.agent.energy.counter import CounterChange
from perseus.agent.link.computation import Computation, Kind
from perseus.agent.link.packets import Edge, IterationMark
from perseus.agent.rank.commands import Command, EstimateEnergy
from perseus.agent.rank.events import Connected, Disconnected
from perseus.agent.rank.messages import (
    ComputationRow,
    EnergyEstimate,
    GpuLimits,
    Hold,
    IterationRow,
    Stock,
    Telemetry,
)
from perseus.agent.rank.recorder import COUNTER_WAIT_S
from perseus.agent.rank.sampling import EstimateRequest
from tests.agent.rank.bench import (
    B0,
    B1,
    F0,
    F1,
    LEASE_S,
    ORDER,
    RANK,
    STEP,
    After,
    Bench,
    Mark,
    Run,
    begin,
    clock_set,
    counted,
    end,
    joined,
    offer,
    stage,
    telemetry,
)


def test_an_iteration_becomes_telemetry_when_the_counter_has_passed_its_end(bench: Bench) -> None:
    counted(bench, 0.0)  # at 100 s; 100 W from here on
    bench.do(clock_set(1000, bench.now_s + 0.45))  # between F1 and B0
    assert bench.do(Run(0)) == []
    bench.now_s += 0.05
    (message,) = telemetry(counted(bench, 85.0))
    assert message.rank == RANK
    assert message.iterations == (
        IterationRow(0, 0, pytest.approx(0.8), pytest.approx(80.0), True, 0),  # type: ignore[arg-type]
    )
    clocks_mhz = [None, None, 1000, 1000]
    assert message.computations == tuple(
        ComputationRow(
            0,
            computation,
            pytest.approx(0.1 + 0.2 * index),  # type: ignore[arg-type]
            pytest.approx(0.1),  # type: ignore[arg-type]
            clock_mhz,
        )
        for index, (computation, clock_mhz) in enumerate(zip(ORDER, clocks_mhz, strict=True))
    )
    assert message.energy is None, "two changes of the counter determine nothing"


COMPLETE = [mark(computation) for computation in ORDER for mark in (begin, end)]


def waiting(*edges: Edge) -> list[Mark]:
    """The marks of an iteration whose first computation has waits, or parts of them."""
    return [COMPLETE[0], *map(Mark, edges), *COMPLETE[1:]]


def measured(bench: Bench, marks: list[Mark]) -> Telemetry:
    """The report on an iteration that makes a mark every 0.1 s."""
    counted(bench, 0.0)
    bench.do(begin(0))
    for mark in marks:
        bench.do(mark)
        bench.now_s += 0.1
    bench.do(end(0))
    (message,) = telemetry(counted(bench, 85.0))
    return message


def test_a_computations_waits_for_others_do_not_count_as_its_time(bench: Bench) -> None:
    message = measured(bench, waiting(Edge.BEGIN, Edge.END, Edge.BEGIN, Edge.END))
    assert [row.duration_s for row in message.computations] == pytest.approx([0.3, 0.1, 0.1, 0.1])
    assert [row.begin_s for row in message.computations] == pytest.approx([0.0, 0.6, 0.8, 1.0])
    assert message.iterations[0].duration_s == pytest.approx(1.2)
    assert message.iterations[0].is_regular


@pytest.mark.parametrize(
    ("marks", "reported"),
    [
        pytest.param([mark for mark in COMPLETE if mark != begin(F1)], [F0, B0, B1], id="a begin is lost"),
        pytest.param([mark for mark in COMPLETE if mark != end(B1)], [F0, F1, B0], id="an end is lost"),
        pytest.param([begin(F1, ordinal=0)], [], id="another computation than registered"),
        pytest.param(waiting(Edge.BEGIN), [F1, B0, B1], id="a wait without an end"),
        pytest.param(waiting(Edge.END), [F1, B0, B1], id="a wait without a begin"),
        pytest.param(waiting(Edge.BEGIN, Edge.BEGIN, Edge.END), [F1, B0, B1], id="a wait with two begins"),
        pytest.param(waiting(Edge.BEGIN, Edge.END, Edge.END), [F1, B0, B1], id="a wait with two ends"),
        pytest.param(waiting(*[Edge.BEGIN, Edge.END] * 5000), [F1, B0, B1], id="endless waits, bounded"),
    ],
)
def test_an_irregular_iteration_is_reported_as_such_with_its_good_samples(
    bench: Bench, marks: list[Mark], reported: list[Computation]
) -> None:
    message = measured(bench, marks)
    assert message.iterations[0].is_regular is False
    assert [row.computation for row in message.computations] == reported


def gaps(commands: list[Command]) -> list[tuple[float, float, float]]:
    return [
        (round(row.gap_time_s, 6), round(row.gap_energy_j, 6), round(row.gap_slowed_time_s, 6))
        for message in telemetry(commands)
        for row in message.iterations
    ]


def test_gaps_between_iterations_are_measured(bench: Bench) -> None:
    counted(bench, 0.0)  # at 100 s; 100 W from here on
    bench.do(Run(0))  # until 100.8 s
    bench.do(clock_set(1000, bench.now_s + 0.1))
    bench.do(clock_set(1200, bench.now_s + 0.3))
    bench.do(ClockSet(None, bench.now_s + 0.5, bench.now_s + 0.49, bench.now_s + 0.49))
    bench.now_s += 0.1
    assert gaps(counted(bench, 90.0)) == [(0.0, 0.0, 0.0)], "the time before the first is unknown"
    bench.now_s += 59.9
    bench.do(Run(1))
    bench.now_s += 0.1
    slowed_s = 0.2 * (1 - 1000 / 1400) + 0.2 * (1 - 1200 / 1400)
    ((gap_s, gap_j, found_s),) = gaps(counted(bench, 6170.0))
    assert (gap_s, gap_j, found_s) == pytest.approx((60.0, 6000.0, slowed_s), rel=0.01)


@pytest.mark.parametrize(
    ("gap_s", "following"),
    [
        pytest.param(5.0, 2, id="an iteration is missing between them"),
        pytest.param(100_000.0, 1, id="the trainer was stopped for long"),
    ],
)
def test_a_gap_whose_begin_is_unknown_or_long_ago_is_zero(bench: Bench, gap_s: float, following: int) -> None:
    counted(bench, 0.0)
    bench.do(Run(0))
    bench.now_s += gap_s
    bench.do(Run(following))
    bench.now_s += 0.1
    assert gaps(counted(bench, 1e7)) == [(0.0, 0.0, 0.0)] * 2


def test_throttling_is_reported_with_the_affected_iteration(bench: Bench) -> None:
    counted(bench, 0.0)
    for iteration in range(3):
        bench.do(Run(iteration))
        bench.now_s += 0.05
        reasons = 0x1 | (0x40 | 0x80 if iteration == 1 else 0)  # an idle GPU (0x1) is not throttled
        capped_mhz = 1100 if iteration == 1 else 0
        change = CounterChange(bench.now_s, 90.0 * iteration + 85.0, 0.002, reasons, capped_mhz)
        (message,) = telemetry(bench.do(change))
        assert message.iterations[0].clock_event_reasons == (0xC0 if iteration == 1 else 0)
        assert message.iterations[0].capped_clock_mhz == capped_mhz
        bench.now_s += 0.05
        counted(bench, 90.0 * (iteration + 1))


def test_clock_statistics_count_under_their_plan(bench: Bench) -> None:
    counted(bench, 0.0)
    bench.do(offer(1, 0, Hold(1000)))
    bench.do(clock_set(1400, bench.now_s))
    bench.do(Run(0))
    bench.do(clock_set(1000, bench.now_s))
    bench.do(Run(1))
    (message,) = telemetry(counted(bench, 85.0))
    assert message.clocks is not None
    assert (message.clocks.plan_version, message.clocks.set_count) == (1, 1)
    assert (message.clocks.computation_count, message.clocks.missed_count) == (8, 4)
    assert message.clocks.late_raise_count == 0, "1400 MHz is more than enough"
    assert message.clocks.computation_time_s == pytest.approx(0.8)
    assert message.clocks.on_clock_time_s == pytest.approx(0.4)
    assert message.clocks.set_latency_s == pytest.approx(0.010)
    assert message.clocks.set_latency_count == 2


def test_fixed_computations_count_in_no_clock_statistics() -> None:
    bench = Bench(order := (F0, STEP)).accepted()
    counted(bench, 0.0)
    bench.do(offer(1, 0, stage(1000, 0, order=order)), Run(0))
    (message,) = telemetry(counted(bench, 85.0))
    assert [row.computation for row in message.computations] == [F0, STEP]
    assert message.clocks is not None
    assert message.clocks.computation_count == 1


def test_the_latest_limits_are_sent_with_telemetry_and_announcements(bench: Bench) -> None:
    counted(bench, 0.0)
    bench.do(limits := GpuLimits(250.0, (7,)), Run(0))
    (message,) = telemetry(counted(bench, 85.0))
    assert message.gpu_limits == limits
    assert bench.do(Disconnected(), Connected(LEASE_S)) == [joined(0, limits=limits)]


def test_the_wait_for_a_stopped_counter_is_bounded(bench: Bench) -> None:
    counted(bench, 0.0)
    bench.now_s += 0.1
    counted(bench, 10.0)
    bench.do(Run(0))
    assert bench.do(After(COUNTER_WAIT_S / 2)) == []
    (message,) = telemetry(bench.do(After(COUNTER_WAIT_S)))
    assert message.iterations[0].energy_j == pytest.approx(80.0), "at the power of the last window"


def test_finished_iterations_under_two_plans_go_separately(bench: Bench) -> None:
    counted(bench, 0.0)
    bench.do(offer(1, 1, Stock()))
    for number in range(3):
        bench.do(Run(number))
    messages = telemetry(counted(bench, 240.0))
    assert [[(row.iteration, row.plan_version) for row in each.iterations] for each in messages] == [
        [(0, 0)],
        [(1, 1), (2, 1)],
    ]


@pytest.mark.parametrize("lost", Edge)
def test_an_iteration_with_a_lost_edge_is_not_reported(bench: Bench, lost: Edge) -> None:
    counted(bench, 0.0)
    for number in range(2):
        for edge in Edge:
            bench.now_s += 0.1
            if (edge, number) != (lost, 0):
                bench.do(Mark(edge, number))
    (message,) = telemetry(counted(bench, 80.0))
    assert [row.iteration for row in message.iterations] == [1]


def test_before_the_counter_is_polled_no_iteration_is_regular(bench: Bench) -> None:
    bench.do(Run(0))
    (message,) = telemetry(bench.do(After(COUNTER_WAIT_S)))
    assert message.iterations[0].is_regular is False
    assert message.iterations[0].energy_j == 0


def test_times_are_never_in_the_future_and_never_go_back(bench: Bench) -> None:
    counted(bench, 0.0)
    bench.do(IterationMark(Edge.BEGIN, 0, int(1e18)))
    bench.now_s += 0.5
    bench.do(IterationMark(Edge.END, 0, int(1e18)))
    bench.do(IterationMark(Edge.BEGIN, 1, int(1e18)))
    bench.now_s += 0.5
    bench.do(IterationMark(Edge.END, 1, 0))  # not after its begin: an iteration of zero length does not count
    (message,) = telemetry(counted(bench, 50.0))
    assert [row.iteration for row in message.iterations] == [0]
    assert message.iterations[0].duration_s == pytest.approx(0.5)


def test_relative_work_is_reported_with_its_iteration(bench: Bench) -> None:
    for number, permille in enumerate((0, 1250)):
        bench.do(IterationMark(Edge.BEGIN, number, bench.now_ns, permille))
        bench.now_s += 0.1
        bench.do(end(number))
    commands = bench.do(After(10.0))
    works = [row.relative_work for message in telemetry(commands) for row in message.iterations]
    assert works == [0.0, 1.25]


def test_counted_work_is_reported_with_its_iteration(bench: Bench) -> None:
    for number, work in enumerate((0, 4096)):
        bench.do(IterationMark(Edge.BEGIN, number, bench.now_ns))
        bench.now_s += 0.1
        bench.do(IterationMark(Edge.END, number, bench.now_ns, work=work))
    commands = bench.do(After(10.0))
    assert [row.work for message in telemetry(commands) for row in message.iterations] == [0, 4096]


# --- The iteration in which an urgent offer comes into force ------------------------------------------------


SLOW = stage(1000, 800, 1000, 800)


@pytest.fixture
def planned(bench: Bench) -> Bench:
    """Two iterations of a plan are over."""
    counted(bench, 0.0)
    bench.do(offer(1, 0, stage(1400, 1400, 1400, 1400)), Run(0), Run(1))
    return bench


def touched(bench: Bench, number: int, at: int) -> None:
    """An iteration in which an urgent offer comes while its computation of this index runs."""
    bench.do(begin(number))
    for index, computation in enumerate(ORDER):
        bench.now_s += 0.1
        bench.do(begin(computation))
        if index == at:
            bench.do(offer(2, number + 2, SLOW, is_urgent=True), clock_set(1000, bench.now_s + 0.02))
        bench.now_s += 0.1
        bench.do(end(computation))
    bench.do(end(number))


def test_between_iterations_the_next_is_regular(planned: Bench) -> None:
    planned.do(offer(2, 4, SLOW, is_urgent=True), Run(2))
    planned.now_s += 0.05
    rows = [row for some in telemetry(counted(planned, 300.0)) for row in some.iterations]
    assert [(row.iteration, row.plan_version, row.has_clock_change) for row in rows][-1] == (2, 2, False)


@pytest.mark.parametrize("at", range(len(ORDER)))
def test_the_affected_iteration_is_reported_as_such_without_its_computations(planned: Bench, at: int) -> None:
    touched(planned, 2, at)
    planned.do(Run(3))
    planned.now_s += 0.05
    reported = telemetry(counted(planned, 400.0))
    rows = {row.iteration: row for some in reported for row in some.iterations}
    assert [(n, row.plan_version, row.is_regular, row.has_clock_change) for n, row in rows.items()] == [
        (0, 1, True, False),
        (1, 1, True, False),
        (2, 1, False, True),
        (3, 2, True, False),
    ]
    assert {row.iteration for some in reported for row in some.computations} == {0, 1, 3}
    assert rows[2].energy_j > 0, "it was used, and counts as such"
    clocks = {some.clocks.plan_version: some.clocks.computation_count for some in reported if some.clocks}
    assert clocks == {1: 2 * len(ORDER), 2: len(ORDER)}, "without those of the affected iteration"


def test_the_affected_iteration_is_in_no_energy_sample(planned: Bench) -> None:
    requests: list[EstimateRequest] = []
    begun_s = 0.0
    for number in range(2, 20):
        if number == 10:
            begun_s = planned.now_s
            touched(planned, number, at=1)
        else:
            planned.do(Run(number))
        planned.now_s += 0.05
        change = CounterChange(planned.now_s, 100.0 * number, 0.002)
        commands = planned.session.handle(change, planned.now_s)
        requests += [command.request for command in commands if isinstance(command, EstimateEnergy)]
    assert {request.plan_version for request in requests} == {1, 2}
    for request in requests:
        assert all(each.is_regular == (abs(each.begin_s - begun_s) > 1e-6) for each in request.iterations)
        if request.plan_version == 2:
            assert all(each.begin_s > begun_s for each in request.iterations)


# --- Energy estimates --------------------------------------------------------------------------------------


@pytest.fixture
def holding(bench: Bench) -> Bench:
    bench.do(offer(7, 0, Hold(1000)), clock_set(1000, bench.now_s))
    return bench


Part = Callable[[Bench, int, Computation], list[Telemetry]]


def trained(bench: Bench, count: int, wait: Part, compute: Part, after: Part | None = None) -> EnergyEstimate:
    """The last estimate of a training whose computations are made of these parts."""
    messages: list[Telemetry] = []
    for number in range(count):
        bench.do(begin(number))
        for computation in ORDER:
            messages += wait(bench, number, computation)
            bench.do(begin(computation))
            messages += compute(bench, number, computation)
            bench.do(end(computation))
        if after is not None:
            messages += after(bench, number, ORDER[-1])
        bench.do(end(number))
    return [message.energy for message in messages if message.energy is not None][-1]


def test_energy_is_that_of_computing_without_waits_under_the_plan_and_its_clock(holding: Bench) -> None:
    """Forwards draw 300 W, backwards 400 W, and waits 100 W, within computations and between them."""
    power_w = {Kind.FORWARD: 300.0, Kind.BACKWARD: 400.0}

    def compute(bench: Bench, number: int, computation: Computation) -> list[Telemetry]:
        messages = bench.draw(0.05, power_w[computation.kind])
        bench.do(Mark(Edge.BEGIN))
        messages += bench.draw(0.04 + 0.01 * (number % 3), 100.0)
        bench.do(Mark(Edge.END))
        return messages + bench.draw(0.05, power_w[computation.kind])

    estimate = trained(holding, 8, lambda bench, *_: bench.draw(0.03, 100.0), compute)
    assert estimate.plan_version == 7
    assert estimate.blocking_power_w == pytest.approx(100, rel=0.1)
    assert {(sample.chunk, sample.clock_mhz) for sample in estimate.samples} == {(0, 1000)}
    assert {sample.kind for sample in estimate.samples} == power_w.keys()
    for sample in estimate.samples:
        assert sample.time_s == pytest.approx(0.1, abs=0.002)
        assert sample.energy_j == pytest.approx(power_w[sample.kind] * sample.time_s, rel=0.05)
        assert sample.computation_count == 2 * estimate.iteration_count


def test_blocking_power_is_that_of_the_held_clock_and_not_of_stock_after_the_last_computation(
    holding: Bench,
) -> None:
    """300 W while computing, 100 W in waits at the held clock, and 140 W in those at stock.

    One gap is an evaluation.
    """

    def wait(bench: Bench, number: int, computation: Computation) -> list[Telemetry]:
        if computation == ORDER[0]:
            bench.do(clock_set(1000, bench.now_s))
        return bench.draw(0.04 + 0.01 * ((number + computation.microbatch) % 4), 100.0)

    def gap(bench: Bench, number: int, _: Computation) -> list[Telemetry]:
        bench.do(clock_set(None, bench.now_s))
        evaluation = bench.draw(2.0, 300.0) if number == 3 else []
        return evaluation + bench.draw(0.15 + 0.01 * (number % 5), 140.0)

    estimate = trained(holding, 16, wait, lambda bench, *_: bench.draw(0.06, 300.0), gap)
    assert estimate.blocking_power_w == pytest.approx(100, rel=0.03)
    assert {sample.clock_mhz for sample in estimate.samples} == {1000}


def test_a_computation_during_which_the_clock_changed_is_no_sample(bench: Bench) -> None:
    bench.do(offer(1, 0, Hold(1000)))
    energy_j = 0.0

    def compute(bench: Bench, number: int, computation: Computation) -> list[Telemetry]:
        nonlocal energy_j
        if computation == F0:  # every forward of microbatch 0 sees its clock change
            bench.do(clock_set(1000 if number % 2 else 800, bench.now_s + 0.04))
        messages: list[Telemetry] = []
        for _ in range(2):
            bench.now_s += 0.05
            energy_j += 10.0
            messages += telemetry(counted(bench, energy_j))
        return messages

    estimate = trained(bench, 6, lambda *_: [], compute)
    forwards = [sample for sample in estimate.samples if sample.kind is Kind.FORWARD]
    count = sum(sample.computation_count for sample in forwards)
    assert count == estimate.iteration_count / 2, "F1 only, where it ran at the held clock"
