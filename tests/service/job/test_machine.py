"""The job's state machine by its exact commands: ranks, leases, offers, wrong and repeated inputs."""

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
    SolveFailed,
    StragglerCleared,
    StragglerReported,
    TelemetryArrived,
    Tick,
)
from perseus.service.domain.model import (
    LOST_VERSIONS,
    STOCK,
    HoldClocks,
    JobState,
    Offer,
    PlannedClocks,
    RankLeftReason,
    RankState,
    RefusalReason,
    Straggler,
)
from perseus.service.domain.specification import Coordinates, OperatingPolicy
from perseus.service.job import views
from perseus.service.job.rules import Rules
from perseus.v1 import event_pb2
from tests.service.job.clusters import (
    FIRST,
    FOURTH,
    SECOND,
    THIRD,
    actions,
    answer,
    cluster_in,
    events,
    measured_clocks_mhz,
    offers,
    planned,
    straggler,
)
from tests.service.service_fakes import (
    CLOCKS_MHZ,
    EPOCH,
    Cluster,
    FakeRank,
    batch,
    estimate,
    make_gpu,
    make_spec,
)


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


def test_a_disconnected_rank_keeps_its_plan_and_gets_later_offers_when_it_is_back() -> None:
    cluster = planned()
    assert actions(cluster.handle(AgentDisconnected("agent-1"))) == []
    assert cluster.rank_states() == [RankState.CONNECTED] * 2 + [RankState.DISCONNECTED] * 2
    cluster.expect(JobState.PLANNED)
    assert actions(cluster.handle(cluster.ranks[FOURTH].joined())) == [AcceptRank(FOURTH, "agent-1")]
    assert offers(cluster.handle(straggler())).keys() == {FOURTH}
    accepted, sent = actions(cluster.handle(cluster.ranks[THIRD].joined()))
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
    for agent, reason in (("agent-0", RankLeftReason.TRAINER_GONE), ("agent-9", RankLeftReason.FINISHED)):
        assert cluster.handle(RankLeft(FIRST, agent, reason)) == []


def test_a_lost_rank_that_is_done_after_all_is_done() -> None:
    """As after a change of its order: no longer served with the one before, and not yet with the new one."""
    cluster = planned()
    for reason in (RankLeftReason.TRAINER_GONE, RankLeftReason.FINISHED):
        for rank in cluster.ranks.values():
            cluster.send(RankLeft(rank.place, rank.instance_id, reason))
    cluster.expect(JobState.FINISHED)


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


def test_an_ended_job_refuses_inputs() -> None:
    cluster = planned()
    cluster.send(FinishRequested())
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
    short = batch(99, [rank.iteration + 1], 1, 0.8, order=rank.order[1:])
    rows = short.computations._replace(iteration=(), kind=(), microbatch=(), chunk=())
    fewer = TelemetryArrived(FIRST, "agent-0", short._replace(computations=rows))
    yield fewer, InvalidFieldError, r"^computations\.duration_s: expected \d+ rows, as many"
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


def test_a_batch_that_is_refused_among_others_changes_nothing_for_them() -> None:
    cluster = planned()
    count = cluster.machine.run.log.totals.regular_count
    for rank in cluster.ranks.values():
        rank.begin()
    first, *others = (rank.end(0.8) for rank in cluster.ranks.values())
    columns = first.batch.computations
    odd = first.batch._replace(computations=columns._replace(clock_mhz=[1] * len(columns.clock_mhz)))
    together = [others[0], replace(first, batch=odd), *others[1:], first]
    answers = list(cluster.machine.handle_telemetry(together, cluster.now_s, cluster.now_s))
    assert [isinstance(answer, InvalidFieldError) for answer in answers] == [False, True, False, False, False]
    assert cluster.machine.run.log.totals.regular_count == count + 1


def test_rows_without_their_begins_are_not_shown_as_a_timeline() -> None:
    cluster = planned()
    shown = views.timeline(cluster.machine.run, 0).timeline.iteration
    for rank in cluster.ranks.values():
        rank.begin()
        event = rank.end(0.8)
        rows = event.batch.computations._replace(begin_s=())
        cluster.send(replace(event, batch=event.batch._replace(computations=rows)))
    assert views.timeline(cluster.machine.run, 0).timeline.iteration == shown


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


