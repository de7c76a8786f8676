"""Why a job makes no progress: every reason is detected, announced once, and its end announced."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest

from perseus.service.domain.errors import RankNotServedError
from perseus.service.domain.inputs import (
    AgentDisconnected,
    FinishRequested,
    OfferAnswered,
    RankLeft,
    TelemetryArrived,
    Tick,
)
from perseus.service.domain.messages import coordinates_to_proto, time_from_proto
from perseus.service.domain.model import (
    HoldClocks,
    JobState,
    Offer,
    RankLeftReason,
    RefusalReason,
    StockClocks,
)
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.stall import StallReason
from perseus.service.domain.telemetry import TelemetryBatch
from perseus.service.job.progress import NO_PROGRESS_ITERATIONS, NO_PROGRESS_TIMEOUT_S
from perseus.service.job.rules import Rules
from perseus.v1 import event_pb2
from tests.service.service_fakes import EPOCH, START_S, Cluster, make_spec

FIRST, SECOND, LAST = Coordinates(0, 0, 0), Coordinates(0, 1, 0), Coordinates(1, 1, 0)
ITERATION_S = 0.8
Spoil = Callable[[TelemetryBatch], TelemetryBatch]


E = TypeVar("E")


class Troubled(Cluster):
    """A cluster with some ranks that are silent, or spoil their reports."""

    def __init__(self, rules: Rules | None = None) -> None:
        super().__init__(
            make_spec(), rules or Rules(lease_s=1000.0, baseline_iterations=2, profile_iterations=2)
        )
        self.silent: set[Coordinates] = set()
        self.spoiling: dict[Coordinates, Spoil] = {}

    def run(self, count: int = 1, duration_s: float = ITERATION_S) -> None:
        for _ in range(count):
            for rank in self.ranks.values():
                in_force = rank.begin()
                if in_force is not None:
                    self.send(in_force)
            self.pass_time(duration_s)
            for place, rank in self.ranks.items():
                event = rank.end(duration_s)
                if place in self.spoiling:
                    event = replace(event, batch=self.spoiling[place](event.batch))
                if place not in self.silent:
                    self.send(event)

    def run_until(self, state: JobState, duration_s: float = ITERATION_S) -> None:
        for _ in range(100):
            if self.machine.record.state is state:
                return
            self.run(duration_s=duration_s)
        raise AssertionError(self.machine.record.state)

    def pass_time(self, seconds: float) -> None:
        """Let time pass, with a tick every second as in a coordinator."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + 1.0)
            deadline_s = self.machine.run.next_deadline_s()
            if deadline_s is not None and deadline_s <= self.now_s:
                self.send(Tick())

    def reported(self) -> list[tuple[event_pb2.JobEventType.ValueType, event_pb2.Stall]]:
        """Return the stalls that began and ended."""
        return [(event.type, event.stall) for event in self.events() if event.HasField("stall")]

    def reasons(self) -> list[tuple[str, str]]:
        return [
            (
                event_pb2.JobEventType.Name(kind).removeprefix("JOB_EVENT_TYPE_"),
                event_pb2.StallReason.Name(stall.reason).removeprefix("STALL_REASON_"),
            )
            for kind, stall in self.reported()
        ]


def joined(rules: Rules | None = None) -> Troubled:
    cluster = Troubled(rules)
    cluster.join_all()
    return cluster


def irregular(batch: TelemetryBatch) -> TelemetryBatch:
    columns = batch.iterations
    return batch._replace(iterations=columns._replace(is_regular=[False] * len(columns.is_regular)))


def of_another_version(batch: TelemetryBatch) -> TelemetryBatch:
    columns = batch.iterations
    return batch._replace(iterations=columns._replace(plan_version=[4711] * len(columns.plan_version)))


def of_iteration_0(batch: TelemetryBatch) -> TelemetryBatch:
    rows, computations = batch.iterations, batch.computations
    return batch._replace(
        iterations=rows._replace(iteration=[0] * len(rows.iteration)),
        computations=computations._replace(iteration=[0] * len(computations.iteration)),
    )


def without_estimate(batch: TelemetryBatch) -> TelemetryBatch:
    return batch._replace(energy=None)


def without_energy(batch: TelemetryBatch) -> TelemetryBatch:
    if batch.energy is None:
        return batch
    samples = tuple(replace(sample, energy_j=0.0) for sample in batch.energy.samples)
    return batch._replace(energy=replace(batch.energy, samples=samples))


# ---------------------------------------------------------------------- missing ranks


