"""The plan for exactly the target iteration time: offered once it is made, if it pays, and kept."""

from dataclasses import replace

import pytest

from perseus.service.domain.commands import Announce, Command, DropSolve, Refine, SendOffer, Solve
from perseus.service.domain.inputs import BaselineRequested, Refined, RefineFailed
from perseus.service.domain.model import JobState, PlannedClocks
from perseus.service.job.command_buffer import CommandBuffer
from perseus.service.job.iterations.baseline import MAX_WAIT_S
from perseus.service.job.planning.exact_plans import KEPT_PLANS, MIN_GAIN, ExactPlans
from perseus.solver import Plan, Refinement
from perseus.v1 import event_pb2
from tests.service.frontiers import FRONTIER
from tests.service.job.emulated_cluster import PatientCluster
from tests.service.job.machine_bench import straggler
from tests.service.service_fakes import Cluster, make_spec

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
    commands = cluster.machine.run.buffer.take()
    assert [type(command) for command in commands if isinstance(command, DropSolve | Solve)] == [
        DropSolve,
        Solve,
    ]
