"""Transfers between stages that make a plan slower than predicted: found, planned for, and remembered."""

from collections.abc import Iterable

import pytest

from perseus.service.domain.commands import (
    Announce,
    Command,
    ReportIteration,
    SendOffer,
    SlowPlan,
    Solve,
    Store,
)
from perseus.service.domain.inputs import FinishRequested, LagNotFound, ResumeRequested
from perseus.service.domain.model import STOCK, JobState, PlannedClocks
from perseus.service.domain.stall import StockReason, next_step
from perseus.service.job import views
from perseus.service.job.planning.drift import BLOCK
from perseus.solver import common_lag_s, replay, with_lag
from perseus.v1 import event_pb2
from tests.service.job.truthful_cluster import TruthfulCluster
from tests.service.service_fakes import solved

LAG_S = 0.006


class ViolatedCluster(TruthfulCluster):
    """A cluster whose first plan has violated its prediction, for which the `answer` has been given."""

    def __init__(self) -> None:
        super().__init__(lag_s=LAG_S)
        self.plan()
        self.first_plan, self.waiting = self.machine.run.offers[0].clocks, []
        while self.machine.record.state is JobState.PLANNED:
            before = len(self.history)
            self.run(1)
        commands = self.history[before:]
        (violated,) = (
            index
            for index, command in enumerate(commands)
            if isinstance(command, Announce) and command.event.HasField("prediction_violated")
        )
        self.answer = commands[violated:]


def kinds(commands: Iterable[Command]) -> list[type | event_pb2.JobEventType.ValueType]:
    """Return the kinds of the commands, without records and iterations."""
    return [
        command.event.type if isinstance(command, Announce) else type(command)
        for command in commands
        if not isinstance(command, Store | ReportIteration)
    ]


def test_if_the_profile_is_right_the_plan_is_withdrawn_and_the_next_has_to_explain_it() -> None:
    cluster = ViolatedCluster()
    cluster.expect(JobState.SOLVING)
    assert kinds(cluster.answer) == [
        event_pb2.JOB_EVENT_TYPE_PREDICTION_VIOLATED,
        event_pb2.JOB_EVENT_TYPE_STATE_CHANGED,
        Solve,
        *[event_pb2.JOB_EVENT_TYPE_PLAN_OFFERED, SendOffer, SendOffer] * 2,
    ]
    (violation,) = cluster.announced(event_pb2.PredictionViolated)
    (command,) = (command for command in cluster.answer if isinstance(command, Solve))
    assert isinstance(cluster.first_plan, PlannedClocks)
    assert command.slow == SlowPlan(
        cluster.first_plan.plan, violation.median_time_s, violation.baseline_time_s
    )
    assert command.problem == with_lag(command.problem, 0.0)
    assert {c.offer.clocks for c in cluster.answer if isinstance(c, SendOffer)} == {STOCK}


def test_a_plan_with_time_for_transfers_keeps_its_prediction_and_saves() -> None:
    cluster = TruthfulCluster(lag_s=LAG_S).plan()
    cluster.run(BLOCK)
    (violation,) = cluster.announced(event_pb2.PredictionViolated)
    before, after = cluster.announced(event_pb2.Solved)
    assert before.transfer_lag_s == 0
    assert after.transfer_lag_s == pytest.approx(LAG_S, rel=0.01)
    cluster.run(3 * BLOCK)
    cluster.expect(JobState.PLANNED)
    assert len(cluster.announced(event_pb2.PredictionViolated)) == 1
    baseline_s = violation.baseline_time_s
    assert violation.median_time_s > 1.01 * baseline_s
    last = cluster.machine.run.log.periods[-1]
    assert last.iteration_time_s <= 1.001 * baseline_s
    frontier = views.solved_frontier(cluster.machine.run)
    real = with_lag(frontier.pipeline, LAG_S)
    (clocks,) = {offer.clocks for offer in cluster.machine.run.offers}
    assert isinstance(clocks, PlannedClocks)
    planned, stock = replay(real, clocks.plan.clocks_mhz), replay(real, frontier.baseline.clocks_mhz)
    assert planned.iteration_time_s <= stock.iteration_time_s
    assert planned.energy_j < 0.95 * stock.energy_j


UNEXPLAINED = event_pb2.MeasurementsUnexplained(
    median_time_s=1.5,
    baseline_time_s=1.3,
    predicted_time_s=1.31,
    predicted_baseline_time_s=1.3,
    residual_s=0.19,
)


def test_a_slow_plan_that_no_lag_explains_is_announced_and_ends_at_stock() -> None:
    cluster = ViolatedCluster()
    commands = cluster.handle(LagNotFound(UNEXPLAINED))
    assert kinds(commands) == [
        event_pb2.JOB_EVENT_TYPE_MEASUREMENTS_UNEXPLAINED,
        event_pb2.JOB_EVENT_TYPE_STATE_CHANGED,
    ]
    reported, changed = (command.event for command in commands if isinstance(command, Announce))
    assert reported.measurements_unexplained == UNEXPLAINED
    assert reported.message == (
        "the plan's iterations take 0.200000 s more than stock's, of which the model explains 0.010000 s; "
        "no transfer time explains the remaining 0.190000 s"
    )
    assert "the model does not explain why the plan is slow" in changed.message
    cluster.expect(JobState.STOCK)
    for _ in range(2):
        assert cluster.job().next_step == next_step(StockReason.UNEXPLAINED, "job")
        cluster.restart()
    cluster.join_all()
    cluster.send(ResumeRequested())
    assert cluster.job().next_step == ""


def test_an_unexplained_plan_that_is_obsolete_is_not_announced() -> None:
    cluster = ViolatedCluster()
    cluster.send(FinishRequested())
    assert kinds(cluster.handle(LagNotFound(UNEXPLAINED))) == []
    cluster.expect(JobState.FINISHED)


def test_a_restarted_coordinator_knows_the_lag_and_makes_the_same_plans() -> None:
    cluster = TruthfulCluster(lag_s=LAG_S).plan()
    cluster.run(BLOCK)
    record = cluster.stored().record
    assert record is not None
    assert record.lag_s == pytest.approx(LAG_S, rel=0.01)
    before, versions = views.solved_frontier(cluster.machine.run), list(cluster.offered_versions)
    cluster.restart()
    cluster.join_all()
    cluster.run(BLOCK)
    assert views.solved_frontier(cluster.machine.run).pipeline == before.pipeline
    assert views.solved_frontier(cluster.machine.run).points == before.points
    assert cluster.offered_versions == versions


def test_a_frontier_that_explains_a_slow_plan_is_used() -> None:
    cluster = ViolatedCluster()
    commands = cluster.handle(solved(cluster.problems()[0]))
    assert kinds(commands) == [
        event_pb2.JOB_EVENT_TYPE_SOLVED,
        event_pb2.JOB_EVENT_TYPE_STATE_CHANGED,
        *[event_pb2.JOB_EVENT_TYPE_PLAN_OFFERED, SendOffer, SendOffer] * 2,
    ]
    cluster.carry_out(commands)
    cluster.run(BLOCK)
    cluster.slowness = lambda _stage, _mhz: 0.9
    cluster.run(2 * BLOCK)
    later = cluster.problems()[-1]
    assert len(cluster.problems()) == 2
    assert later.slow is None
    assert common_lag_s(later.problem) == pytest.approx(LAG_S, rel=0.01)