def test_missing_ranks_are_announced_once_and_shown_as_they_join() -> None:
    cluster = Troubled()
    cluster.send(cluster.ranks[FIRST].joined())
    assert cluster.reported() == []
    cluster.pass_time(NO_PROGRESS_TIMEOUT_S - 1)
    assert cluster.reported() == []
    cluster.pass_time(1)
    ((_, stalled),) = cluster.reported()
    assert stalled.reason == event_pb2.STALL_REASON_RANK_MISSING
    assert stalled.rank == coordinates_to_proto(SECOND)
    assert stalled.rank_count == 3
    assert time_from_proto("since_time", stalled.since_time) == START_S
    assert str(SECOND) in cluster.events()[-1].message
    cluster.pass_time(120)
    cluster.send(cluster.ranks[SECOND].joined())
    stall = cluster.machine.run.progress.stall
    assert stall is not None
    assert (stall.reason, stall.rank, stall.rank_count) == (
        StallReason.RANK_MISSING,
        Coordinates(1, 0, 0),
        2,
    )
    assert len(cluster.reported()) == 1
    cluster.join_all()
    assert cluster.reasons() == [("STALLED", "RANK_MISSING"), ("STALL_ENDED", "RANK_MISSING")]
    assert cluster.machine.run.progress.stall is None


def test_ranks_that_join_within_seconds_cause_no_event() -> None:
    cluster = Troubled()
    cluster.pass_time(NO_PROGRESS_TIMEOUT_S - 1)
    cluster.join_all()
    cluster.run_until(JobState.PLANNED)
    cluster.run(20)
    assert cluster.reported() == []


def test_a_lost_rank_is_missing_from_its_loss_on() -> None:
    cluster = joined()
    cluster.run_until(JobState.PLANNED)
    lost_s = cluster.now_s
    cluster.send(RankLeft(LAST, "agent-1", RankLeftReason.TRAINER_GONE))
    cluster.pass_time(NO_PROGRESS_TIMEOUT_S)
    ((_, stalled),) = cluster.reported()
    assert (stalled.reason, stalled.rank) == (event_pb2.STALL_REASON_RANK_MISSING, coordinates_to_proto(LAST))
    assert time_from_proto("since_time", stalled.since_time) == START_S + lost_s
    assert cluster.machine.run.progress.stall is not None
    assert str(cluster.machine.run.progress.stall) == f"{LAST} is missing"
    cluster.ranks[LAST].start_trainer()
    cluster.join_all()
    assert cluster.reasons()[-1] == ("STALL_ENDED", "RANK_MISSING")


def test_a_disconnected_rank_is_missing_while_its_lease_runs() -> None:
    cluster = joined()
    cluster.handle(AgentDisconnected("agent-1"))
    cluster.pass_time(NO_PROGRESS_TIMEOUT_S)
    ((_, stalled),) = cluster.reported()
    assert (stalled.reason, stalled.rank) == (
        event_pb2.STALL_REASON_RANK_MISSING,
        coordinates_to_proto(Coordinates(1, 0, 0)),
    )


# ---------------------------------------------------------------------- iterations


def test_ranks_without_iterations_are_announced_and_so_is_their_first_one() -> None:
    cluster = joined()
    cluster.pass_time(NO_PROGRESS_TIMEOUT_S)
    ((_, stalled),) = cluster.reported()
    assert stalled.reason == event_pb2.STALL_REASON_NO_ITERATIONS
    assert (stalled.HasField("rank"), stalled.rank_count) == (False, 4)
    assert stalled.iteration == -1
    cluster.pass_time(100)
    assert len(cluster.reported()) == 1
    cluster.run()
    assert cluster.reasons() == [("STALLED", "NO_ITERATIONS"), ("STALL_ENDED", "NO_ITERATIONS")]
    cluster.pass_time(NO_PROGRESS_TIMEOUT_S)
    assert cluster.reasons()[2:] == [("STALLED", "NO_ITERATIONS")]


def test_the_one_rank_that_reports_nothing_is_named() -> None:
    cluster = joined()
    cluster.silent = {LAST}
    cluster.run(20)
    ((_, stalled),) = cluster.reported()
    assert (stalled.reason, stalled.rank) == (
        event_pb2.STALL_REASON_NO_ITERATIONS,
        coordinates_to_proto(LAST),
    )
    assert stalled.rank_count == 1


