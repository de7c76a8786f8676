"""A pace by a signal is a policy's: the slower of it and a budget's counts, and it outlives a restart."""

import math
from dataclasses import replace

import pytest

from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.inputs import PaceOrdered, PolicySet, SignalPaced
from perseus.service.domain.model import JobState
from perseus.service.domain.signals import (
    ExtraTime,
    PacingState,
    SignalKind,
    SignalPacing,
    SignalRule,
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


def pace(
    pace_s: float | None, state: PacingState = PacingState.PACED, value: float | None = 400.0
) -> SignalPaced:
    return SignalPaced(RULE, WINDOW, state, pace_s, value)


def point_s(cluster: Cluster, share: float) -> float:
    points = views.solved_frontier(cluster.machine.run).points
    t_star_s = views.solved_frontier(cluster.machine.run).t_star_s
    until_t_star = [point.iteration_time_s for point in points if point.iteration_time_s <= t_star_s]
    return until_t_star[int(share * (len(until_t_star) - 1))]


def test_a_job_runs_at_the_signals_pace_and_says_why() -> None:
    cluster = following()
    pacing = views.pacing(cluster.machine.run)
    assert pacing is not None
    assert (pacing.rule, pacing.pacing) == (RULE, None)
    before_s = cluster.planned_times_s()
    slow_s = point_s(cluster, 0.6)
    cluster.send(pace(slow_s))
    cluster.iterate(4)
    assert all(
        was_s < own_s <= slow_s for own_s, was_s in zip(cluster.planned_times_s(), before_s, strict=True)
    )
    cluster.send(pace(slow_s, value=390.0))  # another value of the same consequence is no event
    cluster.send(pace(None, PacingState.BLIND, None))
    cluster.iterate(4)
    assert cluster.planned_times_s() == before_s
    first, last = cluster.announced(event_pb2.SignalPaced)
    assert not first.HasField("before_iteration_time_s")
    assert (first.pacing.iteration_time_s, first.pacing.value_per_kwh) == (slow_s, 400.0)
    assert last.before_iteration_time_s == slow_s
    assert last.pacing.state == job_pb2.SIGNAL_PACING_STATE_BLIND


def test_iterations_of_the_window_are_counted_also_over_a_restart() -> None:
    cluster = following()
    cluster.send(pace(point_s(cluster, 0.5)))
    cluster.iterate(5)
    shown = cluster.machine.record.pacing
    assert shown is not None
    assert shown.done_count == 5
    cluster.restart()
    assert cluster.machine.record.pacing == shown
    for rank in cluster.ranks.values():
        cluster.send(rank.joined())
    times_s = cluster.planned_times_s()
    cluster.iterate(3)
    assert cluster.planned_times_s() == times_s
    cluster.send(pace(None))  # of the same window
    assert cluster.machine.record.pacing == SignalPacing(WINDOW, PacingState.PACED, None, 400.0, 8)
    next_window = replace(WINDOW, begin_s=86_400.0, end_s=2 * 86_400.0)
    cluster.send(SignalPaced(RULE, next_window, PacingState.PACED, None, 400.0))
    assert cluster.machine.record.pacing == SignalPacing(next_window, PacingState.PACED, None, 400.0, 0)


@pytest.mark.parametrize(("signal_share", "budget_share"), [(0.3, 0.9), (0.9, 0.3)])
def test_the_slower_of_a_budgets_and_a_signals_pace_counts(signal_share: float, budget_share: float) -> None:
    cluster = following()
    signal_s, budget_s = point_s(cluster, signal_share), point_s(cluster, budget_share)
    cluster.send(PaceOrdered(budget_s, is_urgent=True))
    cluster.send(pace(signal_s))
    cluster.iterate(6)
    slower_s, faster_s = max(signal_s, budget_s), min(signal_s, budget_s)
    assert all(faster_s < own_s <= slower_s for own_s in cluster.planned_times_s())
    basis = views.power(cluster.machine.run).basis
    assert basis is not None
    assert basis.own_time_s == signal_s, "what a budget takes is against the job left alone, by its policy"
    cluster.send(pace(None))
    cluster.iterate(6)
    assert all(own_s <= budget_s for own_s in cluster.planned_times_s())


def test_another_rule_begins_anew_and_other_terms_do_not() -> None:
    cluster = following()
    cluster.send(pace(point_s(cluster, 0.5)))
    cluster.iterate(2)
    cluster.send(PolicySet(replace(POLICY, budget_terms=BudgetTerms(5.0, 2.0))))
    assert cluster.machine.record.pacing is not None
    by_price = OperatingPolicy(signal=replace(RULE, kind=SignalKind.PRICE))
    cluster.send(PolicySet(by_price))
    assert cluster.machine.record.pacing is None
    cluster.send(pace(point_s(cluster, 0.9)))  # it was meant for the rule before
    assert cluster.machine.record.pacing is None
    cluster.send(PolicySet(OperatingPolicy()))
    assert views.pacing(cluster.machine.run) is None


@pytest.mark.parametrize("pace_s", [math.nan, 0.0, math.inf])
def test_what_is_no_time_is_refused(pace_s: float) -> None:
    with pytest.raises(InvalidFieldError, match="pace_s"):
        following().send(pace(pace_s))


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
def test_rules_that_cannot_be_are_refused(rule: SignalRule, text: str) -> None:
    with pytest.raises(InvalidFieldError, match=text):
        OperatingPolicy(signal=rule).check()


def test_a_rule_says_what_it_wants() -> None:
    assert str(POLICY) == "least carbon within 10 % more time over 86400 s"
    rule = SignalRule(SignalKind.PRICE, work_until=WorkUntil(1000, 1_800_000_000.0))
    assert str(rule) == "least cost: 1000 iterations until 2027-01-15T08:00:00Z"
