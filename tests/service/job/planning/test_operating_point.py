"""Target times, plans with computations without a clock, the exact plan for a target, and the set latency."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perseus.service.domain.commands import Announce, Command, DropSolve, Refine, SendOffer, Solve
from perseus.service.domain.inputs import BaselineRequested, Refined, RefineFailed
from perseus.service.domain.model import JobState, NoSlowdown, NoSlowdownBasis, PlannedClocks, Straggler
from perseus.service.domain.records import JobRecord
from perseus.service.domain.specification import Coordinates, Deadline, OperatingPolicy
from perseus.service.job.command_buffer import CommandBuffer
from perseus.service.job.iterations.baseline import MAX_WAIT_S
from perseus.service.job.planning.exact_plans import KEPT_PLANS, MIN_GAIN, ExactPlans
from perseus.service.job.planning.operating_point import (
    missed_policy,
    no_slowdown,
    planned_clocks,
    straggler_time_s,
    target_times_s,
)
from perseus.service.job.planning.set_latency import MIN_SETS, SETTLING_TIME_S, SetLatency
from perseus.solver import (
    Frontier,
    Kind,
    Measurement,
    Pipeline,
    Plan,
    Refinement,
    Variation,
    one_forward_one_backward,
    solve,
)
from perseus.v1 import event_pb2
from tests.service.frontiers import FRONTIER
from tests.service.job.clusters import PatientCluster, TruthfulCluster, straggler
from tests.service.service_fakes import Cluster, clock_statistics, make_spec


def test_a_plan_has_the_fixed_computations_in_their_places_without_a_clock() -> None:
    target_s = 1.1 * FRONTIER.t_min_s
    plan = planned_clocks(FRONTIER.plan_within(target_s), FRONTIER, target_s, at_stock=()).plan
    for order, stage in zip(FRONTIER.pipeline.schedule.orders, plan.stages, strict=True):
        assert tuple(planned.computation for planned in stage) == order
        for planned in stage:
            assert (planned.clock_mhz == 0) == (planned.computation.kind is Kind.FIXED)
        for before, after in pairwise(stage):
            assert after.start_s >= before.start_s + before.duration_s - 1e-9
    ends_s = [stage[-1].start_s + stage[-1].duration_s for stage in plan.stages]
    assert abs(max(ends_s) - plan.iteration_time_s) < 1e-9


@given(
    percent=st.floats(0, 100),
    stragglers=st.dictionaries(st.integers(0, 4), st.floats(1, 10), max_size=5),
)
def test_targets_follow_the_policy_and_the_slowest_straggler(
    percent: float, stragglers: dict[int, float]
) -> None:
    times_s = {
        p: straggler_time_s(Straggler(p, None, f), FRONTIER, 0.0, FRONTIER.t_min_s)
        for p, f in stragglers.items()
    }
    targets_s = target_times_s(FRONTIER, OperatingPolicy(percent), 0.0, times_s, 5)
    own_s = min(FRONTIER.t_min_s * (1 + percent / 100), FRONTIER.t_star_s)
    for pipeline, target_s in enumerate(targets_s):
        assert target_s >= FRONTIER.t_min_s
        if pipeline in stragglers or not stragglers:
            assert target_s == own_s
        else:
            assert target_s == max(own_s, min(FRONTIER.t_slow_s, max(times_s.values())))


@given(st.floats(0.01, 10), st.floats(0, 10))
def test_seconds_are_put_on_the_frontiers_scale(measured_s: float, baseline_s: float) -> None:
    """What the baseline takes longer than it is predicted is overhead."""
    time_s = straggler_time_s(Straggler(0, measured_s), FRONTIER, baseline_s, FRONTIER.t_min_s)
    overhead_s = max(0.0, baseline_s - FRONTIER.baseline.iteration_time_s)
    assert time_s == pytest.approx(max(FRONTIER.t_min_s, measured_s - overhead_s))


def own_time_s(policy: OperatingPolicy, baseline_time_s: float = 0.0) -> float:
    (time_s,) = target_times_s(FRONTIER, policy, baseline_time_s, {}, 1)
    return time_s


def test_a_deadline_sets_the_target_of_whole_iterations() -> None:
    overhead_s = 0.1
    baseline_s = FRONTIER.baseline.iteration_time_s + overhead_s
    middle_s = (FRONTIER.t_min_s + FRONTIER.t_star_s) / 2
    assert FRONTIER.t_min_s < middle_s < FRONTIER.t_star_s
    deadline = Deadline(50, 50 * (middle_s + overhead_s))
    assert own_time_s(OperatingPolicy(deadline=deadline), baseline_s) == pytest.approx(middle_s)
    assert own_time_s(OperatingPolicy(deadline=Deadline(50, 1e-3)), baseline_s) == FRONTIER.t_min_s
    assert own_time_s(OperatingPolicy(deadline=Deadline(1, 1e6)), baseline_s) == FRONTIER.t_star_s


@given(st.floats(1, 1000))
def test_a_power_limit_gives_the_shortest_iteration_time_that_keeps_it(cap_w: float) -> None:
    planned_s = own_time_s(OperatingPolicy(max_average_power_w=cap_w))
    powers_w = {point.iteration_time_s: point.energy_j / point.iteration_time_s for point in FRONTIER.points}
    keeping_s = [time_s for time_s, power_w in powers_w.items() if power_w <= cap_w]
    assert planned_s == (min(keeping_s) if keeping_s else FRONTIER.points[-1].iteration_time_s)


@pytest.fixture(scope="module")
def slow_at_the_top() -> Frontier:
    """Return a frontier whose stage 1 is heavier, and slightly slower at its highest clock."""
    profiles = {
        (stage, 0, kind): tuple(
            Measurement(mhz, time_s * weight * work, energy_j * weight * work)
            for mhz, time_s, energy_j in (
                (1410, 0.1005, 42.0),
                (1395, 0.1000, 40.0),
                (1200, 0.112, 34.0),
                (1000, 0.130, 31.0),
            )
        )
        for stage, weight in ((0, 1.0), (1, 1.3))
        for kind, work in ((Kind.FORWARD, 1.0), (Kind.BACKWARD, 2.0))
    }
    return solve(Pipeline(one_forward_one_backward(2, 6), profiles, (50.0, 50.0)), point_count=12)


def test_no_slowdown_is_relative_to_stock_not_to_t_min(slow_at_the_top: Frontier) -> None:
    stock_s = slow_at_the_top.baseline.iteration_time_s
    assert stock_s == pytest.approx(1.005 * slow_at_the_top.t_min_s)
    assert no_slowdown(slow_at_the_top, 0.0) == NoSlowdown(stock_s, NoSlowdownBasis.ALL_MAX)
    (own_s,) = target_times_s(slow_at_the_top, OperatingPolicy(), 0.0, {}, 1)
    assert own_s == min(stock_s, slow_at_the_top.t_star_s)
    saved_j = slow_at_the_top.plan_within(slow_at_the_top.t_min_s).energy_j
    assert slow_at_the_top.plan_within(own_s).energy_j < saved_j


def test_a_measured_baseline_only_lowers_the_time_without_slowdown(
    slow_at_the_top: Frontier,
) -> None:
    stock_s, t_min_s = slow_at_the_top.baseline.iteration_time_s, slow_at_the_top.t_min_s
    between_s = (stock_s + t_min_s) / 2
    assert no_slowdown(slow_at_the_top, between_s) == NoSlowdown(between_s, NoSlowdownBasis.BASELINE)
    assert no_slowdown(slow_at_the_top, 0.5 * t_min_s) == NoSlowdown(t_min_s, NoSlowdownBasis.BASELINE)
    assert no_slowdown(slow_at_the_top, 2 * stock_s) == NoSlowdown(stock_s, NoSlowdownBasis.ALL_MAX)


def test_a_deadline_that_no_plan_meets_is_missed() -> None:
    stock_s = FRONTIER.baseline.iteration_time_s + 0.5
    shortest_s = FRONTIER.t_min_s + 0.5
    kept, missed = (OperatingPolicy(deadline=Deadline(10, 10 * share * shortest_s)) for share in (1.0, 0.9))
    assert missed_policy(FRONTIER, kept, stock_s) == ""
    text = missed_policy(FRONTIER, missed, stock_s)
    assert f"{0.9 * shortest_s:.3f} s an iteration" in text
    assert text.endswith(f"the fastest plan takes {shortest_s:.3f} s")


def test_a_power_that_no_plan_keeps_is_missed() -> None:
    least_w = min(point.energy_j / point.iteration_time_s for point in FRONTIER.points)
    assert missed_policy(FRONTIER, OperatingPolicy(max_average_power_w=least_w), 0.0) == ""
    text = missed_policy(FRONTIER, OperatingPolicy(max_average_power_w=0.5 * least_w), 0.0)
    assert text.endswith(f"the plan of least power draws {least_w:.0f} W")
    assert missed_policy(FRONTIER, OperatingPolicy(5.0), 0.0) == ""


# ---------------------------------------------------------------------- the plan for exactly the target


MIDDLE_S = 1.07 * FRONTIER.t_min_s


def exact_plans() -> tuple[ExactPlans, CommandBuffer]:
    buffer = CommandBuffer(1)
    buffer.begin(0.0, 0.0)
    return ExactPlans(buffer), buffer


def wanted(commands: list[Command]) -> list[Refinement]:
    return [command.refinement for command in commands if isinstance(command, Refine)]


def cheaper(iteration_time_s: float, by_share: float) -> Plan:
    """Return the point's plan with so much less energy."""
    plan = FRONTIER.plan_within(iteration_time_s)
    saved_j = by_share * plan.energy_until_j(iteration_time_s)
    return replace(plan, effective_energy_j=plan.effective_energy_j - saved_j)