@pytest.mark.parametrize("state", [JobState.BASELINE, JobState.PLANNED])
def test_the_timeout_grows_with_the_iteration_time(state: JobState) -> None:
    cluster = joined(Rules(baseline_iterations=2, profile_iterations=2).model_copy(update={"lease_s": 1e6}))
    cluster.run(1, duration_s=60.0)
    cluster.run_until(state, duration_s=60.0)
    cluster.run(1, duration_s=60.0)
    before = len(cluster.reported())
    cluster.pass_time(NO_PROGRESS_ITERATIONS * 60.0 - 1)
    assert len(cluster.reported()) == before
    cluster.pass_time(1)
    assert cluster.reasons()[before:] == [("STALLED", "NO_ITERATIONS")]


def test_irregular_iterations_are_announced_with_the_rank() -> None:
    cluster = joined()
    cluster.spoiling[SECOND] = irregular
    cluster.run(20)
    cluster.expect(JobState.BASELINE)
    ((_, stalled),) = cluster.reported()
    assert (stalled.reason, stalled.rank) == (
        event_pb2.STALL_REASON_IRREGULAR_ITERATIONS,
        coordinates_to_proto(SECOND),
    )
    cluster.spoiling.clear()
    cluster.run()
    assert cluster.reasons()[1:] == [("STALL_ENDED", "IRREGULAR_ITERATIONS")]
    cluster.spoiling = dict.fromkeys(cluster.ranks, irregular)
    cluster.run(20)
    assert cluster.reasons()[2:] == [("STALLED", "IRREGULAR_ITERATIONS")]
    assert cluster.reported()[-1][1].rank_count == 4


def test_a_few_irregular_iterations_are_not_announced() -> None:
    cluster = joined()
    cluster.run_until(JobState.PLANNED)
    for _ in range(10):
        cluster.spoiling[FIRST] = irregular
        cluster.run(5)
        cluster.spoiling.clear()
        cluster.run(1)
    assert cluster.reported() == []


def test_iterations_under_other_clocks_are_announced_with_the_rank() -> None:
    cluster = joined()
    cluster.run_until(JobState.PROFILING)
    cluster.spoiling[LAST] = of_another_version
    cluster.run(20)
    ((_, stalled),) = cluster.reported()
    assert (stalled.reason, stalled.rank) == (event_pb2.STALL_REASON_OTHER_CLOCKS, coordinates_to_proto(LAST))
    cluster.spoiling.clear()
    cluster.run(2)
    assert cluster.reasons() == [("STALLED", "OTHER_CLOCKS"), ("STALL_ENDED", "OTHER_CLOCKS")]


def test_offers_that_are_always_late_are_announced() -> None:
    cluster = joined()
    late = cluster.ranks[LAST]

    refused_s: set[float] = set()

    def refuse(offer: Offer) -> OfferAnswered:
        """The first offer after every iteration comes too late, and leaves no time for the next."""
        iteration = -1 if cluster.now_s in refused_s else offer.start_iteration
        refused_s.add(cluster.now_s)
        return OfferAnswered(
            LAST, late.instance_id, EPOCH, offer.version, RefusalReason.PAST_START, "", iteration
        )

    late.answer = refuse  # type: ignore[method-assign]
    cluster.run(40)
    assert cluster.reasons() == [("STALLED", "OTHER_CLOCKS")]


def test_repeated_iteration_numbers_are_announced_until_the_rank_joins_again() -> None:
    cluster = joined()
    cluster.run(2)
    cluster.spoiling[LAST] = of_iteration_0
    cluster.run(20)
    ((_, stalled),) = cluster.reported()
    assert (stalled.reason, stalled.rank) == (
        event_pb2.STALL_REASON_REPEATED_ITERATIONS,
        coordinates_to_proto(LAST),
    )
    cluster.spoiling.clear()
    cluster.send(RankLeft(LAST, "agent-1", RankLeftReason.TRAINER_GONE))
    for rank in cluster.ranks.values():
        rank.start_trainer()
        cluster.send(rank.joined())
    cluster.run(4)
    assert cluster.reasons()[1:] == [("STALL_ENDED", "REPEATED_ITERATIONS")]


def test_a_restart_from_a_checkpoint_repeats_iterations_on_another_connection() -> None:
    cluster = joined()
    cluster.run_until(JobState.PLANNED)
    cluster.run(4)
    for rank in cluster.ranks.values():
        cluster.send(RankLeft(rank.place, rank.instance_id, RankLeftReason.TRAINER_GONE))
        rank.start_trainer(3)
    for rank in cluster.ranks.values():
        cluster.send(rank.joined())
    cluster.run(20)
    assert cluster.reported() == []


def test_a_job_that_ends_is_not_waited_for() -> None:
    cluster = joined()
    cluster.run_until(JobState.PLANNED)
    cluster.send(RankLeft(FIRST, "agent-0", RankLeftReason.FINISHED))
    cluster.pass_time(500)
    assert cluster.reported() == []
    cluster.send(FinishRequested())
    assert cluster.machine.run.progress.stall is None


