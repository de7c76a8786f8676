"""Urgent offers to a planned job: which ranks get them; the iterations that they touch do not count."""

from perseus.service.domain.inputs import BudgetTargetSet
from perseus.service.domain.model import JobState
from perseus.service.job.iterations.iteration_log import report
from perseus.v1 import event_pb2
from tests.service.job.machine_bench import events, offers, planned
from tests.service.service_fakes import Cluster


def hurry(cluster: Cluster) -> None:
    """Set slower plans, as urgent, while all ranks are in the middle of an iteration."""
    for rank in cluster.ranks.values():
        rank.begin()
    target_s = 1.2 * max(cluster.planned_times_s())
    commands = cluster.handle(BudgetTargetSet(target_s, is_urgent=True))
    assert {offer.is_urgent for offer in offers(commands).values()} == {True}
    cluster.carry_out(commands)


def test_plans_are_in_force_before_the_iteration_has_ended() -> None:
    cluster = planned(tensors=2)
    before_s = cluster.planned_times_s()
    hurry(cluster)
    assert min(cluster.planned_times_s()) > max(before_s), "and on all ranks of a stage"


def test_a_touched_iteration_is_in_the_ledger_and_no_evidence_however_long_it_takes() -> None:
    cluster = planned()
    reported, totals = list(report(cluster.machine.run.log.periods, 0)), cluster.machine.run.log.totals
    hurry(cluster)
    before = len(cluster.history)
    for rank in cluster.ranks.values():
        cluster.send(rank.end(80.0))
    log = cluster.machine.run.log
    assert log.latest is not None
    assert log.latest.has_clock_change
    assert list(report(log.periods, 0)) == reported
    assert log.totals != totals
    cluster.iterate(20)
    cluster.expect(JobState.PLANNED)
    assert set(events(cluster.history[before:])) <= {event_pb2.JOB_EVENT_TYPE_PLAN_IN_FORCE}


def test_one_touched_rank_is_enough() -> None:
    cluster = planned()
    for rank in cluster.ranks.values():
        rank.begin()
    for touched, rank in enumerate(cluster.ranks.values()):
        rank.has_clock_change = touched == 2
        cluster.send(rank.end(0.8))
    latest = cluster.machine.run.log.latest
    assert latest is not None
    assert latest.has_clock_change
