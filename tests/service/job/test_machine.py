"""The job's state machine by its exact commands, with the tests' own clock: ranks, leases and the end."""

from dataclasses import replace

import pytest

from perseus.service.domain.commands import AcceptRank, EndStream, SendOffer
from perseus.service.domain.errors import (
    InvalidFieldError,
    JobFinishedError,
    RankAlreadyServedError,
    RankNotServedError,
    RankOutOfRangeError,
    TelemetryOutdatedError,
)
from perseus.service.domain.inputs import (
    AgentDisconnected,
    AgentHeard,
    AgentLeft,
    EpochRenewed,
    FinishRequested,
    PlanInForce,
    PolicySet,
    RankJoined,
    RankLeft,
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
    events,
    measured_clocks_mhz,
    offers,
    planned,
)
from tests.service.service_fakes import CLOCKS_MHZ, EPOCH, Cluster, batch, estimate, make_spec


def test_a_rank_that_joins_is_accepted_and_offered_nothing() -> None:
    cluster = Cluster(make_spec())
    commands = cluster.handle(cluster.ranks[FIRST].joined())
    assert actions(commands) == [AcceptRank(FIRST, "agent-0")]
    assert events(commands) == [event_pb2.JOB_EVENT_TYPE_RANK_CHANGED]
    cluster.expect(JobState.WAITING)


def test_the_last_rank_to_join_begins_the_baseline() -> None:
    cluster = Cluster(make_spec())
    for place in (FIRST, SECOND, THIRD):
        cluster.handle(cluster.ranks[place].joined())
    commands = cluster.handle(cluster.ranks[FOURTH].joined())
    assert actions(commands) == [AcceptRank(FOURTH, "agent-1")]
    assert events(commands) == [event_pb2.JOB_EVENT_TYPE_RANK_CHANGED, event_pb2.JOB_EVENT_TYPE_STATE_CHANGED]
    cluster.expect(JobState.BASELINE)


def test_a_rank_with_a_plan_of_another_epoch_is_put_back_to_stock() -> None:
    cluster = Cluster(make_spec())
    rank = cluster.ranks[FIRST]
    rank.in_force, rank.iteration = Offer(41, 0, STOCK), 10
    commands = cluster.handle(rank.joined(in_force_epoch="another"))
    assert actions(commands) == [
        AcceptRank(FIRST, "agent-0"),
        SendOffer(FIRST, "agent-0", Offer(1, 12, STOCK)),
    ]
    commands = cluster.handle(cluster.ranks[SECOND].joined())
    assert actions(commands) == [AcceptRank(SECOND, "agent-0")]


def test_a_version_above_all_known_ones_was_lost_and_is_never_reused() -> None:
    cluster = Cluster(make_spec())
    rank = cluster.ranks[FIRST]
    rank.in_force, rank.iteration = Offer(41, 0, STOCK), 10
    commands = cluster.handle(rank.joined())
    assert actions(commands) == [
        AcceptRank(FIRST, "agent-0"),
        SendOffer(FIRST, "agent-0", Offer(42, 12, STOCK)),
    ]


def test_an_impossible_version_is_put_back_and_costs_no_versions() -> None:
    cluster = Cluster(make_spec())
    rank = cluster.ranks[FIRST]
    rank.in_force, rank.iteration = Offer(2**53, 0, STOCK), 10
    commands = cluster.handle(rank.joined())
    assert actions(commands)[1:] == [SendOffer(FIRST, "agent-0", Offer(1, 12, STOCK))]


def test_a_new_epoch_leaves_out_the_versions_that_may_be_lost() -> None:
    cluster = Cluster(make_spec())
    cluster.join_all()
    cluster.iterate_until(JobState.PROFILING)
    before = cluster.machine.record.version
    commands = cluster.handle(EpochRenewed("new"))
    assert actions(commands) == []  # they are offered when they join again
    assert cluster.machine.record.version == before + LOST_VERSIONS
    cluster.handle(AgentDisconnected("agent-0"))
    (_, *offers) = actions(cluster.handle(cluster.ranks[FIRST].joined()))
    assert [offer.offer.version for offer in offers if isinstance(offer, SendOffer)] != []
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
    commands = cluster.handle(StragglerReported(Straggler(0, slowdown_factor=1.2)))
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


