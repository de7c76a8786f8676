"""The job's state machine by its exact commands: plans, stragglers, refusals."""

import math

import pytest

from perseus.service.domain.commands import SendOffer
from perseus.service.domain.errors import InvalidFieldError, PipelineOutOfRangeError
from perseus.service.domain.inputs import (
    OfferAnswered,
    PlanInForce,
    PolicySet,
    SolveFailed,
    StragglerCleared,
    StragglerReported,
)
from perseus.service.domain.model import JobState, Offer, RefusalReason, Straggler
from perseus.service.domain.specification import OperatingPolicy
from perseus.service.job import views
from perseus.v1 import event_pb2
from tests.service.job.machine_bench import FIRST, FOURTH, THIRD, actions, events, offers, planned
from tests.service.service_fakes import EPOCH, Cluster, make_spec


def test_all_pipelines_get_the_plan_of_t_min_under_one_version() -> None:
    cluster = planned()
    frontier = views.solved_frontier(cluster.machine.run)
    assert cluster.planned_times_s() == [frontier.t_min_s, frontier.t_min_s]
    assert len({rank.in_force.version for rank in cluster.ranks.values()}) == 1


def test_a_policy_stretches_the_plan() -> None:
    cluster = planned(OperatingPolicy(max_slowdown_percent=10))
    t_min_s = views.solved_frontier(cluster.machine.run).t_min_s
    (time_s,) = set(cluster.planned_times_s())
    assert t_min_s < time_s <= 1.1 * t_min_s
    commands = cluster.handle(PolicySet(OperatingPolicy()))
    assert events(commands) == [
        event_pb2.JOB_EVENT_TYPE_POLICY_SET,
        event_pb2.JOB_EVENT_TYPE_PLAN_OFFERED,
        event_pb2.JOB_EVENT_TYPE_PLAN_OFFERED,
    ]
    cluster.carry_out(commands)
    cluster.iterate(3)
    assert set(cluster.planned_times_s()) == {t_min_s}
    assert cluster.handle(PolicySet(OperatingPolicy())) == []


def test_a_straggler_moves_the_other_pipelines_only_and_its_end_moves_them_back() -> None:
    cluster = planned(pipelines=3)
    t_min_s = views.solved_frontier(cluster.machine.run).t_min_s
    commands = cluster.handle(StragglerReported(Straggler(0, slowdown_factor=1.2)))
    assert {rank.pipeline for rank in offers(commands)} == {1, 2}
    assert len({offer.version for offer in offers(commands).values()}) == 1
    cluster.carry_out(commands)
    cluster.iterate(3)
    own_s, *others_s = cluster.planned_times_s()
    assert own_s == t_min_s
    assert t_min_s < others_s[0] == others_s[1] <= 1.2 * t_min_s
    assert cluster.handle(StragglerReported(Straggler(0, slowdown_factor=1.2))) == []
    cluster.send(StragglerCleared(0))
    cluster.iterate(3)
    assert set(cluster.planned_times_s()) == {t_min_s}
    assert cluster.handle(StragglerCleared(0)) == []


def test_of_several_stragglers_the_slowest_counts_and_a_second_report_replaces_the_first() -> None:
    cluster = planned(pipelines=3)
    t_min_s = views.solved_frontier(cluster.machine.run).t_min_s
    cluster.send(StragglerReported(Straggler(0, slowdown_factor=1.1)))
    cluster.send(StragglerReported(Straggler(1, slowdown_factor=1.3)))
    cluster.iterate(3)
    slow_s = cluster.planned_times_s()
    assert slow_s[0] == slow_s[1] == t_min_s
    assert 1.1 * t_min_s < slow_s[2] <= 1.3 * t_min_s
    cluster.send(StragglerReported(Straggler(1, slowdown_factor=1.0)))
    cluster.iterate(3)
    assert cluster.planned_times_s()[2] <= 1.1 * t_min_s


def test_no_pipeline_is_planned_slower_than_t_slow() -> None:
    cluster = planned()
    cluster.send(StragglerReported(Straggler(0, slowdown_factor=50.0)))
    cluster.iterate(3)
    assert cluster.planned_times_s()[1] <= views.solved_frontier(cluster.machine.run).t_slow_s


def test_seconds_are_put_on_the_frontiers_scale() -> None:
    cluster = planned()
    frontier = views.solved_frontier(cluster.machine.run)
    # The measured stock iteration takes 0.8 s, the all-max prediction less: the difference is overhead.
    overhead_s = 0.8 - frontier.baseline.iteration_time_s
    assert overhead_s > 0
    cluster.send(StragglerReported(Straggler(0, iteration_time_s=0.9)))
    assert cluster.machine.run.planner.straggler_times_s() == {0: pytest.approx(0.9 - overhead_s)}
    cluster.send(StragglerReported(Straggler(0, iteration_time_s=0.1)))
    assert cluster.machine.run.planner.straggler_times_s() == {0: frontier.t_min_s}


