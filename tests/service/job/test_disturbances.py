"""What a passing disturbance leaves behind: no wrong baseline, and no job that stays at stock."""

from collections.abc import Callable

import pytest

from perseus.service.domain.commands import Store
from perseus.service.domain.inputs import AgentLeft, BaselineRequested, ResumeRequested, StragglerCleared
from perseus.service.domain.messages import NUMBERS
from perseus.service.domain.model import JobState
from perseus.service.domain.records import JobRecord
from perseus.service.domain.stall import UNATTENDED_FALL_BACKS, StockReason, needs_person, next_step
from perseus.service.job.iterations.baseline import MAX_WAIT_S
from perseus.service.job.iterations.iteration_log import report
from perseus.service.job.planning import plan_watch
from perseus.service.job.planning.plan_watch import MAX_SUSPECTED
from perseus.service.job.retry_delay import INITIAL_DELAY_S, RetryDelay
from perseus.service.job.stragglers.registry import StragglerRegistry
from perseus.v1 import event_pb2
from tests.service.job.clusters import TimedCluster, TruthfulCluster, straggler
from tests.service.service_fakes import CLOCKS_MHZ, Cluster, make_spec

BLOCK = 40


def baseline_s(cluster: Cluster) -> float:
    found = cluster.machine.run.baseline.iteration
    assert found is not None
    return found.time_s


# ---------------------------------------------------------------------- while the baseline is measured


def slow(cluster: TimedCluster) -> None:
    cluster.slowdowns[0] = 1.45


def report_straggler(cluster: TimedCluster) -> None:
    slow(cluster)
    cluster.send(straggler(1.45))


def heat(cluster: TimedCluster) -> None:
    slow(cluster)
    cluster.clock_event_reasons[0] = 0x20


def end(cluster: TimedCluster) -> None:
    cluster.slowdowns[0], cluster.clock_event_reasons[0] = 1.0, 0
    cluster.send(StragglerCleared(0))


def heated() -> TimedCluster:
    """Return a cluster whose baseline waits."""
    cluster = TimedCluster(make_spec(pipelines=4))
    cluster.join_all()
    heat(cluster)
    return cluster


@pytest.mark.parametrize(
    ("pipeline_count", "disturb"),
    [(4, report_straggler), (4, heat), (4, slow), (1, report_straggler), (1, heat)],
)
def test_the_baseline_waits_until_a_disturbance_has_passed(
    pipeline_count: int, disturb: Callable[[TimedCluster], None]
) -> None:
    cluster = TimedCluster(make_spec(pipelines=pipeline_count))
    cluster.run_to_plan()
    undisturbed_s = baseline_s(cluster)
    cluster.run(BLOCK)  # until the noise is known
    disturb(cluster)
    cluster.send(BaselineRequested("again"))
    cluster.run(BLOCK)
    cluster.expect(JobState.BASELINE)
    assert "once this has passed: pipeline 0 is slow" in cluster.job().state_reason
    end(cluster)
    cluster.run_until(JobState.PLANNED)
    assert baseline_s(cluster) == pytest.approx(undisturbed_s, rel=0.05)
    period = cluster.machine.run.log.latest_baseline
    assert period is not None
    assert not period.is_wrong
    assert period.iteration_time_s == pytest.approx(undisturbed_s, rel=0.05), "disturbed ones do not count"


@pytest.mark.parametrize("interruption", ["none", "a restart", "a lost agent"])
def test_a_disturbance_that_lasts_belongs_to_the_job_and_nothing_prolongs_the_wait(
    interruption: str,
) -> None:
    cluster = heated()
    for _ in range(2):
        cluster.run(BLOCK)
        cluster.expect(JobState.BASELINE)
        if interruption == "a restart":
            cluster.restart()
        elif interruption == "a lost agent":
            cluster.send(AgentLeft("agent-0"))
        cluster.now_s += MAX_WAIT_S / 2
        if interruption != "none":
            cluster.join_all()
    cluster.run_until(JobState.PROFILING)


def test_heat_that_moves_changes_no_record_and_is_no_longer_shown_once_it_has_passed() -> None:
    cluster = heated()
    cluster.slowdowns[0] = 1.0
    cluster.run(1)
    before = len(cluster.history)
    for pipeline in (1, 2, 3, 0):
        cluster.clock_event_reasons = [0x20 if each == pipeline else 0 for each in range(4)]
        cluster.run(1)
        assert f"pipeline {pipeline} is slow" in cluster.job().state_reason
    records = [command.record for command in cluster.history[before:] if isinstance(command, Store)]
    assert not any(isinstance(record, JobRecord) for record in records)
    end(cluster)
    cluster.run(1)
    assert "once this has passed" not in cluster.job().state_reason


@pytest.mark.usefixtures("stock_beside_plans")
def test_a_gpu_that_stays_hot_is_not_waited_for_when_its_clocks_are_tried_again() -> None:
    cluster = TruthfulCluster()
    place = next(iter(cluster.ranks))
    cluster.plan()
    cluster.run(BLOCK)
    cluster.caps_mhz, cluster.capping_reasons = {place: CLOCKS_MHZ[2]}, 0x20
    cluster.run_until(JobState.BASELINE, limit=400)
    cluster.run_until(JobState.PLANNED)
    cluster.now_s += INITIAL_DELAY_S
    cluster.run_until(JobState.BASELINE)
    assert "tried again" in cluster.job().state_reason
    cluster.run_until(JobState.PLANNED)