def test_the_point_is_offered_until_the_plan_is_made() -> None:
    plans, buffer = exact_plans()
    point = FRONTIER.plan_within(MIDDLE_S)
    plans.want(FRONTIER, [MIDDLE_S])
    (refinement,) = wanted(buffer.take())
    assert plans.plan_within(FRONTIER, MIDDLE_S) == point
    exact = cheaper(MIDDLE_S, 2 * MIN_GAIN)
    assert plans.take(FRONTIER, refinement, exact)
    assert plans.plan_within(FRONTIER, MIDDLE_S) is exact
    assert plans.plan_within(FRONTIER, 1.001 * MIDDLE_S) is exact
    assert plans.plan_within(FRONTIER, FRONTIER.t_min_s) == FRONTIER.plan_within(FRONTIER.t_min_s)
    plans.want(FRONTIER, [MIDDLE_S])
    assert not buffer.take()


def test_a_plan_that_saves_too_little_changes_nothing_and_is_not_made_again() -> None:
    plans, buffer = exact_plans()
    plans.want(FRONTIER, [MIDDLE_S])
    (refinement,) = wanted(buffer.take())
    assert plans.take(FRONTIER, refinement, cheaper(MIDDLE_S, MIN_GAIN / 2))
    assert plans.plan_within(FRONTIER, MIDDLE_S) == FRONTIER.plan_within(MIDDLE_S)
    plans.want(FRONTIER, [MIDDLE_S])
    assert not buffer.take()