def test_a_straggler_known_before_the_frontier_counts_from_the_first_plan() -> None:
    cluster = Cluster(make_spec())
    cluster.join_all()
    cluster.iterate_until(JobState.PROFILING)
    cluster.send(StragglerReported(Straggler(0, slowdown_factor=1.2)))
    assert cluster.machine.run.planner.straggler_times_s() == {0: 0.0}
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(3)
    own_s, other_s = cluster.planned_times_s()
    assert own_s < other_s


@pytest.mark.parametrize(
    "straggler",
    [
        Straggler(0),
        Straggler(0, slowdown_factor=0.99),
        Straggler(0, slowdown_factor=math.nan),
        Straggler(0, slowdown_factor=math.inf),
        Straggler(0, iteration_time_s=math.nan),
        Straggler(0, iteration_time_s=0.0),
        Straggler(0, iteration_time_s=-1.0),
    ],
)
def test_an_impossible_straggler_is_refused_and_changes_nothing(straggler: Straggler) -> None:
    cluster = planned()
    with pytest.raises(InvalidFieldError):
        cluster.handle(StragglerReported(straggler))
    assert cluster.machine.run.planner.straggler_times_s() == {}


def test_an_unknown_pipeline_is_refused() -> None:
    cluster = planned()
    for event in (StragglerReported(Straggler(2, slowdown_factor=1.5)), StragglerCleared(-1)):
        with pytest.raises(PipelineOutOfRangeError):
            cluster.handle(event)


def test_an_offer_that_came_too_late_is_offered_anew_under_the_same_version() -> None:
    cluster = planned()
    commands = cluster.handle(StragglerReported(Straggler(0, slowdown_factor=1.2)))
    late = offers(commands)[THIRD]
    for rank in (cluster.ranks[THIRD], cluster.ranks[FOURTH]):
        rank.iteration = late.start_iteration
    refused = cluster.ranks[THIRD].answer(late)
    assert refused.refusal is RefusalReason.PAST_START
    commands = cluster.handle(refused)
    assert events(commands) == [event_pb2.JOB_EVENT_TYPE_PLAN_REFUSED]
    again = Offer(late.version, late.start_iteration + 4, late.clocks)
    assert actions(commands) == [SendOffer(THIRD, "agent-1", again), SendOffer(FOURTH, "agent-1", again)]
    # The other rank's answer to the first offer is older than the new one, and changes nothing.
    assert cluster.handle(cluster.ranks[FOURTH].answer(late)) == []
    cluster.carry_out(commands)
    cluster.iterate(6)
    assert {cluster.ranks[place].in_force.version for place in (THIRD, FOURTH)} == {late.version}


def test_a_refusal_of_stock_is_announced_and_the_offer_not_repeated() -> None:
    cluster = planned()
    stock = offers(cluster.handle(SolveFailed("made up")))[FIRST]
    commands = cluster.handle(
        OfferAnswered(FIRST, "agent-0", EPOCH, stock.version, RefusalReason.NOT_PERMITTED, "", 30)
    )
    assert events(commands) == [event_pb2.JOB_EVENT_TYPE_PLAN_REFUSED]
    assert actions(commands) == []


def test_answers_to_older_versions_and_other_epochs_are_ignored() -> None:
    cluster = planned()
    version = cluster.machine.record.version
    for epoch, number in ((EPOCH, version - 1), ("another", version)):
        answer = OfferAnswered(FIRST, "agent-0", epoch, number, RefusalReason.NOT_PERMITTED, "", 1)
        assert cluster.handle(answer) == []


def test_a_rank_that_dropped_an_accepted_offer_is_offered_it_again() -> None:
    """Its clocks were due at an iteration that it never began with them; no rank waits for that."""
    cluster = Cluster(make_spec())
    cluster.join_all()
    cluster.iterate_until(JobState.PROFILING)
    rank = cluster.ranks[FIRST]
    assert rank.pending is not None
    assert rank.in_force.version != rank.pending.version
    rank.pending = None
    commands = cluster.handle(PlanInForce(FIRST, rank.instance_id, "", 0, rank.iteration + 1))
    assert [command.rank for command in commands if isinstance(command, SendOffer)][:1] == [FIRST]
    cluster.carry_out(commands)
    cluster.iterate_until(JobState.PLANNED)


def test_a_rank_that_fell_back_to_stock_is_offered_its_plan_again() -> None:
    cluster = planned()
    rank = cluster.ranks[FIRST]
    fallen = PlanInForce(FIRST, "agent-0", "", 0, rank.iteration)
    commands = cluster.handle(fallen)
    offer = cluster.machine.run.offers.of_rank(FIRST)
    assert actions(commands) == [SendOffer(FIRST, "agent-0", offer)]
    assert offer.version == rank.in_force.version
    assert offer.start_iteration == rank.iteration + 2
