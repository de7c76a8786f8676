"""Stragglers on an emulated cluster with 1 % of noise: detected, responded to and withdrawn."""

import numpy as np
import pytest

from perseus.service.domain.inputs import PolicySet, StragglerCleared
from perseus.service.domain.model import JobState
from perseus.service.domain.specification import OperatingPolicy
from perseus.v1 import event_pb2, job_pb2
from tests.service.job.clusters import TimedCluster, straggler
from tests.service.service_fakes import make_spec

SEEDS = range(3)


def planned(pipelines: int = 2, seed: int = 0, **changes: float) -> TimedCluster:
    cluster = TimedCluster(make_spec(pipelines=pipelines, stages=3, microbatches=6), seed=seed, **changes)
    cluster.run_to_plan()
    return cluster


def detected(cluster: TimedCluster) -> dict[int, float]:
    """Return T' over T_min of the known stragglers."""
    job = cluster.job(is_full=True)
    assert all(straggler.is_detected for straggler in job.stragglers)
    return {straggler.pipeline: straggler.iteration_time_s / job.t_min_s for straggler in job.stragglers}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("pipelines", "slow"), [(2, 0), (2, 1), (4, 2)])
def test_a_straggler_is_answered_and_withdrawn_within_three_iterations(
    pipelines: int, slow: int, seed: int
) -> None:
    cluster = planned(pipelines, seed)
    others = set(range(pipelines)) - {slow}
    t_min_s = cluster.job().t_min_s

    cluster.slowdowns[slow] = 1.2
    assert cluster.offered_within(3) == others
    assert cluster.announced(event_pb2.StragglerFinding)[-1].slowdown_factor == pytest.approx(1.2, abs=0.02)
    assert detected(cluster) == {slow: pytest.approx(1.18, abs=0.02)}, (
        "the others only take the time that they surely wait"
    )
    assert all(change.straggler_finding.pipeline == slow for change in cluster.findings(10))
    for pipeline, time_s in enumerate(cluster.planned_times_s()):
        assert time_s == t_min_s if pipeline == slow else t_min_s < time_s <= 1.22 * t_min_s

    cluster.slowdowns[slow] = 1.0
    assert cluster.offered_within(3) == others
    assert detected(cluster) == {}
    assert cluster.findings(20) == []
    assert cluster.planned_times_s() == [t_min_s] * pipelines


def test_without_a_plan_pipelines_are_compared_with_their_peers() -> None:
    cluster = TimedCluster(make_spec(pipelines=3, stages=3, microbatches=6))
    cluster.join_all()
    cluster.run(5)
    (found,) = cluster.findings(4, {2: 1.2})
    assert cluster.machine.record.state in (JobState.BASELINE, JobState.PROFILING)
    assert found.straggler_finding.pipeline == 2
    assert "its peers" in found.message
    assert cluster.machine.run.planner.straggler_times_s() == {2: 0.0}


def test_a_report_overrides_findings_until_it_is_cleared() -> None:
    cluster = planned()
    t_min_s = cluster.job().t_min_s
    cluster.send(straggler(1.3, pipeline=1))
    overridden = {change.straggler_finding.is_overridden for change in cluster.findings(6, {1: 1.2})}
    assert overridden == {True}
    (slow,) = cluster.job(is_full=True).stragglers
    assert slow == job_pb2.Straggler(pipeline=1, iteration_time_s=1.3 * t_min_s)

    cluster.send(StragglerCleared(1))
    assert detected(cluster) == {1: pytest.approx(1.18, abs=0.02)}, "the finding made meanwhile counts"
    cluster.send(StragglerCleared(1))
    assert detected(cluster) == {}
    (again,) = cluster.findings(3)
    assert again.straggler_finding.pipeline == 1
    (found,) = cluster.findings(3, {1: 1.0})
    assert found.type == event_pb2.JOB_EVENT_TYPE_STRAGGLER_WITHDRAWN
    assert detected(cluster) == {}
    assert cluster.handle(StragglerCleared(1)) == []


def test_a_straggler_scales_with_the_plan_that_it_has() -> None:
    cluster = planned(noise=0.0)
    cluster.send(PolicySet(OperatingPolicy(10.0)))
    cluster.findings(6, {1: 1.1})
    own_s = cluster.planned_times_s()[1]
    (slow,) = cluster.job(is_full=True).stragglers
    assert slow.pipeline == 1
    assert slow.iteration_time_s == pytest.approx(1.1 * own_s, rel=0.01)
    cluster.send(PolicySet(OperatingPolicy(0.0)))
    cluster.run(6)
    assert detected(cluster) == {1: pytest.approx(1.1, rel=0.01)}


@pytest.mark.parametrize("seed", range(6))
def test_a_straggler_that_takes_a_while_to_prove_violates_no_prediction(seed: int) -> None:
    """With lasting noise, each further iteration is weak evidence."""
    cluster = planned(4, seed, noise=0.001)
    chance = np.random.default_rng(seed)
    for _ in range(5):
        cluster.findings(12, dict(enumerate((1 + 0.004 * chance.standard_normal(4)).tolist())))
    cluster.slowdowns[1] = 1.3
    assert cluster.offered_within(16) == {0, 2, 3}
    assert cluster.announced(event_pb2.PredictionViolated) == []
    assert cluster.machine.record.state is JobState.PLANNED