def test_where_computations_vary_points_are_too_slow_and_every_plan_is_made() -> None:
    plans, buffer = exact_plans()
    assert plans.vary(Variation(np.ones((1, 1, 1), np.float32)))
    t_min_s = FRONTIER.t_min_s
    plans.want(FRONTIER, [t_min_s])
    (refinement,) = wanted(buffer.take())
    assert plans.plan_within(FRONTIER, t_min_s) == FRONTIER.plan_within(t_min_s), "until it is made"
    made = cheaper(t_min_s, -0.1)
    assert plans.take(FRONTIER, refinement, made)
    assert plans.plan_within(FRONTIER, t_min_s) is made, "although it is dearer"
    assert plans.plan_within(FRONTIER, 1.001 * t_min_s) is made, "not the point there"
    point = plans.plan_within(FRONTIER, MIDDLE_S)
    assert point == FRONTIER.plan_within(MIDDLE_S), (
        "of which it is known by how much it is too slow: not at all"
    )
    later = replace(made, iteration_time_s=MIDDLE_S)  # as the mean of iterations that vary
    plans.hold(later)
    assert plans.plan_within(FRONTIER, MIDDLE_S) == point, "what is made counts more than what is held"


def test_a_plan_for_computations_that_vary_is_held_until_there_is_another() -> None:
    plans, buffer = exact_plans()
    earlier = cheaper(MIDDLE_S, -0.1)
    plans.hold(earlier)
    plans.want(FRONTIER, [MIDDLE_S])
    assert not buffer.take()
    assert plans.plan_within(FRONTIER, MIDDLE_S) is earlier
    assert plans.plan_within(FRONTIER, FRONTIER.t_min_s) == FRONTIER.plan_within(FRONTIER.t_min_s)
    assert plans.vary(Variation(np.ones((1, 1, 1), np.float32)))
    plans.want(FRONTIER, [MIDDLE_S])
    (refinement,) = wanted(buffer.take())
    assert plans.plan_within(FRONTIER, MIDDLE_S) is earlier
    plans.take(FRONTIER, refinement, made := cheaper(MIDDLE_S, -0.2))
    assert plans.plan_within(FRONTIER, MIDDLE_S) is made
    assert plans.vary(None)
    assert plans.plan_within(FRONTIER, MIDDLE_S) is not earlier
    assert not plans.vary(None)


