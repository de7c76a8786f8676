"""Why a job makes no progress: every reason is detected, announced once, and its end announced."""

from dataclasses import replace

import pytest

from perseus.service.api.translate_jobs import coordinates_from_proto
from perseus.service.domain.errors import RankNotServedError
from perseus.service.domain.inputs import AgentDisconnected, FinishRequested, OfferAnswered, RankLeft
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
from perseus.service.job.progress import NO_PROGRESS_ITERATIONS, NO_PROGRESS_TIMEOUT_S
from perseus.service.job.rules import Rules
from perseus.v1 import event_pb2
from tests.service.job.machine_bench import FIRST, FOURTH, SECOND, THIRD, answer
from tests.service.job.troubled_cluster import (
    Spoil,
    TroubledCluster,
    irregular,
    of_another_version,
    of_iteration_0,
    without_energy,
    without_estimate,
)
from tests.service.service_fakes import START_S

ITERATION_S = 0.8
Announced = tuple[str, str, Coordinates | None, int]
"""Whether a stall begins or ends, its reason, the rank that it names, and the number of such ranks."""


class StallingCluster(TroubledCluster):
    time_s = ITERATION_S

    def iteration_time_s(self) -> float:
        return self.time_s

    def stalls(self) -> list[Announced]:
        return [
            (
                event_pb2.JobEventType.Name(event.type).removeprefix("JOB_EVENT_TYPE_"),
                event_pb2.StallReason.Name(stall.reason).removeprefix("STALL_REASON_"),
                coordinates_from_proto(stall.rank) if stall.HasField("rank") else None,
                stall.rank_count,
            )
            for event in self.events()
            if event.HasField("stall")
            for stall in [event.stall]
        ]

    def reasons(self) -> list[tuple[str, str]]:
        return [(kind, reason) for kind, reason, _, _ in self.stalls()]


def joined(rules: Rules | None = None) -> StallingCluster:
    cluster = StallingCluster(rules)
    cluster.join_all()
    return cluster


# ---------------------------------------------------------------------- missing ranks


def test_missing_ranks_are_announced_once_and_shown_as_they_join() -> None:
    cluster = StallingCluster()
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


def test_ranks_that_join_within_seconds_cause_no_event() -> None:
    cluster = StallingCluster()
    cluster.pass_time(NO_PROGRESS_TIMEOUT_S - 1)
    cluster.join_all()
    cluster.run_until(JobState.PLANNED)
    cluster.run(20)
    assert cluster.stalls() == []


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
    ],
    ids=["it reports nothing", "irregular", "under other clocks", "repeated"],
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


@pytest.mark.parametrize("spoil", [without_estimate, without_energy])
def test_a_rank_without_energy_estimates_is_named_and_the_given_up_clocks_have_the_reason(
    spoil: Spoil,
) -> None:
    cluster = joined(Rules(lease_s=1000.0, baseline_iterations=2, profile_iterations=3))
    cluster.spoiling[SECOND] = spoil
    cluster.run_until(JobState.STOCK)
    assert cluster.stalls() == [("STALLED", "NO_ENERGY_ESTIMATES", SECOND, 1)]
    given_up = cluster.announced(event_pb2.ClockGivenUp)
    assert [clock.clock_mhz for clock in given_up] == [1400, 1300]
    no_estimate = event_pb2.CLOCK_GIVEN_UP_REASON_NO_ESTIMATE
    expected = no_estimate if spoil is without_estimate else event_pb2.CLOCK_GIVEN_UP_REASON_NO_ENERGY
    assert {clock.reason for clock in given_up} == {expected}
    assert {coordinates_from_proto(clock.rank) for clock in given_up} == {SECOND}
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
    with pytest.raises(RankNotServedError):
        cluster.handle(replace(cluster.ranks[FIRST].end(ITERATION_S), instance_id="another agent"))
    cluster.pass_time(NO_PROGRESS_TIMEOUT_S)
    assert cluster.stalls() == [("STALLED", "NO_ITERATIONS", None, 4)]
