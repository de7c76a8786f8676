"""Targets of a power budget and of a signal override the policy, and outlive a restart.

Urgent ones take effect within an iteration, which then does not count. A maximum clock postpones the work
above it.
"""

import math
from dataclasses import replace

import pytest

from perseus.service.domain.commands import Command, RefuseRank, SendMaxClock, SendOffer
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.inputs import (
    BudgetTargetSet,
    FinishRequested,
    MaxClockSet,
    PolicySet,
    SignalTargetSet,
)
from perseus.service.domain.model import STOCK, FaultyPart, HoldClocks, JobState, MaxClock, StockClocks
from perseus.service.domain.signals import (
    ExtraTime,
    SignalKind,
    SignalRule,
    SignalTarget,
    SignalTargetState,
    WorkUntil,
    WorkWindow,
)
from perseus.service.domain.snapshot import Fault
from perseus.service.domain.specification import BudgetTerms, OperatingPolicy
from perseus.service.domain.stall import MAX_CLOCK_STEP
from perseus.service.job import views
from perseus.service.job.iterations.iteration_log import report
from perseus.service.job.quarantine import handle, quarantine
from perseus.v1 import event_pb2
from tests.service.job.clusters import (
    FIRST,
    cluster_in,
    events,
    measured_clocks_mhz,
    offers,
    planned,
    straggler,
)
from tests.service.service_fakes import EPOCH, START_S, Cluster