def test_a_suspect_delays_the_baseline_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = TimedCluster(make_spec(pipelines=4))
    cluster.join_all()
    monkeypatch.setattr(StragglerRegistry, "suspects", {2})
    cluster.run(MAX_SUSPECTED)
    cluster.expect(JobState.BASELINE)
    cluster.run(6)
    cluster.expect(JobState.PROFILING)


# ---------------------------------------------------------------------- after a baseline of a slow time


def states(cluster: Cluster) -> list[int]:
    return [each.after for each in cluster.announced(event_pb2.StateChanged)]


@pytest.mark.usefixtures("stock_beside_plans")
def test_stock_that_was_measured_while_the_job_was_slow_is_replaced_by_stock_beside_the_plans() -> None:
    cluster = TruthfulCluster()
    cluster.work = lambda _stage: 1.4
    cluster.join_all()
    cluster.run_until(JobState.PROFILING)
    cluster.work = lambda _stage: 1.0
    wrong_s = baseline_s(cluster)
    cluster.plan()
    cluster.run(4 * BLOCK)
    cluster.expect(JobState.PLANNED)
    assert baseline_s(cluster) == pytest.approx(wrong_s / 1.4, rel=0.02)
    *_, (period, saving) = report(cluster.machine.run.log.periods, 0)
    assert saving is not None
    assert saving.baseline_number == period.number
    assert abs(saving.slowdown_percent) < 0.1


# ---------------------------------------------------------------------- at stock


def fall_back(cluster: TruthfulCluster) -> None:
    cluster.plan_delay_s = 1.0
    cluster.run_until(JobState.STOCK)
    cluster.plan_delay_s = 0.0


@pytest.mark.usefixtures("stock_beside_plans")
@pytest.mark.parametrize("restart_count", [0, 3])
def test_a_job_is_tried_again_by_itself_and_restarts_do_not_lengthen_the_wait(restart_count: int) -> None:
    cluster = TruthfulCluster().plan()
    fall_back(cluster)
    assert cluster.machine.record.stock_reason is StockReason.UNEXPLAINED
    assert cluster.job().next_step.startswith("wait: it is tried again by itself")
    assert "after 30 min" in cluster.job().state_reason
    for _ in range(restart_count):
        cluster.now_s += (INITIAL_DELAY_S - 100) / restart_count
        cluster.restart()
        cluster.join_all()
    cluster.run(10)
    cluster.expect(JobState.STOCK)
    cluster.now_s += 100 if restart_count else INITIAL_DELAY_S
    cluster.run(1)
    cluster.expect(JobState.BASELINE)
    cluster.run_until(JobState.PLANNED)
    fall_back(cluster)
    assert "after 60 min" in cluster.job().state_reason
    cluster.send(ResumeRequested())
    assert cluster.machine.record.fall_back_count == 0


@pytest.mark.usefixtures("stock_beside_plans")
def test_a_plan_that_holds_ends_the_count_of_failed_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_watch, "FORGIVING_ITERATIONS", 2 * BLOCK)
    cluster = TruthfulCluster().plan()
    fall_back(cluster)
    cluster.now_s += INITIAL_DELAY_S
    cluster.run(1)
    cluster.run_until(JobState.PLANNED)
    cluster.run(BLOCK)
    assert cluster.machine.record.fall_back_count == 1
    cluster.run(2 * BLOCK)
    assert cluster.machine.record.fall_back_count == 0


def test_violated_predictions_are_tried_again_too_and_other_reasons_are_not() -> None:
    assert not needs_person(StockReason.PREDICTIONS_VIOLATED, 1)
    delay = RetryDelay()
    waits_s = [delay.begin(0.0) for _ in range(UNATTENDED_FALL_BACKS)]
    assert sum(waits_s) >= 24 * 3600 > sum(waits_s[:-1]), "a day of tries needs nobody"
    assert not needs_person(StockReason.UNEXPLAINED, UNATTENDED_FALL_BACKS)
    assert needs_person(StockReason.UNEXPLAINED, UNATTENDED_FALL_BACKS + 1)
    assert needs_person(StockReason.NO_FRONTIER, 0)
    assert needs_person(None, 0)
    for reason in (StockReason.PREDICTIONS_VIOLATED, StockReason.UNEXPLAINED):
        assert "report" not in next_step(reason, "job", 1)


@pytest.mark.usefixtures("stock_beside_plans")
def test_the_second_try_profiles_again() -> None:
    """A disturbance may have been there while the job was profiled."""
    cluster = TruthfulCluster().plan()
    for is_profiled_again in (False, True):
        fall_back(cluster)
        cluster.now_s += 2 * INITIAL_DELAY_S
        before = len(states(cluster))
        cluster.run(1)
        cluster.run_until(JobState.PLANNED)
        cluster.run(4)
        assert (NUMBERS[JobState.PROFILING] in states(cluster)[before:]) == is_profiled_again