def test_an_unwanted_plan_makes_way_and_its_answer_is_ignored() -> None:
    plans, buffer = exact_plans()
    plans.want(FRONTIER, [MIDDLE_S])
    (older,) = wanted(buffer.take())
    plans.want(FRONTIER, [1.01 * MIDDLE_S])
    drop, refine = buffer.take()
    assert isinstance(drop, DropSolve)
    assert isinstance(refine, Refine)
    assert not plans.take(FRONTIER, older, cheaper(MIDDLE_S, 0.1))
    assert plans.plan_within(FRONTIER, MIDDLE_S) == FRONTIER.plan_within(MIDDLE_S)


def test_exact_points_are_not_made_again() -> None:
    plans, buffer = exact_plans()
    plans.want(FRONTIER, [FRONTIER.t_min_s, FRONTIER.baseline.iteration_time_s, 99.0])
    assert not buffer.take()


def test_a_bounded_number_is_kept() -> None:
    plans, buffer = exact_plans()
    times_s = [MIDDLE_S * (1 + k / 1000) for k in range(KEPT_PLANS + 1)]
    for time_s in times_s:
        plans.want(FRONTIER, [time_s])
        (refinement,) = wanted(buffer.take())
        plans.take(FRONTIER, refinement, None)
    plans.want(FRONTIER, times_s[1:])
    assert not buffer.take()
    plans.want(FRONTIER, times_s[:1])
    assert len(wanted(buffer.take())) == 1


@pytest.fixture
def cluster() -> PatientCluster:
    """A cluster whose exact plans wait until the test makes them."""
    cluster = PatientCluster(make_spec())
    cluster.join_all()
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(3)
    cluster.waiting = []
    return cluster


def offered(commands: list[Command]) -> set[int]:
    return {command.rank.pipeline for command in commands if isinstance(command, SendOffer)}


def planned_j(cluster: Cluster, pipeline: int) -> float:
    clocks = cluster.machine.run.offers[pipeline].clocks
    assert isinstance(clocks, PlannedClocks)
    return clocks.plan.effective_energy_j


def test_a_plan_that_can_not_be_made_leaves_the_point_in_force(cluster: PatientCluster) -> None:
    cluster.send(straggler(1.0731))
    before_j = planned_j(cluster, 1)
    (refinement,) = cluster.refinements()
    commands = cluster.handle(RefineFailed(refinement, "made up"))
    assert offered(commands) == set()
    assert wanted(commands) == []
    assert planned_j(cluster, 1) == before_j
    cluster.expect(JobState.PLANNED)
    assert any(
        isinstance(command, Announce) and command.event.type == event_pb2.JOB_EVENT_TYPE_SOLVE_FAILED
        for command in commands
    )
    cluster.send(RefineFailed(refinement, "again"))
    assert len(cluster.refinements()) == 1


def test_a_plan_that_comes_while_the_baseline_is_measured_waits_for_its_end(
    cluster: PatientCluster,
) -> None:
    cluster.send(straggler(1.0731))
    (refinement,) = cluster.refinements()
    cluster.send(BaselineRequested("once"))
    cluster.expect(JobState.BASELINE)
    commands = cluster.handle(Refined(refinement, refinement.plan()))
    assert offered(commands) == set()
    cluster.carry_out(commands)
    cluster.iterate(3)
    cluster.expect(JobState.BASELINE)
    cluster.now_s += MAX_WAIT_S  # the straggler lasts
    cluster.iterate_until(JobState.PLANNED)
    assert len(cluster.refinements()) == 1


def test_one_problem_at_a_time(cluster: PatientCluster) -> None:
    """Drift that requests another frontier drops the plan that is being made."""
    cluster.send(straggler(1.0731))
    assert len(cluster.refinements()) == 1
    cluster.machine.run.planner.solve()
    cluster.machine.run.planner.retarget()
    commands = cluster.machine.run.buffer.take()
    assert [type(command) for command in commands if isinstance(command, DropSolve | Solve | Refine)] == [
        DropSolve,
        Solve,
    ]


# ---------------------------------------------------------------------- the set latency


RANKS = [Coordinates(0, stage, 0) for stage in range(4)]


def reported(*latencies_s: float, planned_s: float = 0.0) -> SetLatency:
    latency = SetLatency(JobRecord(OperatingPolicy(), set_latency_s=planned_s), len(RANKS))
    for rank, latency_s in zip(RANKS, latencies_s, strict=False):
        latency.take(rank, clock_statistics(1, latency_s))
    latency.validate()
    return latency


