"""Targets from a signal: the slower of a signal's and a budget's counts, and it outlives a restart."""

import math
from dataclasses import replace

import pytest

from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.inputs import BudgetTargetSet, PolicySet, SignalTargetSet
from perseus.service.domain.model import JobState
from perseus.service.domain.signals import (
    ExtraTime,
    SignalKind,
    SignalRule,
    SignalTarget,
    SignalTargetState,
    WorkUntil,
    WorkWindow,
)
from perseus.service.domain.specification import BudgetTerms, OperatingPolicy
from perseus.service.job import views
from perseus.v1 import event_pb2, job_pb2
from tests.service.service_fakes import Cluster, make_spec

RULE = SignalRule(SignalKind.CARBON, ExtraTime(10, 86_400.0))
POLICY = OperatingPolicy(signal=RULE)
WINDOW = WorkWindow(0.0, 86_400.0, 50_000.0)


def following(policy: OperatingPolicy = POLICY) -> Cluster:
    cluster = Cluster(replace(make_spec(), policy=policy))
    cluster.join_all()
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(4)
    return cluster


def target(
    target_time_s: float | None,
    state: SignalTargetState = SignalTargetState.FOLLOWING,
    value: float | None = 400.0,
) -> SignalTargetSet:
    return SignalTargetSet(RULE, WINDOW, state, target_time_s, value)


def point_s(cluster: Cluster, share: float) -> float:
    points = views.solved_frontier(cluster.machine.run).points
    t_star_s = views.solved_frontier(cluster.machine.run).t_star_s
    until_t_star = [point.iteration_time_s for point in points if point.iteration_time_s <= t_star_s]
    return until_t_star[int(share * (len(until_t_star) - 1))]


def test_a_job_runs_at_the_signals_target_and_gives_the_reason() -> None:
    cluster = following()
    signal_target = views.signal_target(cluster.machine.run)
    assert signal_target is not None
    assert (signal_target.rule, signal_target.signal_target) == (RULE, None)
    before_s = cluster.planned_times_s()
    slow_s = point_s(cluster, 0.6)
    cluster.send(target(slow_s))
    cluster.iterate(4)
    assert all(
        was_s < own_s <= slow_s for own_s, was_s in zip(cluster.planned_times_s(), before_s, strict=True)
    )
    cluster.send(target(slow_s, value=390.0))  # another value with the same result is no event
    cluster.send(target(None, SignalTargetState.NO_SIGNAL, None))
    cluster.iterate(4)
    assert cluster.planned_times_s() == before_s
    first, last = cluster.announced(event_pb2.SignalTargetSet)
    assert not first.HasField("before_iteration_time_s")
    assert (first.signal_target.iteration_time_s, first.signal_target.value_per_kwh) == (slow_s, 400.0)
    assert last.before_iteration_time_s == slow_s
    assert last.signal_target.state == job_pb2.SIGNAL_TARGET_STATE_NO_SIGNAL


def test_iterations_of_the_window_are_counted_also_over_a_restart() -> None:
    cluster = following()
    cluster.send(target(point_s(cluster, 0.5)))
    cluster.iterate(5)
    shown = cluster.job().signal_target
    assert shown.done_count == 5
    cluster.restart()
    assert cluster.job().signal_target == shown
    for rank in cluster.ranks.values():
        cluster.send(rank.joined())
    times_s = cluster.planned_times_s()
    cluster.iterate(3)
    assert cluster.planned_times_s() == times_s
    cluster.send(target(None))  # of the same window
    assert cluster.machine.record.signal_target == SignalTarget(
        WINDOW, SignalTargetState.FOLLOWING, None, 400.0, 8
    )
    next_window = replace(WINDOW, begin_s=86_400.0, end_s=2 * 86_400.0)
    cluster.send(SignalTargetSet(RULE, next_window, SignalTargetState.FOLLOWING, None, 400.0))
    assert cluster.machine.record.signal_target == SignalTarget(
        next_window, SignalTargetState.FOLLOWING, None, 400.0, 0
    )


@pytest.mark.parametrize(("signal_share", "budget_share"), [(0.3, 0.9), (0.9, 0.3)])
def test_the_slower_of_a_budgets_and_a_signals_target_counts(
    signal_share: float, budget_share: float
) -> None:
    cluster = following()
    signal_s, budget_s = point_s(cluster, signal_share), point_s(cluster, budget_share)
    cluster.send(BudgetTargetSet(budget_s, is_urgent=True))
    cluster.send(target(signal_s))
    cluster.iterate(6)
    slower_s, faster_s = max(signal_s, budget_s), min(signal_s, budget_s)
    assert all(faster_s < own_s <= slower_s for own_s in cluster.planned_times_s())
    basis = views.power(cluster.machine.run).basis
    assert basis is not None
    assert basis.own_time_s == signal_s, "a budget's slowdown is relative to the job's own policy"
    cluster.send(target(None))
    cluster.iterate(6)
    assert all(own_s <= budget_s for own_s in cluster.planned_times_s())


def test_a_new_rule_resets_the_target_and_new_terms_do_not() -> None:
    cluster = following()
    cluster.send(target(point_s(cluster, 0.5)))
    cluster.iterate(2)
    cluster.send(PolicySet(replace(POLICY, budget_terms=BudgetTerms(5.0, 2.0))))
    assert cluster.machine.record.signal_target is not None
    by_price = OperatingPolicy(signal=replace(RULE, kind=SignalKind.PRICE))
    cluster.send(PolicySet(by_price))
    assert cluster.machine.record.signal_target is None
    cluster.send(target(point_s(cluster, 0.9)))  # it was meant for the previous rule
    assert cluster.machine.record.signal_target is None
    cluster.send(PolicySet(OperatingPolicy()))
    assert views.signal_target(cluster.machine.run) is None


@pytest.mark.parametrize("target_time_s", [math.nan, 0.0, math.inf])
def test_invalid_target_times_are_refused(target_time_s: float) -> None:
    with pytest.raises(InvalidFieldError, match="target_time_s"):
        following().send(target(target_time_s))


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (SignalRule(SignalKind.CARBON), "policy.least_carbon.time: expected extra_time or work_until"),
        (SignalRule(SignalKind.PRICE, ExtraTime(-1, 3600)), "least_cost.extra_time.percent: expected 0 to"),
        (SignalRule(SignalKind.PRICE, ExtraTime(1, 60)), "horizon_s: expected 3600 to"),
        (SignalRule(SignalKind.PRICE, work_until=WorkUntil(0, 1e9)), "iteration_count: expected 1 to"),
        (SignalRule(SignalKind.PRICE, work_until=WorkUntil(1, math.inf)), "end_time: expected 0 to"),
    ],
)
def test_impossible_rules_are_refused(rule: SignalRule, text: str) -> None:
    with pytest.raises(InvalidFieldError, match=text):
        OperatingPolicy(signal=rule).check()


def test_a_rule_describes_itself() -> None:
    assert str(OperatingPolicy(7.5)) == "at most 7.5 % slower than stock"
    assert str(POLICY) == "least carbon within 10 % more time over 86400 s"
    rule = SignalRule(SignalKind.PRICE, work_until=WorkUntil(1000, 1_800_000_000.0))
    assert str(rule) == "least cost: 1000 iterations until 2027-01-15T08:00:00Z"
