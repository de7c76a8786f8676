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
from perseus.service.domain.inputs import FinishRequested, LagNotFound, ResumeRequested, SolveFailed
from perseus.service.domain.model import STOCK, Clocks, JobState, PlannedClocks
from perseus.service.domain.stall import StockReason, next_step
from perseus.service.job import views
from perseus.service.job.planning.drift import BLOCK
from perseus.service.job.planning.plan_watch import MAX_PREDICTION_VIOLATIONS
from perseus.solver import common_lag_s, replay, with_lag
from perseus.v1 import event_pb2
from tests.service.job.truthful_cluster import TruthfulCluster
from tests.service.service_fakes import solved

LAG_S = 0.006


class WaitingCluster(TruthfulCluster):
    """A cluster whose problems wait to be solved from the first plan on."""

    def __init__(self, lag_s: float = LAG_S) -> None:
        super().__init__(lag_s=lag_s)
        self.problems: list[Solve] | None = None
        self.first_plans: list[Clocks] = []

    def carry_out(self, commands: Iterable[Command]) -> None:
        rest = list(commands)
        if self.problems is not None:
            self.problems += [command for command in rest if isinstance(command, Solve)]
            rest = [command for command in rest if not isinstance(command, Solve)]
        super().carry_out(rest)

    def violate_prediction(self) -> list[Command]:
        """Iterate until the first plan has violated its prediction; return the resulting commands."""
        self.plan()
        self.first_plans = [offer.clocks for offer in self.machine.run.offers]
        self.problems = []
        while self.machine.record.state is JobState.PLANNED:
            before = len(self.history)
            self.run(1)
        found = self.history[before:]
        return found[
            next(n for n, c in enumerate(found) if _is(c, event_pb2.JOB_EVENT_TYPE_PREDICTION_VIOLATED)) :
        ]


def _is(command: Command, kind: event_pb2.JobEventType.ValueType) -> bool:
    return isinstance(command, Announce) and command.event.type is kind


def kinds(commands: Iterable[Command]) -> list[type | event_pb2.JobEventType.ValueType]:
    """Return the kinds of the commands, without records and iterations."""
    return [
        command.event.type if isinstance(command, Announce) else type(command)
        for command in commands
        if not isinstance(command, Store | ReportIteration)
    ]


def test_if_the_profile_is_right_the_plan_is_withdrawn_and_the_next_has_to_explain_it() -> None:
    cluster = WaitingCluster()
    commands = cluster.violate_prediction()
    cluster.expect(JobState.SOLVING)
    assert kinds(commands) == [
        event_pb2.JOB_EVENT_TYPE_PREDICTION_VIOLATED,
        event_pb2.JOB_EVENT_TYPE_STATE_CHANGED,
        Solve,
        *[event_pb2.JOB_EVENT_TYPE_PLAN_OFFERED, SendOffer, SendOffer] * 2,
    ]
    (violation,) = cluster.announced(event_pb2.PredictionViolated)
    (command,) = (command for command in commands if isinstance(command, Solve))
    first = cluster.first_plans[0]
    assert isinstance(first, PlannedClocks)
    assert command.slow == SlowPlan(first.plan, violation.median_time_s, violation.baseline_time_s)
    assert command.problem == with_lag(command.problem, 0.0)
    assert {c.offer.clocks for c in commands if isinstance(c, SendOffer)} == {STOCK}


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
    cluster = WaitingCluster()
    cluster.violate_prediction()
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
    cluster = WaitingCluster()
    cluster.violate_prediction()
    cluster.send(FinishRequested())
    assert kinds(cluster.handle(LagNotFound(UNEXPLAINED))) == []
    cluster.expect(JobState.FINISHED)


def test_if_solving_fails_the_job_ends_at_stock() -> None:
    cluster = WaitingCluster()
    cluster.violate_prediction()
    commands = cluster.handle(SolveFailed("it takes longer than 1 s"))
    assert kinds(commands) == [event_pb2.JOB_EVENT_TYPE_SOLVE_FAILED, event_pb2.JOB_EVENT_TYPE_STATE_CHANGED]
    cluster.expect(JobState.STOCK)


def test_longer_lags_are_found_until_predictions_have_been_violated_too_often() -> None:
    cluster = TruthfulCluster(lag_s=LAG_S).plan()
    cluster.run(BLOCK)
    for lag_s in (0.010, 0.013):
        cluster.expect(JobState.PLANNED)
        cluster.lag_s = lag_s
        cluster.run(BLOCK)
    cluster.expect(JobState.STOCK)
    lags_s = [found.transfer_lag_s for found in cluster.announced(event_pb2.Solved)]
    assert lags_s == sorted(lags_s)
    assert len(cluster.announced(event_pb2.PredictionViolated)) == MAX_PREDICTION_VIOLATIONS + 1
    assert len(lags_s) == MAX_PREDICTION_VIOLATIONS + 1
    assert cluster.announced(event_pb2.StateChanged)[-1].reason == (
        "predictions were violated 3 times; it is tried again after 30 min at stock"
    )


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
    cluster = WaitingCluster()
    cluster.violate_prediction()
    assert cluster.problems is not None
    commands = cluster.handle(solved(cluster.problems.pop()))
    assert kinds(commands) == [
        event_pb2.JOB_EVENT_TYPE_SOLVED,
        event_pb2.JOB_EVENT_TYPE_STATE_CHANGED,
        *[event_pb2.JOB_EVENT_TYPE_PLAN_OFFERED, SendOffer, SendOffer] * 2,
    ]
    cluster.carry_out(commands)
    cluster.run(BLOCK)
    cluster.slowness = lambda _stage, _mhz: 0.9
    cluster.run(2 * BLOCK)
    (later,) = cluster.problems
    assert later.slow is None
    assert common_lag_s(later.problem) == pytest.approx(LAG_S, rel=0.01)