def test_the_largest_counts_as_soon_as_all_have_reported() -> None:
    latency = reported(0.010, 0.018, 0.012)
    latency.follow(0.0)
    assert latency.planned_s == 0.0, "one is missing"
    latency.take(RANKS[3], clock_statistics(1, 0.011))
    latency.follow(1.0)
    assert latency.planned_s == 0.018


def test_if_some_never_report_the_others_count_after_a_while_or_for_the_first_plans() -> None:
    latency = reported(0.010, 0.018)
    latency.follow(0.0)
    latency.follow(SETTLING_TIME_S)
    assert latency.planned_s == 0.018
    latency = reported(0.010)
    latency.adopt_changes()
    assert latency.planned_s == 0.010


def test_a_latency_of_too_few_sets_does_not_count() -> None:
    latency = SetLatency(JobRecord(OperatingPolicy()), 1)
    latency.take(RANKS[0], clock_statistics(1, 0.020, MIN_SETS - 1))
    latency.adopt_changes()
    assert latency.planned_s == 0.0
    latency.take(RANKS[0], clock_statistics(1, 0.0201, MIN_SETS))
    latency.adopt_changes()
    assert latency.planned_s == 0.021, "rounded up to the millisecond"


def test_a_change_that_is_small_or_does_not_last_changes_nothing() -> None:
    latency = reported(0.020, 0.020, 0.020, 0.020, planned_s=0.020)
    for now_s, latency_s in enumerate([0.021, 0.025, 0.019, 0.014, 0.040, 0.020], start=1):
        for rank in RANKS:
            latency.take(rank, clock_statistics(1, latency_s))
        latency.follow(SETTLING_TIME_S * now_s)
        assert latency.planned_s == 0.020
        latency.validate()


def test_a_larger_latency_of_one_rank_counts_once_it_lasts() -> None:
    latency = reported(0.020, 0.020, 0.020, 0.030, planned_s=0.020)
    latency.follow(0.0)
    latency.follow(SETTLING_TIME_S - 0.1)
    assert latency.planned_s == 0.020
    latency.follow(SETTLING_TIME_S)
    assert latency.planned_s == 0.030


def test_a_smaller_latency_counts_only_if_all_have_reported() -> None:
    latency = reported(0.010, 0.010, 0.010, planned_s=0.020)
    latency.follow(0.0)
    latency.follow(10 * SETTLING_TIME_S)
    assert latency.planned_s == 0.020, "the fourth may be the slow one"
    latency.take(RANKS[3], clock_statistics(1, 0.010))
    latency.follow(11 * SETTLING_TIME_S)
    latency.follow(12 * SETTLING_TIME_S)
    assert latency.planned_s == 0.010


@given(st.lists(st.tuples(st.sampled_from(RANKS), st.floats(1e-4, 10.0), st.booleans())))
@example([(RANKS[0], 0.050, False), (RANKS[0], 0.050, True)])
def test_the_largest_is_that_of_the_ranks_that_are_there(
    steps: list[tuple[Coordinates, float, bool]],
) -> None:
    latency, own_s = SetLatency(JobRecord(OperatingPolicy()), len(RANKS)), dict[Coordinates, float]()
    for rank, latency_s, is_gone in steps:
        if is_gone:
            latency.forget([rank])
            own_s.pop(rank, None)
        else:
            latency.take(rank, clock_statistics(1, latency_s))
            own_s[rank] = latency_s
        latency.validate()
        largest_s = max(own_s.values(), default=0.0)
        assert largest_s - 1e-12 <= latency.largest_s <= largest_s + 0.0010001


# ---------------------------------------------------------------------- in the machine


def solves(cluster: TruthfulCluster) -> list[float]:
    """Return the latencies that problems were solved with."""
    return [command.set_latency_s for command in cluster.history if isinstance(command, Solve)]


def let_all_report(cluster: TruthfulCluster, latency_s: float) -> None:
    for rank in cluster.ranks.values():
        rank.set_latency_s = latency_s


def test_a_latency_that_is_reported_under_plans_renews_them() -> None:
    cluster = TruthfulCluster().plan()
    cluster.run(2)
    let_all_report(cluster, 0.050)
    cluster.run(3)
    assert solves(cluster) == [0.0, 0.050]
    cluster.expect(JobState.PLANNED)
    assert cluster.announced(event_pb2.PredictionViolated) == []


def test_a_restart_keeps_the_latency() -> None:
    cluster = TruthfulCluster()
    let_all_report(cluster, 0.060)
    cluster.plan()
    let_all_report(cluster, 0.0)
    cluster.restart()
    assert cluster.job().set_latency_s == 0.060
    assert solves(cluster) == [0.060, 0.060]
