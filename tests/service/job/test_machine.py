"""The job's state machine by its exact commands: ranks, leases, wrong and repeated inputs, the end."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from perseus.service.domain.commands import AcceptRank, SendOffer
from perseus.service.domain.errors import (
    InvalidFieldError,
    JobFinishedError,
    PipelineOutOfRangeError,
    RankAlreadyServedError,
    RankNotServedError,
    RankOutOfRangeError,
    TelemetryOutdatedError,
)
from perseus.service.domain.inputs import (
    AgentDisconnected,
    AgentLeft,
    BudgetTargetSet,
    EpochRenewed,
    FinishRequested,
    Input,
    MaxClockSet,
    PlanInForce,
    PolicySet,
    RankLeft,
    StragglerCleared,
    StragglerReported,
    TelemetryArrived,
    Tick,
)
from perseus.service.domain.model import (
    LOST_VERSIONS,
    STOCK,
    JobState,
    Offer,
    PlannedClocks,
    RankLeftReason,
    RankState,
    Straggler,
)
from perseus.service.domain.specification import Coordinates, OperatingPolicy
from perseus.v1 import event_pb2
from tests.service.job.machine_bench import (
    FIRST,
    FOURTH,
    SECOND,
    THIRD,
    actions,
    cluster_in,
    measured_clocks_mhz,
    offers,
    planned,
    straggler,
)
from tests.service.service_fakes import CLOCKS_MHZ, EPOCH, Cluster, FakeRank, batch, estimate, make_spec


def test_a_new_epoch_leaves_out_the_versions_that_may_be_lost() -> None:
    cluster = cluster_in(JobState.PROFILING)
    before = cluster.machine.record.version
    commands = cluster.handle(EpochRenewed("new"))
    assert actions(commands) == []  # they are offered when they join again
    assert cluster.machine.record.version == before + LOST_VERSIONS
    cluster.handle(AgentDisconnected("agent-0"))
    commands = cluster.handle(cluster.ranks[FIRST].joined())
    assert offers(commands) == {FIRST: cluster.machine.run.offers.of_rank(FIRST)}
    assert cluster.job().epoch == "new"


def test_a_rank_that_comes_back_with_its_plan_is_offered_nothing() -> None:
    cluster = planned()
    commands = cluster.handle(AgentDisconnected("agent-0"))
    assert actions(commands) == []
    assert cluster.rank_states() == [RankState.DISCONNECTED] * 2 + [RankState.CONNECTED] * 2
    cluster.expect(JobState.PLANNED)
    for place in (FIRST, SECOND):
        commands = cluster.handle(cluster.ranks[place].joined())
        assert actions(commands) == [AcceptRank(place, "agent-0")]


def test_offers_wait_for_a_disconnected_rank() -> None:
    cluster = planned()
    cluster.handle(AgentDisconnected("agent-1"))
    commands = cluster.handle(straggler())
    assert offers(commands) == {}
    commands = cluster.handle(cluster.ranks[THIRD].joined())
    (accepted, sent) = actions(commands)
    assert accepted == AcceptRank(THIRD, "agent-1")
    assert isinstance(sent, SendOffer)
    assert isinstance(sent.offer.clocks, PlannedClocks)


def test_another_instance_is_refused_until_the_lease_has_run_out() -> None:
    cluster = planned()
    cluster.handle(AgentDisconnected("agent-0"))
    other = replace(cluster.ranks[FIRST].joined(), instance_id="other")
    deadline_s = cluster.now_s + cluster.rules.lease_s
    cluster.now_s = deadline_s - 0.001
    cluster.handle(Tick())
    with pytest.raises(RankAlreadyServedError) as caught:
        cluster.handle(other)
    assert caught.value.metadata["instance_id"] == "agent-0"
    assert caught.value.lease_left_s == pytest.approx(0.001)
    cluster.now_s = deadline_s
    cluster.handle(Tick())
    assert AcceptRank(FIRST, "other") in cluster.handle(other)


def test_a_rank_lost_while_profiling_keeps_the_clocks_measured_so_far() -> None:
    cluster = cluster_in(JobState.BASELINE)
    cluster.iterate(12)
    measured = measured_clocks_mhz(cluster)
    held = cluster.machine.run.offers[0].clocks
    assert 0 < len(measured) < len(CLOCKS_MHZ)
    cluster.send(RankLeft(FOURTH, "agent-1", RankLeftReason.TRAINER_GONE))
    cluster.expect(JobState.WAITING)
    cluster.iterate(3)
    cluster.ranks[FOURTH].in_force = Offer(0, 0, STOCK)
    commands = cluster.handle(cluster.ranks[FOURTH].joined())
    cluster.expect(JobState.PROFILING)
    assert measured_clocks_mhz(cluster) == measured
    assert offers(commands)[FIRST].clocks == held


def test_messages_of_a_replaced_agent_are_ignored_and_its_telemetry_is_refused() -> None:
    cluster = planned()
    cluster.send(AgentLeft("agent-0"))
    with pytest.raises(RankNotServedError, match="expected a rank of job 'job' that this agent has joined"):
        cluster.handle(cluster.ranks[FIRST].end(0.8))
    assert cluster.handle(PlanInForce(FIRST, "agent-0", EPOCH, 1, 99)) == []
    assert cluster.handle(RankLeft(FIRST, "agent-0", RankLeftReason.FINISHED)) == []


def test_telemetry_of_an_earlier_trainer_does_not_count_for_the_next_one() -> None:
    cluster = planned()
    late = cluster.ranks[FIRST].end(0.8)
    late = replace(late, batch=batch(late.batch.sequence, [500], 1, 0.8))
    cluster.handle(RankLeft(FIRST, "agent-0", RankLeftReason.TRAINER_GONE))
    for rank in cluster.ranks.values():
        rank.start_trainer()
        cluster.handle(rank.joined())
    with pytest.raises(TelemetryOutdatedError):
        cluster.handle(late)
    commands = cluster.handle(straggler())
    assert {offer.start_iteration for offer in offers(commands).values()} == {1}


def test_ending_a_job_puts_every_rank_to_stock_and_refuses_later_inputs() -> None:
    cluster = planned()
    version = cluster.machine.record.version
    commands = cluster.handle(FinishRequested())
    assert {(offer.version, offer.clocks) for offer in offers(commands).values()} == {(version + 1, STOCK)}
    assert len(offers(commands)) == 4
    refused: list[Input] = [
        cluster.ranks[FIRST].joined(),
        straggler(),
        PolicySet(OperatingPolicy(5)),
        BudgetTargetSet(1.0, is_urgent=True),
    ]
    for event in refused:
        with pytest.raises(JobFinishedError):
            cluster.handle(event)


@pytest.mark.parametrize(
    ("version", "epoch", "put_back"),
    [
        pytest.param(41, "another", 1, id="of another epoch"),
        pytest.param(41, EPOCH, 42, id="above all known ones: it was lost, and is never reused"),
        pytest.param(2**53, EPOCH, 1, id="impossible: it costs no versions"),
    ],
)
def test_a_rank_with_an_unknown_plan_is_put_back_to_stock(version: int, epoch: str, put_back: int) -> None:
    cluster = Cluster(make_spec())
    rank = cluster.ranks[FIRST]
    rank.in_force, rank.iteration = Offer(version, 0, STOCK), 10
    assert actions(cluster.handle(rank.joined(in_force_epoch=epoch))) == [
        AcceptRank(FIRST, "agent-0"),
        SendOffer(FIRST, "agent-0", Offer(put_back, 12, STOCK)),
    ]
    assert actions(cluster.handle(cluster.ranks[SECOND].joined())) == [AcceptRank(SECOND, "agent-0")]


def impossible_inputs(rank: FakeRank) -> Iterator[tuple[Input, type[Exception], str]]:
    yield replace(rank.joined(), rank=Coordinates(0, 2, 0)), RankOutOfRangeError, ""
    at_unknown_clock = batch(99, [rank.iteration + 1], 1, 0.8, order=rank.order, clock_mhz=1234)
    yield TelemetryArrived(FIRST, "agent-0", at_unknown_clock), InvalidFieldError, "1234"
    energy = estimate(rank.order, 1, 3, 1400)
    of_unknown_chunk = replace(energy, samples=(replace(energy.samples[0], chunk=7),))
    telemetry = batch(99, [], 1, 0.8, energy=of_unknown_chunk)
    yield TelemetryArrived(FIRST, "agent-0", telemetry), InvalidFieldError, "chunk 7"
    for slow in (
        Straggler(0),
        Straggler(0, slowdown_factor=0.99),
        Straggler(0, slowdown_factor=math.nan),
        Straggler(0, slowdown_factor=math.inf),
        Straggler(0, iteration_time_s=math.nan),
        Straggler(0, iteration_time_s=0.0),
        Straggler(0, iteration_time_s=-1.0),
    ):
        yield StragglerReported(slow), InvalidFieldError, ""
    for of_unknown_pipeline in (StragglerReported(Straggler(2, slowdown_factor=1.5)), StragglerCleared(-1)):
        yield of_unknown_pipeline, PipelineOutOfRangeError, ""
    for clock_mhz in (0, -900):
        yield MaxClockSet(clock_mhz), InvalidFieldError, "max_clock_mhz"
    for target_time_s in (math.nan, 0.0, -1.0, math.inf):
        yield BudgetTargetSet(target_time_s, is_urgent=True), InvalidFieldError, "target_time_s"


def test_an_impossible_input_is_refused_and_changes_nothing() -> None:
    cluster = planned()
    before = cluster.job(is_full=True)
    for event, error, text in impossible_inputs(cluster.ranks[FIRST]):
        with pytest.raises(error, match=text or None):
            cluster.handle(event)
        assert cluster.job(is_full=True) == before, event


@pytest.mark.parametrize(
    "event",
    [
        straggler(),
        PolicySet(OperatingPolicy(5.0)),
        MaxClockSet(1000),
        BudgetTargetSet(1.0, is_urgent=True),
        FinishRequested(),
    ],
    ids=lambda event: type(event).__name__,
)
def test_the_same_input_again_changes_nothing(event: Input) -> None:
    cluster = planned()
    assert cluster.handle(event) != []
    assert cluster.handle(event) == []


def test_clocks_offered_before_a_restart_and_in_force_after_it_are_announced_once() -> None:
    def announced(cluster: Cluster) -> list[int]:
        return [
            event.pipeline_clocks.version
            for event in cluster.events()
            if event.type == event_pb2.JOB_EVENT_TYPE_PLAN_IN_FORCE
        ]

    cluster = cluster_in(JobState.PLANNED)
    version = max(cluster.offered_versions)
    assert version not in announced(cluster)
    for iteration_count in (4, 2):
        cluster.restart()
        cluster.join_all()
        cluster.iterate(iteration_count)
    cluster.expect_in_force()
    assert announced(cluster).count(version) == cluster.spec.parallelism.pipeline_count