def middle_s(cluster: Cluster) -> float:
    """Return a target in the middle of the frontier."""
    points = views.solved_frontier(cluster.machine.run).points
    return points[len(points) // 2].iteration_time_s


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
    cluster.send(straggler(1.05, pipeline=1))
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


def test_a_target_waits_for_plans() -> None:
    target_time_s = middle_s(planned())
    cluster = cluster_in(JobState.BASELINE)
    cluster.send(BudgetTargetSet(target_time_s, is_urgent=True))
    assert views.power(cluster.machine.run).basis is None
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(4)
    times_s = cluster.planned_times_s()
    assert views.solved_frontier(cluster.machine.run).t_min_s < max(times_s) <= target_time_s


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


RULE = SignalRule(SignalKind.CARBON, ExtraTime(10, 86_400.0))
POLICY = OperatingPolicy(signal=RULE)
WINDOW = WorkWindow(0.0, 86_400.0, 50_000.0)


def target(
    target_time_s: float | None,
    state: SignalTargetState = SignalTargetState.FOLLOWING,
    value: float | None = 400.0,
) -> SignalTargetSet:
    return SignalTargetSet(RULE, WINDOW, state, target_time_s, value)


def point_s(cluster: Cluster, share: float) -> float:
    """Return the time of a point between T_min and T*."""
    frontier = views.solved_frontier(cluster.machine.run)
    times_s = [point.iteration_time_s for point in frontier.points]
    until_t_star_s = [time_s for time_s in times_s if time_s <= frontier.t_star_s]
    return until_t_star_s[int(share * (len(until_t_star_s) - 1))]


def test_iterations_of_the_window_are_counted() -> None:
    cluster = planned(policy=POLICY)
    cluster.send(target(point_s(cluster, 0.5)))
    cluster.iterate(8)
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
    cluster = planned(policy=POLICY)
    signal_s, budget_s = point_s(cluster, signal_share), point_s(cluster, budget_share)
    cluster.send(BudgetTargetSet(budget_s, is_urgent=True))
    cluster.send(target(signal_s))
    cluster.send(target(signal_s, value=390.0))
    assert len(cluster.announced(event_pb2.SignalTargetSet)) == 1, (
        "another value with the same result is none"
    )
    cluster.iterate(6)
    slower_s, faster_s = max(signal_s, budget_s), min(signal_s, budget_s)
    assert all(faster_s < own_s <= slower_s for own_s in cluster.planned_times_s())
    basis = views.power(cluster.machine.run).basis
    assert basis is not None
    assert basis.own_time_s == signal_s, "a budget's slowdown is relative to the job's own policy"
    cluster.send(target(None))
    cluster.iterate(6)
    assert all(own_s <= budget_s for own_s in cluster.planned_times_s())


def test_a_new_rule_resets_the_target_new_terms_do_not_and_invalid_targets_are_refused() -> None:
    cluster = planned(policy=POLICY)
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
    for target_time_s in (math.nan, 0.0, math.inf):
        with pytest.raises(InvalidFieldError, match="target_time_s"):
            cluster.send(target(target_time_s))


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


# ---------------------------------------------------------------------- urgent offers


def hurry(cluster: Cluster) -> None:
    """Set slower plans, as urgent, while all ranks are in the middle of an iteration."""
    for rank in cluster.ranks.values():
        rank.begin()
    target_s = 1.2 * max(cluster.planned_times_s())
    commands = cluster.handle(BudgetTargetSet(target_s, is_urgent=True))
    assert {offer.is_urgent for offer in offers(commands).values()} == {True}
    cluster.carry_out(commands)


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


# ---------------------------------------------------------------------- the maximum clock


def holding() -> tuple[Cluster, HoldClocks]:
    """Return a cluster in which all ranks hold the first clocks to be measured."""
    cluster = cluster_in(JobState.PROFILING)
    while not isinstance(held := cluster.ranks[FIRST].in_force.clocks, HoldClocks):
        cluster.iterate()
    return cluster, held


def max_clocks(commands: list[Command]) -> dict[object, MaxClock | None]:
    return {command.rank: command.max_clock for command in commands if isinstance(command, SendMaxClock)}


def test_another_end_of_the_lease_is_sent_and_nothing_is_offered() -> None:
    cluster = cluster_in(JobState.BASELINE)
    cluster.send(MaxClockSet(1000))
    commands = cluster.handle(MaxClockSet(1000, outlasts_lease=True))
    assert max_clocks(commands) == dict.fromkeys(cluster.ranks, MaxClock(1000, outlasts_lease=True))
    assert len(commands) == 4


def test_a_job_tells_that_the_baseline_waits_until_it_is_lifted() -> None:
    cluster = cluster_in(JobState.BASELINE)
    cluster.send(MaxClockSet(1000))
    assert "once the maximum clock of 1000 MHz is lifted" in cluster.job().state_reason
    assert cluster.job().next_step == MAX_CLOCK_STEP
    cluster.send(MaxClockSet(None))
    assert cluster.job().state_reason == "the maximum clock no longer delays it"
    assert cluster.job().next_step == ""


def test_a_round_above_it_waits_and_is_held_once_it_is_lifted() -> None:
    cluster, held = holding()
    highest_mhz = max(held.clocks_mhz)
    measured = measured_clocks_mhz(cluster)

    cluster.send(MaxClockSet(highest_mhz - 1))
    assert all(rank.in_force.clocks == StockClocks(highest_mhz - 1) for rank in cluster.ranks.values())
    cluster.iterate(30)
    cluster.expect(JobState.PROFILING)
    assert measured_clocks_mhz(cluster) == measured

    cluster.send(MaxClockSet(None))
    cluster.iterate(3)
    assert cluster.ranks[FIRST].in_force.clocks == held
    cluster.iterate_until(JobState.PLANNED)


def test_a_round_below_it_continues() -> None:
    cluster, held = holding()
    commands = cluster.handle(MaxClockSet(max(held.clocks_mhz)))
    assert set(max_clocks(commands).values()) == {MaxClock(max(held.clocks_mhz))}
    assert not [command for command in commands if isinstance(command, SendOffer)]


def test_a_finished_job_keeps_it() -> None:
    cluster = planned()
    cluster.send(MaxClockSet(1000))
    cluster.send(FinishRequested())
    cluster.iterate(3)
    assert all(rank.in_force.clocks == StockClocks(1000) for rank in cluster.ranks.values())
    cluster.send(MaxClockSet(None))
    assert all(rank.in_force.clocks == STOCK for rank in cluster.ranks.values())


def test_a_quarantined_job_has_it_too() -> None:
    cluster = planned()
    cluster.send(MaxClockSet(1000))
    fault = Fault(FaultyPart.MACHINE, "a test")
    snapshot, commands = quarantine(cluster.stored(), fault, cluster.rules, EPOCH, START_S)
    refused = [command for command in commands if isinstance(command, RefuseRank)]
    assert [command.max_clock for command in refused] == [MaxClock(1000)] * 4

    assert snapshot.record.max_clock == MaxClock(1000)
    snapshot, commands = handle(snapshot, MaxClockSet(None), 0.0, 0.0)
    assert max_clocks(commands) == dict.fromkeys(cluster.ranks)
    assert snapshot.record.max_clock is None