# ---------------------------------------------------------------------- profiling


@pytest.mark.parametrize("spoil", [without_estimate, without_energy])
def test_a_rank_without_energy_estimates_is_named_and_the_given_up_clocks_have_the_reason(
    spoil: Spoil,
) -> None:
    cluster = joined(Rules(lease_s=1000.0, baseline_iterations=2, profile_iterations=3))
    cluster.spoiling[SECOND] = spoil
    cluster.run_until(JobState.STOCK)
    assert [(kind, stall.rank) for kind, stall in cluster.reported()] == [
        (event_pb2.JOB_EVENT_TYPE_STALLED, coordinates_to_proto(SECOND))
    ]
    assert cluster.reasons() == [("STALLED", "NO_ENERGY_ESTIMATES")]
    given_up = cluster.announced(event_pb2.ClockGivenUp)
    assert [clock.clock_mhz for clock in given_up] == [1400, 1300]
    no_estimate = event_pb2.CLOCK_GIVEN_UP_REASON_NO_ESTIMATE
    expected = no_estimate if spoil is without_estimate else event_pb2.CLOCK_GIVEN_UP_REASON_NO_ENERGY
    assert {clock.reason for clock in given_up} == {expected}
    assert all(clock.rank == coordinates_to_proto(SECOND) for clock in given_up)
    (ended,) = cluster.announced(event_pb2.ProfilingEnded)
    assert (ended.is_enough, ended.HasField("limit")) == (False, False)
    assert ended.cost.iteration_count < 60
    reason = cluster.announced(event_pb2.StateChanged)[-1].reason
    assert str(SECOND) in reason
    assert ("sent no energy estimate" if spoil is without_estimate else "cost no energy") in reason
    assert cluster.machine.run.progress.stall is None


def test_late_estimates_end_the_stall() -> None:
    cluster = joined(Rules(lease_s=1000.0, baseline_iterations=2, profile_iterations=3))
    cluster.spoiling[FIRST] = without_estimate
    cluster.run(22)
    assert cluster.reasons() == [("STALLED", "NO_ENERGY_ESTIMATES")]
    cluster.spoiling.clear()
    cluster.run_until(JobState.PLANNED)
    assert cluster.reasons()[1:] == [("STALL_ENDED", "NO_ENERGY_ESTIMATES")]


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
    cluster.silent.clear()
    cluster.run_until(JobState.PLANNED)
    assert cluster.reasons() == [("STALLED", "NO_ITERATIONS"), ("STALL_ENDED", "NO_ITERATIONS")]


def test_the_budget_ends_a_round_and_the_reason_names_the_awaited_rank() -> None:
    rules = Rules(lease_s=1000.0, baseline_iterations=2, profile_iterations=3, profile_budget_iterations=5)
    cluster = joined(rules)
    cluster.spoiling[LAST] = without_estimate
    cluster.run_until(JobState.STOCK)
    assert cluster.machine.run.profiler.cost.iteration_count == 5
    reason = cluster.announced(event_pb2.StateChanged)[-1].reason
    assert "the budget of 5 iterations is used up" in reason
    assert f"{LAST} sent no energy estimate" in reason
    (ended,) = cluster.announced(event_pb2.ProfilingEnded)
    assert (ended.is_enough, ended.limit) == (False, event_pb2.PROFILING_LIMIT_ITERATION_COUNT)


# ---------------------------------------------------------------------- restarts of the coordinator


def test_profiling_cost_and_given_up_clocks_survive_a_restart() -> None:
    cluster = joined(Rules(lease_s=1000.0, baseline_iterations=2, profile_iterations=2))
    cluster.spoiling[FIRST] = without_estimate
    while not cluster.machine.record.given_up_clocks:
        cluster.run()
    before = cluster.machine.run
    assert before.counters.profiling_cost.iteration_count > 16
    cluster.restart()
    after = cluster.machine.run
    assert after is not before
    assert (after.counters, after.record.given_up_clocks) == (before.counters, before.record.given_up_clocks)
    cluster.join_all()
    cluster.run_until(JobState.STOCK)
    assert [clock.clock_mhz for clock in cluster.announced(event_pb2.ClockGivenUp)] == [1400, 1300]


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
    stale = cluster.ranks[FIRST].end(ITERATION_S)
    with pytest.raises(RankNotServedError):
        cluster.handle(TelemetryArrived(FIRST, "another agent", stale.batch))
    cluster.pass_time(NO_PROGRESS_TIMEOUT_S)
    assert cluster.reported()[0][1].rank_count == 4