# ---------------------------------------------------------------------- offers, and what is measured


def test_a_refusal_of_stock_is_announced_and_the_offer_not_repeated() -> None:
    cluster = planned()
    stock = offers(cluster.handle(SolveFailed("made up")))[FIRST]
    commands = cluster.handle(answer(cluster, FIRST, stock.version, RefusalReason.NOT_PERMITTED))
    assert events(commands) == [event_pb2.JOB_EVENT_TYPE_PLAN_REFUSED]
    assert actions(commands) == []


def test_a_rank_that_dropped_an_accepted_offer_is_offered_it_again() -> None:
    """Its clocks were due at an iteration that it never began with them; no rank waits for that."""
    cluster = cluster_in(JobState.PROFILING)
    rank = cluster.ranks[FIRST]
    assert rank.pending is not None
    assert rank.in_force.version != rank.pending.version
    rank.pending = None
    commands = cluster.handle(PlanInForce(FIRST, rank.instance_id, "", 0, rank.iteration + 1))
    assert [command.rank for command in commands if isinstance(command, SendOffer)][:1] == [FIRST]
    cluster.carry_out(commands)
    cluster.iterate_until(JobState.PLANNED)


def test_the_baseline_drops_the_first_iteration_and_irregular_ones() -> None:
    cluster = Cluster(make_spec(), Rules(baseline_iterations=2))
    cluster.join_all()
    cluster.iterate(1, duration_s=7.0)
    for rank in cluster.ranks.values():
        rank.begin()
        rank.sequence += 1
        odd = batch(rank.sequence, [rank.iteration], 0, 5.0, is_regular=False)
        cluster.send(TelemetryArrived(rank.place, rank.instance_id, odd))
    cluster.iterate(1, duration_s=1.0)
    cluster.expect(JobState.BASELINE)
    cluster.iterate(1, duration_s=2.0)
    cluster.expect(JobState.PROFILING)
    record = cluster.stored().record
    assert record is not None
    assert record.baseline is not None
    assert record.baseline.time_s == 1.5


def test_short_iterations_get_a_margin_that_covers_half_a_second() -> None:
    cluster = Cluster(make_spec(), Rules(baseline_iterations=1))
    cluster.join_all()
    cluster.iterate(2, duration_s=0.05)
    pending = cluster.ranks[FIRST].pending
    assert pending is not None
    assert pending.start_iteration == 1 + 1 + 10


def test_an_estimate_of_an_older_version_does_not_count() -> None:
    cluster = Cluster(make_spec(pipelines=1), Rules(baseline_iterations=1, profile_iterations=1))
    cluster.join_all()
    cluster.iterate(5)
    held = cluster.machine.run.offers[0]
    assert (held.version, held.clocks) == (2, HoldClocks((900,) * 2))
    for rank in cluster.ranks.values():
        rank.sequence += 1
        stale = batch(rank.sequence, [], 1, 0.8, energy=estimate(rank.order, 1, 9, 900))
        cluster.send(TelemetryArrived(rank.place, rank.instance_id, stale))
    assert measured_clocks_mhz(cluster) == [1400]


@pytest.mark.parametrize(
    ("of_one_mhz", "of_others_mhz", "measured_mhz"),
    [((1500, 1400, 1200), CLOCKS_MHZ, [1400, 1200]), ((1410,), (1300,), [])],
    ids=["they have two in common", "none"],
)
def test_only_clocks_that_all_gpus_have_are_tried(
    of_one_mhz: tuple[int, ...], of_others_mhz: tuple[int, ...], measured_mhz: list[int]
) -> None:
    cluster = Cluster(make_spec(), Rules(baseline_iterations=1))
    for place, rank in cluster.ranks.items():
        clocks_mhz = of_one_mhz if place == FIRST else of_others_mhz
        cluster.send(replace(rank.joined(), gpu=make_gpu(place, clocks_mhz)))
    cluster.iterate(30)
    assert measured_clocks_mhz(cluster) == measured_mhz
    cluster.expect(JobState.PLANNED if measured_mhz else JobState.STOCK)
    assert measured_mhz or cluster.offered_versions == []
