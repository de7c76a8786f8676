"""The job's state machine by its exact commands: profiling, stragglers, late offers, lost clocks."""

from dataclasses import replace

import pytest

from perseus.service.domain.commands import SendOffer
from perseus.service.domain.inputs import PlanInForce, SolveFailed, StragglerCleared, TelemetryArrived
from perseus.service.domain.model import HoldClocks, JobState, Offer, RefusalReason
from perseus.service.job import views
from perseus.service.job.rules import Rules
from perseus.v1 import event_pb2
from tests.service.job.machine_bench import (
    FIRST,
    FOURTH,
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
from tests.service.service_fakes import CLOCKS_MHZ, Cluster, batch, estimate, make_gpu, make_spec


def test_another_report_of_a_straggler_replaces_the_first_and_the_same_changes_nothing() -> None:
    cluster = planned(pipelines=3)
    for factor in (1.3, 1.1):
        cluster.send(straggler(factor))
        cluster.iterate(3)
    t_min_s = views.solved_frontier(cluster.machine.run).t_min_s
    own_s, *others_s = cluster.planned_times_s()
    assert own_s == t_min_s < others_s[0] == others_s[1] <= 1.1 * t_min_s
    assert cluster.handle(straggler(1.1)) == []
    cluster.send(StragglerCleared(0))
    assert cluster.handle(StragglerCleared(0)) == []


def test_an_offer_that_came_too_late_is_offered_anew_under_the_same_version() -> None:
    cluster = planned()
    commands = cluster.handle(straggler())
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


def test_a_rank_that_fell_back_to_stock_is_offered_its_plan_again() -> None:
    cluster = planned()
    rank = cluster.ranks[FIRST]
    fallen = PlanInForce(FIRST, "agent-0", "", 0, rank.iteration)
    commands = cluster.handle(fallen)
    offer = cluster.machine.run.offers.of_rank(FIRST)
    assert actions(commands) == [SendOffer(FIRST, "agent-0", offer)]
    assert offer.version == rank.in_force.version
    assert offer.start_iteration == rank.iteration + 2


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
