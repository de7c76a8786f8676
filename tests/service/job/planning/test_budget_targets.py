"""A power budget's target overrides the policy, uses slack, and outlives a restart."""

import math

import pytest

from perseus.service.domain.errors import InvalidFieldError, JobFinishedError
from perseus.service.domain.inputs import BudgetTargetSet, FinishRequested, PolicySet, StragglerReported
from perseus.service.domain.model import JobState, Straggler
from perseus.service.domain.specification import BudgetTerms, OperatingPolicy
from perseus.service.job import views
from perseus.v1 import event_pb2
from tests.service.service_fakes import Cluster, make_spec


def planned() -> Cluster:
    cluster = Cluster(make_spec())
    cluster.join_all()
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(4)
    return cluster


def middle_s(cluster: Cluster) -> float:
    """Return a target in the middle of the frontier."""
    points = views.solved_frontier(cluster.machine.run).points
    return points[len(points) // 2].iteration_time_s


def test_a_target_holds_until_it_is_lifted() -> None:
    cluster = planned()
    before_s = cluster.planned_times_s()
    target_time_s = middle_s(cluster)
    cluster.send(BudgetTargetSet(target_time_s, is_urgent=True))
    cluster.iterate(4)
    for own_s, was_s in zip(cluster.planned_times_s(), before_s, strict=True):
        assert was_s < own_s <= target_time_s
    assert cluster.machine.record.budget_target_time_s == target_time_s
    cluster.send(BudgetTargetSet(target_time_s, is_urgent=True))  # unchanged
    cluster.send(BudgetTargetSet(None, is_urgent=False))
    cluster.iterate(4)
    assert cluster.planned_times_s() == before_s
    assert cluster.machine.record.budget_target_time_s is None
    assert cluster.announced(event_pb2.BudgetTargetSet) == [
        event_pb2.BudgetTargetSet(iteration_time_s=target_time_s, is_urgent=True),
        event_pb2.BudgetTargetSet(before_iteration_time_s=target_time_s),
    ]


def test_a_target_makes_nothing_faster_than_the_policy() -> None:
    cluster = planned()
    cluster.send(PolicySet(OperatingPolicy(20.0)))
    cluster.iterate(4)
    own_s = cluster.planned_times_s()
    cluster.send(BudgetTargetSet(views.solved_frontier(cluster.machine.run).t_min_s, is_urgent=False))
    cluster.iterate(4)
    assert cluster.planned_times_s() == own_s


def test_a_straggler_gets_the_plan_that_its_slowness_stretches_to_the_target() -> None:
    cluster = planned()
    cluster.send(StragglerReported(Straggler(1, slowdown_factor=1.05)))
    basis = views.power(cluster.machine.run).basis
    assert basis is not None
    factor = basis.slowdowns[1]
    assert set(basis.slowdowns) == {1}
    assert 1 < factor <= 1.05
    target_time_s = views.solved_frontier(cluster.machine.run).points[-2].iteration_time_s
    cluster.send(BudgetTargetSet(target_time_s, is_urgent=True))
    cluster.iterate(4)
    other_s, straggler_s = cluster.planned_times_s()
    assert straggler_s <= target_time_s / factor < other_s <= target_time_s


def test_a_target_waits_for_plans_and_survives_a_restart() -> None:
    target_time_s = middle_s(planned())
    cluster = Cluster(make_spec())
    cluster.join_all()
    cluster.send(BudgetTargetSet(target_time_s, is_urgent=True))
    assert views.power(cluster.machine.run).basis is None
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(4)
    times_s = cluster.planned_times_s()
    assert views.solved_frontier(cluster.machine.run).t_min_s < max(times_s) <= target_time_s
    offered_count = len(cluster.offered_versions)
    cluster.restart()
    assert views.power(cluster.machine.run).target_time_s == target_time_s
    for rank in cluster.ranks.values():
        cluster.send(rank.joined())
    cluster.iterate(4)
    assert cluster.planned_times_s() == times_s
    assert len(cluster.offered_versions) == offered_count, "no offer is repeated needlessly"


@pytest.mark.parametrize("is_urgent", [True, False])
def test_a_jobs_power_is_that_of_its_latest_iteration(is_urgent: bool) -> None:
    cluster = planned()
    power = views.power(cluster.machine.run)
    assert power.power_w == pytest.approx(4 * 100.0)
    assert power.iteration_time_s == pytest.approx(0.8)
    assert not power.is_changing
    for rank in cluster.ranks.values():
        rank.begin()
    cluster.send(BudgetTargetSet(middle_s(cluster), is_urgent=is_urgent))
    power = views.power(cluster.machine.run)
    assert (power.is_changing, power.is_in_force) == (True, is_urgent)
    for rank in cluster.ranks.values():
        cluster.send(rank.end(0.8))
    assert views.power(cluster.machine.run).is_changing, (
        "an iteration with a clock change does not belong to the new plans"
    )
    cluster.iterate(4)
    power = views.power(cluster.machine.run)
    assert (power.is_changing, power.is_in_force) == (False, True)


def test_a_policy_without_budget_terms_keeps_the_previous_ones() -> None:
    cluster = planned()
    assert views.power(cluster.machine.run).terms == BudgetTerms(100.0, 1.0)
    terms = BudgetTerms(tolerance_percent=5.0, weight=2.0)
    cluster.send(PolicySet(OperatingPolicy(10.0, budget_terms=terms)))
    cluster.send(PolicySet(OperatingPolicy()))
    assert views.power(cluster.machine.run).terms == terms
    assert cluster.machine.record.policy == OperatingPolicy(budget_terms=terms)
    cluster.restart()
    assert views.power(cluster.machine.run).terms == terms


@pytest.mark.parametrize("target_time_s", [math.nan, 0.0, -1.0, math.inf])
def test_invalid_target_times_are_refused(target_time_s: float) -> None:
    with pytest.raises(InvalidFieldError, match="target_time_s"):
        planned().send(BudgetTargetSet(target_time_s, is_urgent=True))


def test_an_ended_job_takes_no_target() -> None:
    cluster = planned()
    cluster.send(FinishRequested())
    with pytest.raises(JobFinishedError):
        cluster.send(BudgetTargetSet(1.0, is_urgent=True))