def test_a_lost_rank_puts_the_others_to_stock_and_its_return_back_to_the_plan() -> None:
    cluster = planned()
    plan = cluster.ranks[FIRST].in_force
    left = RankLeft(FIRST, "agent-0", RankLeftReason.TRAINER_GONE)
    commands = cluster.handle(left)
    cluster.expect(JobState.WAITING)
    assert set(offers(commands)) == {SECOND, THIRD, FOURTH}
    assert {offer.clocks for offer in offers(commands).values()} == {STOCK}
    cluster.carry_out(commands)

    for rank in cluster.ranks.values():
        rank.iteration, rank.in_force, rank.pending = 5, Offer(0, 0, STOCK), None
        cluster.carry_out(cluster.handle(rank.joined()))
    cluster.expect(JobState.PLANNED)
    cluster.iterate(4)
    assert cluster.ranks[FIRST].in_force.clocks == plan.clocks
    assert cluster.ranks[FIRST].in_force.version > plan.version
    assert [period.state for period in cluster.machine.run.log.periods][-1] is JobState.PLANNED


def test_a_rank_lost_while_profiling_keeps_the_clocks_measured_so_far() -> None:
    cluster = Cluster(make_spec())
    cluster.join_all()
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


def test_a_silent_agent_is_lost_and_its_stream_ended() -> None:
    cluster = planned()
    lease_end_s = cluster.now_s + cluster.rules.lease_s
    cluster.now_s = lease_end_s - 1
    cluster.handle(AgentHeard("agent-1"))
    assert cluster.machine.run.next_deadline_s() == lease_end_s
    cluster.now_s = lease_end_s
    commands = cluster.handle(Tick())
    assert EndStream("agent-0") in commands
    assert EndStream("agent-1") not in commands
    assert cluster.rank_states() == [RankState.LOST] * 2 + [RankState.CONNECTED] * 2


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
    commands = cluster.handle(StragglerReported(Straggler(0, slowdown_factor=1.2)))
    assert {offer.start_iteration for offer in offers(commands).values()} == {1}


def test_the_job_ends_when_all_ranks_are_done() -> None:
    cluster = planned()
    for place, rank in cluster.ranks.items():
        cluster.expect(JobState.PLANNED)
        commands = cluster.handle(RankLeft(place, rank.instance_id, RankLeftReason.FINISHED))
        assert offers(commands) == {}
    cluster.expect(JobState.FINISHED)
    assert events(commands) == [
        event_pb2.JOB_EVENT_TYPE_RANK_CHANGED,
        event_pb2.JOB_EVENT_TYPE_STATE_CHANGED,
    ], "no rank is left to send it to"


def test_ending_a_job_puts_every_rank_to_stock_and_refuses_later_inputs() -> None:
    cluster = planned()
    version = cluster.machine.record.version
    commands = cluster.handle(FinishRequested())
    assert {(offer.version, offer.clocks) for offer in offers(commands).values()} == {(version + 1, STOCK)}
    assert len(offers(commands)) == 4
    assert cluster.handle(FinishRequested()) == []
    refused: list[RankJoined | StragglerReported | PolicySet] = [
        cluster.ranks[FIRST].joined(),
        StragglerReported(Straggler(0, slowdown_factor=2.0)),
        PolicySet(OperatingPolicy(5)),
    ]
    for event in refused:
        with pytest.raises(JobFinishedError):
            cluster.handle(event)


def test_a_rank_outside_the_job_is_refused() -> None:
    cluster = Cluster(make_spec())
    event = replace(cluster.ranks[FIRST].joined(), rank=Coordinates(0, 2, 0))
    with pytest.raises(RankOutOfRangeError):
        cluster.handle(event)


def test_telemetry_at_an_unknown_clock_is_refused_and_not_counted() -> None:
    cluster = planned()
    rank = cluster.ranks[FIRST]
    before = cluster.job(is_full=True)
    odd = batch(99, [rank.iteration + 1], 1, 0.8, order=rank.order, clock_mhz=1234)
    with pytest.raises(InvalidFieldError, match="1234"):
        cluster.handle(TelemetryArrived(FIRST, "agent-0", odd))
    assert cluster.job(is_full=True) == before


def test_energy_of_an_unknown_chunk_is_refused() -> None:
    cluster = planned()
    sample = estimate(cluster.ranks[FIRST].order, 1, 3, 1400)
    odd = replace(sample, samples=(replace(sample.samples[0], chunk=7),))
    with pytest.raises(InvalidFieldError, match="chunk 7"):
        cluster.handle(TelemetryArrived(FIRST, "agent-0", batch(99, [], 1, 0.8, energy=odd)))
