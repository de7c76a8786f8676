"""Why a job makes no progress, and what profiling may cost then, whatever the agents report.

Every reason is detected, announced once, and its end announced. Iterations take the time of the clocks that
are really in force; their cost beyond stock is added up here, not taken from reports.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from perseus.service.api.translate_jobs import coordinates_from_proto
from perseus.service.domain.errors import RankNotServedError
from perseus.service.domain.inputs import (
    AgentDisconnected,
    FinishRequested,
    OfferAnswered,
    RankLeft,
    ResumeRequested,
    TelemetryArrived,
)
from perseus.service.domain.messages import time_from_proto
from perseus.service.domain.model import (
    HoldClocks,
    JobState,
    Offer,
    RankLeftReason,
    RefusalReason,
    StockClocks,
)
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import TelemetryBatch
from perseus.service.job.profiling.profiler import HOLD_LIMIT
from perseus.service.job.progress import NO_PROGRESS_ITERATIONS, NO_PROGRESS_TIMEOUT_S
from perseus.service.job.rules import Rules
from perseus.v1 import event_pb2
from tests.service.job.clusters import FIRST, FOURTH, SECOND, THIRD, EmulatedCluster, answer
from tests.service.job.profiling.test_profiler import OF_ALL, OF_SUM, with_information
from tests.service.service_fakes import CLOCKS_MHZ, START_S, FakeRank, energy_j, make_spec

ITERATION_S = 0.8
Announced = tuple[str, str, Coordinates | None, int]
"""Whether a stall begins or ends, its reason, the rank that it names, and the number of such ranks."""
Spoil = Callable[[TelemetryBatch], TelemetryBatch]


def irregular(batch: TelemetryBatch) -> TelemetryBatch:
    return batch._replace(iterations=batch.iterations._replace(is_regular=[False]))


def of_another_version(batch: TelemetryBatch) -> TelemetryBatch:
    return batch._replace(iterations=batch.iterations._replace(plan_version=[4711]))


def of_iteration_0(batch: TelemetryBatch) -> TelemetryBatch:
    rows, computations = batch.iterations, batch.computations
    return batch._replace(
        iterations=rows._replace(iteration=[0]),
        computations=computations._replace(iteration=[0] * len(computations.iteration)),
    )


def without_estimate(batch: TelemetryBatch) -> TelemetryBatch:
    return batch._replace(energy=None)


def without_energy(batch: TelemetryBatch) -> TelemetryBatch:
    """Report that computations cost nothing."""
    if batch.energy is None:
        return batch
    samples = tuple(replace(sample, energy_j=0.0) for sample in batch.energy.samples)
    return batch._replace(energy=replace(batch.energy, samples=samples))


def without_samples(batch: TelemetryBatch) -> TelemetryBatch:
    """Report an estimate that lacks all computations."""
    return batch if batch.energy is None else batch._replace(energy=replace(batch.energy, samples=()))


SPOILS: dict[Spoil, tuple[event_pb2.ClockGivenUpReason.ValueType, str] | None] = {
    irregular: None,
    of_another_version: None,
    of_iteration_0: None,
    without_estimate: (event_pb2.CLOCK_GIVEN_UP_REASON_NO_ESTIMATE, "sent no energy estimate"),
    without_energy: (event_pb2.CLOCK_GIVEN_UP_REASON_NO_ENERGY, "cost no energy"),
    without_samples: (event_pb2.CLOCK_GIVEN_UP_REASON_INCOMPLETE_ESTIMATE, "an energy estimate that lacks"),
}
"""Why clocks are given up for that, and the state's reason, if it is the rank's energies that are missing."""


class TroubledCluster(EmulatedCluster):
    """A cluster in which the ranks in `spoiling` spoil their reports."""

    has_ticks = True
    time_s = ITERATION_S

    def __init__(self, rules: Rules | None = None) -> None:
        super().__init__(
            make_spec(), rules or Rules(lease_s=1000.0, baseline_iterations=2, profile_iterations=2)
        )
        self.spoiling: dict[Coordinates, Spoil] = {}

    def iteration_time_s(self) -> float:
        return self.time_s

    def end(self, rank: FakeRank, duration_s: float) -> TelemetryArrived:
        event = super().end(rank, duration_s)
        spoil = self.spoiling.get(rank.place)
        return event if spoil is None else replace(event, batch=spoil(event.batch))

    def start_trainers_again(self, iteration: int = -1) -> None:
        """Let all trainers end, and others start after an iteration."""
        for rank in self.ranks.values():
            self.send(RankLeft(rank.place, rank.instance_id, RankLeftReason.TRAINER_GONE))
            rank.start_trainer(iteration)
        self.join_all()

    def stalls(self) -> list[Announced]:
        return [
            (
                event_pb2.JobEventType.Name(event.type).removeprefix("JOB_EVENT_TYPE_"),
                event_pb2.StallReason.Name(event.stall.reason).removeprefix("STALL_REASON_"),
                coordinates_from_proto(event.stall.rank) if event.stall.HasField("rank") else None,
                event.stall.rank_count,
            )
            for event in self.events()
            if event.HasField("stall")
        ]

    def reasons(self) -> list[tuple[str, str]]:
        return [(kind, reason) for kind, reason, _, _ in self.stalls()]


def joined(rules: Rules | None = None) -> TroubledCluster:
    cluster = TroubledCluster(rules)
    cluster.join_all()
    return cluster


# ---------------------------------------------------------------------- missing ranks


def test_missing_ranks_are_announced_once_and_shown_as_they_join() -> None:
    cluster = TroubledCluster()
    cluster.send(cluster.ranks[FIRST].joined())
    cluster.pass_time(NO_PROGRESS_TIMEOUT_S - 1)
    assert cluster.stalls() == []
    cluster.pass_time(1)
    expected: list[Announced] = [("STALLED", "RANK_MISSING", SECOND, 3)]
    assert cluster.stalls() == expected
    stalled = cluster.events()[-1]
    assert time_from_proto("since_time", stalled.stall.since_time) == START_S
    assert str(SECOND) in stalled.message
    cluster.pass_time(120)
    cluster.send(cluster.ranks[SECOND].joined())
    stall = cluster.machine.run.progress.stall
    assert stall is not None
    assert (stall.rank, stall.rank_count) == (THIRD, 2)
    assert cluster.stalls() == expected
    cluster.join_all()
    assert cluster.reasons() == [("STALLED", "RANK_MISSING"), ("STALL_ENDED", "RANK_MISSING")]
    assert cluster.machine.run.progress.stall is None


def test_a_lost_rank_is_missing_from_its_loss_on() -> None:
    cluster = joined()
    cluster.run_until(JobState.PLANNED)
    lost_s = cluster.now_s
    cluster.send(RankLeft(FOURTH, "agent-1", RankLeftReason.TRAINER_GONE))
    cluster.pass_time(NO_PROGRESS_TIMEOUT_S)
    assert cluster.stalls() == [("STALLED", "RANK_MISSING", FOURTH, 1)]
    assert time_from_proto("since_time", cluster.events()[-1].stall.since_time) == START_S + lost_s
    assert str(cluster.machine.run.progress.stall) == f"{FOURTH} is missing"
    cluster.ranks[FOURTH].start_trainer()
    cluster.join_all()
    assert cluster.reasons()[-1] == ("STALL_ENDED", "RANK_MISSING")


def test_disconnected_ranks_are_missing_while_their_lease_runs() -> None:
    cluster = joined()
    cluster.handle(AgentDisconnected("agent-1"))
    cluster.pass_time(NO_PROGRESS_TIMEOUT_S)
    assert cluster.stalls() == [("STALLED", "RANK_MISSING", THIRD, 2)]


# ---------------------------------------------------------------------- iterations


def test_ranks_without_iterations_are_announced_and_so_is_their_first_one() -> None:
    cluster = joined()
    cluster.pass_time(NO_PROGRESS_TIMEOUT_S)
    assert cluster.stalls() == [("STALLED", "NO_ITERATIONS", None, 4)]
    assert cluster.events()[-1].stall.iteration == -1
    cluster.pass_time(100)
    assert len(cluster.stalls()) == 1
    cluster.run()
    assert cluster.reasons() == [("STALLED", "NO_ITERATIONS"), ("STALL_ENDED", "NO_ITERATIONS")]
    cluster.pass_time(NO_PROGRESS_TIMEOUT_S)
    assert cluster.reasons()[2:] == [("STALLED", "NO_ITERATIONS")]


@pytest.mark.parametrize(
    ("state", "spoil", "reason"),
    [
        (JobState.BASELINE, None, "NO_ITERATIONS"),
        (JobState.BASELINE, irregular, "IRREGULAR_ITERATIONS"),
        (JobState.PROFILING, of_another_version, "OTHER_CLOCKS"),
        (JobState.BASELINE, of_iteration_0, "REPEATED_ITERATIONS"),
        (JobState.PROFILING, without_estimate, "NO_ENERGY_ESTIMATES"),
    ],
    ids=["it reports nothing", "irregular", "under other clocks", "repeated", "without energy estimates"],
)
def test_the_one_rank_without_useful_iterations_is_named_until_it_has_some(
    state: JobState, spoil: Spoil | None, reason: str
) -> None:
    cluster = joined()
    cluster.run()
    cluster.run_until(state)
    if spoil is None:
        cluster.silent = {FOURTH}
    else:
        cluster.spoiling[FOURTH] = spoil
    cluster.run(20)
    if state is JobState.BASELINE:
        cluster.expect(state)
    assert cluster.stalls() == [("STALLED", reason, FOURTH, 1)]
    cluster.silent, cluster.spoiling = (), {}
    if spoil is of_iteration_0:
        cluster.start_trainers_again()
    cluster.run(4)
    assert cluster.reasons()[1:] == [("STALL_ENDED", reason)]


def test_the_number_of_ranks_with_irregular_iterations_is_announced() -> None:
    cluster = joined()
    cluster.spoiling = dict.fromkeys(cluster.ranks, irregular)
    cluster.run(20)
    assert cluster.stalls() == [("STALLED", "IRREGULAR_ITERATIONS", None, 4)]


@pytest.mark.parametrize("state", [JobState.BASELINE, JobState.PLANNED])
def test_the_timeout_grows_with_the_iteration_time(state: JobState) -> None:
    cluster = joined(Rules(baseline_iterations=2, profile_iterations=2).model_copy(update={"lease_s": 1e6}))
    cluster.time_s = 60.0
    cluster.run()
    cluster.run_until(state)
    cluster.run()
    before = len(cluster.stalls())
    cluster.pass_time(NO_PROGRESS_ITERATIONS * 60.0 - 1)
    assert len(cluster.stalls()) == before
    cluster.pass_time(1)
    assert cluster.reasons()[before:] == [("STALLED", "NO_ITERATIONS")]


def test_a_few_irregular_iterations_are_not_announced() -> None:
    cluster = joined()
    cluster.run_until(JobState.PLANNED)
    for _ in range(10):
        cluster.spoiling[FIRST] = irregular
        cluster.run(5)
        cluster.spoiling.clear()
        cluster.run(1)
    assert cluster.stalls() == []


def test_offers_that_are_always_late_are_announced() -> None:
    cluster = joined()
    refused_s: set[float] = set()

    def refuse(offer: Offer) -> OfferAnswered:
        """The first offer after every iteration comes too late, and leaves no time for the next."""
        iteration = -1 if cluster.now_s in refused_s else offer.start_iteration
        refused_s.add(cluster.now_s)
        return answer(cluster, FOURTH, offer.version, RefusalReason.PAST_START, iteration)

    cluster.ranks[FOURTH].answer = refuse  # type: ignore[method-assign]
    cluster.run(40)
    assert cluster.reasons() == [("STALLED", "OTHER_CLOCKS")]


def test_a_restart_from_a_checkpoint_repeats_iterations_on_another_connection() -> None:
    cluster = joined()
    cluster.run_until(JobState.PLANNED)
    cluster.run(4)
    cluster.start_trainers_again(3)
    cluster.run(20)
    assert cluster.stalls() == []


def test_a_job_that_ends_is_not_waited_for() -> None:
    cluster = joined()
    cluster.run_until(JobState.PLANNED)
    cluster.send(RankLeft(FIRST, "agent-0", RankLeftReason.FINISHED))
    cluster.pass_time(500)
    assert cluster.stalls() == []
    cluster.send(FinishRequested())
    assert cluster.machine.run.progress.stall is None


# ---------------------------------------------------------------------- profiling


@pytest.mark.parametrize(("spoil", "why"), [(spoil, why) for spoil, why in SPOILS.items() if why is not None])
def test_a_rank_without_energies_is_named_and_its_clocks_are_given_up_until_the_job_is_resumed(
    spoil: Spoil, why: tuple[event_pb2.ClockGivenUpReason.ValueType, str]
) -> None:
    cluster = joined(Rules(lease_s=1000.0, baseline_iterations=2, profile_iterations=3))
    cluster.spoiling[SECOND] = spoil
    cluster.run_until(JobState.STOCK)
    assert cluster.stalls() == [("STALLED", "NO_ENERGY_ESTIMATES", SECOND, 1)]
    given_up = cluster.announced(event_pb2.ClockGivenUp)
    assert [clock.clock_mhz for clock in given_up] == [1400, 1300]
    assert {(clock.reason, coordinates_from_proto(clock.rank)) for clock in given_up} == {(why[0], SECOND)}
    (ended,) = cluster.announced(event_pb2.ProfilingEnded)
    assert (ended.is_enough, ended.HasField("limit")) == (False, False)
    assert ended.cost.iteration_count < 60
    reason = cluster.announced(event_pb2.StateChanged)[-1].reason
    assert str(SECOND) in reason
    assert why[1] in reason
    assert cluster.machine.run.progress.stall is None
    cluster.spoiling.clear()
    cluster.send(ResumeRequested())
    cluster.run_until(JobState.PLANNED)


def informed(matrix: NDArray[np.float64]) -> Spoil:
    """Report this joint information of energies, and no energy that it leaves undetermined."""

    def spoil(batch: TelemetryBatch) -> TelemetryBatch:
        return (
            batch if batch.energy is None else batch._replace(energy=with_information(batch.energy, matrix))
        )

    return spoil


@pytest.mark.parametrize(
    "of_others",
    [pytest.param(OF_ALL, id="other ranks determine them"), pytest.param(OF_SUM, id="no rank does")],
)
def test_a_job_is_planned_though_ranks_leave_their_energies_undetermined(
    of_others: NDArray[np.float64],
) -> None:
    cluster = joined()
    cluster.spoiling = {place: informed(of_others if place.pipeline else OF_SUM) for place in cluster.ranks}
    cluster.run_until(JobState.PLANNED, limit=400)
    assert cluster.announced(event_pb2.ClockGivenUp) == []
    for profile in cluster.machine.run.profiler.profiles:
        measured_j = sum(measured.energy_j for measured in profile.measurements.values())
        true_j = sum(energy_j(profile.stage, kind, profile.clock_mhz) for _, kind in profile.measurements)
        assert measured_j == pytest.approx(true_j, rel=0.1)


def test_clocks_are_released_while_their_cost_is_unknown() -> None:
    cluster = joined()
    cluster.run_until(JobState.PROFILING)
    cluster.run(3)
    assert isinstance(cluster.machine.run.offers[0].clocks, HoldClocks)
    cluster.silent = set(cluster.ranks)
    cost = cluster.machine.run.profiler.cost
    cluster.pass_time(NO_PROGRESS_TIMEOUT_S)
    cluster.expect(JobState.PROFILING)
    assert isinstance(cluster.machine.run.offers[0].clocks, StockClocks)
    extra_s = cluster.machine.run.profiler.cost.extra_time_s - cost.extra_time_s
    assert extra_s == pytest.approx(NO_PROGRESS_TIMEOUT_S - ITERATION_S)
    cluster.pass_time(300)
    assert cluster.machine.run.profiler.cost.extra_time_s - cost.extra_time_s == pytest.approx(extra_s)
    cluster.silent = ()
    cluster.run_until(JobState.PLANNED)
    assert cluster.reasons() == [("STALLED", "NO_ITERATIONS"), ("STALL_ENDED", "NO_ITERATIONS")]


def test_the_budget_ends_a_round_and_the_reason_names_the_awaited_rank() -> None:
    rules = Rules(lease_s=1000.0, baseline_iterations=2, profile_iterations=3, profile_budget_iterations=5)
    cluster = joined(rules)
    cluster.spoiling[FOURTH] = without_estimate
    cluster.run_until(JobState.STOCK)
    assert cluster.machine.run.profiler.cost.iteration_count == 5
    reason = cluster.announced(event_pb2.StateChanged)[-1].reason
    assert "the budget of 5 iterations is used up" in reason
    assert f"{FOURTH} sent no energy estimate" in reason
    (ended,) = cluster.announced(event_pb2.ProfilingEnded)
    assert (ended.is_enough, ended.limit) == (False, event_pb2.PROFILING_LIMIT_ITERATION_COUNT)


# ---------------------------------------------------------------------- restarts of the coordinator


def test_the_end_of_a_stall_is_announced_after_a_restart() -> None:
    cluster = joined()
    cluster.pass_time(NO_PROGRESS_TIMEOUT_S)
    cluster.restart()
    assert cluster.machine.run.progress.stall is not None
    cluster.join_all()
    cluster.pass_time(NO_PROGRESS_TIMEOUT_S)
    cluster.run()
    assert cluster.reasons() == [("STALLED", "NO_ITERATIONS"), ("STALL_ENDED", "NO_ITERATIONS")]


def test_refused_telemetry_does_not_end_a_stall() -> None:
    """Telemetry for a rank that an agent does not serve does not count as a message from the rank."""
    cluster = joined()
    with pytest.raises(RankNotServedError):
        cluster.handle(replace(cluster.ranks[FIRST].end(ITERATION_S), instance_id="another agent"))
    cluster.pass_time(NO_PROGRESS_TIMEOUT_S)
    assert cluster.stalls() == [("STALLED", "NO_ITERATIONS", None, 4)]


# ---------------------------------------------------------------------- the cost of profiling


BUDGET_S = 20.0
ITERATIONS = 2


def iteration_time_s(clock_mhz: int) -> float:
    """At the lowest clock five times as long as at the highest, which is also that of stock."""
    below = (CLOCKS_MHZ[0] - (clock_mhz or CLOCKS_MHZ[0])) / (CLOCKS_MHZ[0] - CLOCKS_MHZ[-1])
    return ITERATION_S * (1 + 4 * below)


SLOWEST_S = iteration_time_s(CLOCKS_MHZ[-1])
ROUND_S = HOLD_LIMIT * ITERATIONS * (SLOWEST_S - ITERATION_S)
NO_PROGRESS_S = 2 * max(NO_PROGRESS_TIMEOUT_S, (NO_PROGRESS_ITERATIONS + ITERATIONS) * SLOWEST_S)
"""After this time without a step a job needs a reason; a reason may take its timeout twice."""


class CostlyCluster(TroubledCluster):
    """A cluster whose cost of profiling is added up; `stuck_s` is the time since the last step."""

    def __init__(self) -> None:
        rules = Rules(baseline_iterations=2, profile_iterations=ITERATIONS, profile_budget_extra_s=BUDGET_S)
        super().__init__(rules.model_copy(update={"lease_s": 1e9}))
        self.join_all()
        self.extra_s = 0.0
        self.stuck_s = 0.0
        self.mark: object = None

    def iteration_time_s(self) -> float:
        clocks = [rank.in_force.clocks for rank in self.ranks.values()]
        held_mhz = [mhz for some in clocks if isinstance(some, HoldClocks) for mhz in some.clocks_mhz]
        duration_s = max(map(iteration_time_s, held_mhz), default=ITERATION_S)
        if self.machine.record.state is JobState.PROFILING:
            self.extra_s += duration_s - ITERATION_S
        return duration_s

    def run(self, count: int = 1) -> None:
        for _ in range(count):
            begun_s = self.now_s
            super().run()
            self.check_stall(self.now_s - begun_s)

    def check_stall(self, duration_s: float) -> None:
        """Check that a state without progress has a reason; renewed progress counts as a step."""
        machine = self.machine
        is_stalled = machine.run.progress.stall is not None
        mark = machine.record.state, machine.run.profiler.profiles, machine.record.given_up_clocks, is_stalled
        has_use = machine.record.state not in (JobState.PLANNED, JobState.STOCK, JobState.FINISHED)
        self.stuck_s = self.stuck_s + duration_s if mark == self.mark and has_use else 0.0
        self.mark = mark
        if self.stuck_s > NO_PROGRESS_S:
            assert is_stalled, f"no stall is announced after {self.stuck_s} s in {machine.record.state}"


phases = st.lists(
    st.tuples(
        st.dictionaries(
            st.sampled_from((FIRST, SECOND, THIRD, FOURTH)), st.sampled_from([*SPOILS, None]), max_size=4
        ),
        st.integers(1, 40),
    ),
    min_size=1,
    max_size=6,
)
"""How some ranks spoil their reports (None: they send none), and for how many iterations."""


@pytest.mark.slow("each of hundreds of emulated iterations is handled second by second")
@given(phases=phases, honest_at_first=st.booleans())
def test_the_extra_time_stays_within_its_budget_for_any_reports(
    phases: list[tuple[dict[Coordinates, Spoil | None], int]], honest_at_first: bool
) -> None:
    cluster = CostlyCluster()
    if honest_at_first:
        cluster.run_until(JobState.PROFILING)
    for spoiling, count in phases:
        cluster.spoiling = {place: spoil for place, spoil in spoiling.items() if spoil is not None}
        cluster.silent = spoiling.keys() - cluster.spoiling.keys()
        cluster.run(count)
    assert cluster.extra_s <= BUDGET_S + ROUND_S
    assert cluster.machine.run.profiler.cost.extra_time_s <= BUDGET_S + ROUND_S


def test_unreported_iterations_count_as_well() -> None:
    cluster = CostlyCluster()
    while not cluster.machine.run.profiler.profiles:
        cluster.run()
    cluster.spoiling[FOURTH] = without_estimate
    for number in range(100):
        cluster.silent = {FOURTH} if number % 2 else ()
        cluster.run()
    cluster.expect(JobState.STOCK)
    assert cluster.machine.run.profiler.cost.extra_time_s == pytest.approx(cluster.extra_s)
    assert cluster.extra_s <= BUDGET_S + 3 * (SLOWEST_S - ITERATION_S)
