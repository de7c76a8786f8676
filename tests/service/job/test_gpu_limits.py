"""Power limits and workload power profiles that change from outside while a job runs."""

import pytest

from perseus.service.api.translate_jobs import coordinates_from_proto
from perseus.service.domain.commands import FindProfile
from perseus.service.domain.model import JobState, RankFilter
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.stall import StockReason
from perseus.service.domain.telemetry import GpuLimits
from perseus.v1 import event_pb2
from tests.service.job.truthful_cluster import TruthfulCluster

RANK = Coordinates(1, 0, 0)
LIMIT = GpuLimits(300.0)


def planned() -> TruthfulCluster:
    """Return a planned job whose GPUs all have a known power limit."""
    cluster = TruthfulCluster()
    set_limits(cluster, LIMIT)
    cluster.plan()
    cluster.run(10)
    cluster.expect(JobState.PLANNED)
    return cluster


def set_limits(cluster: TruthfulCluster, limits: GpuLimits) -> None:
    for rank in cluster.ranks.values():
        rank.limits = limits


def asked_keys(cluster: TruthfulCluster) -> list[tuple[str, ...]]:
    return [command.keys for command in cluster.history if isinstance(command, FindProfile)]


@pytest.mark.parametrize("limits", [GpuLimits(250.0), GpuLimits(300.0, (7,)), GpuLimits(0.0)])
def test_another_limit_or_profile_is_measured_anew_and_violates_no_prediction(limits: GpuLimits) -> None:
    cluster = planned()
    keys = asked_keys(cluster)[-1]
    set_limits(cluster, limits)
    cluster.work = lambda _stage: 1.2  # the first iteration under the limit is slower already
    cluster.run(1)
    cluster.expect(JobState.BASELINE)
    assert "under other limits: it is measured anew" in cluster.job().state_reason
    assert cluster.machine.run.profiler.profiles == ()
    changed = cluster.announced(event_pb2.GpuLimitsChanged)[-len(cluster.ranks) :]
    assert {coordinates_from_proto(each.rank) for each in changed} == set(cluster.ranks)
    assert {(each.before_power_limit_w, each.power_limit_w) for each in changed} == {
        (300.0, limits.power_limit_w)
    }
    assert {tuple(each.workload_power_profiles) for each in changed} == {limits.power_profiles}
    cluster.run_until(JobState.PLANNED)
    assert asked_keys(cluster)[-1] != keys, "it does not count as the same work on the same GPUs"
    cluster.run(20)
    assert cluster.announced(event_pb2.PredictionViolated) == []
    (_, rank), *_ = cluster.machine.run.ranks.select(RankFilter(), 0)
    assert rank.gpu is not None
    assert (rank.gpu.power_limit_w, rank.gpu.power_profiles) == limits


def test_a_limit_that_returns_has_its_earlier_key() -> None:
    cluster = planned()
    keys = asked_keys(cluster)[-1]
    set_limits(cluster, GpuLimits(250.0))
    cluster.run(1)
    cluster.run_until(JobState.PLANNED)
    set_limits(cluster, LIMIT)
    cluster.run(1)
    cluster.run_until(JobState.PLANNED)
    assert asked_keys(cluster)[-1] == keys


def test_less_than_a_watt_is_no_change() -> None:
    cluster = planned()
    set_limits(cluster, GpuLimits(300.4))
    cluster.run(5)
    cluster.expect(JobState.PLANNED)


def test_one_gpu_is_enough_and_it_may_change_while_its_job_is_profiled() -> None:
    cluster = TruthfulCluster()
    set_limits(cluster, LIMIT)
    cluster.join_all()
    cluster.run_until(JobState.PROFILING)
    cluster.ranks[RANK].limits = GpuLimits(200.0)
    cluster.run(1)
    cluster.expect(JobState.BASELINE)
    cluster.run_until(JobState.PLANNED)


def test_a_change_while_the_agent_was_away_is_seen_when_it_is_back() -> None:
    cluster = planned()
    cluster.restart()
    for rank in cluster.ranks.values():
        rank.limits = GpuLimits(200.0)
        joined = rank.joined()
        cluster.send(joined)  # as before: its agent reports the earlier limit
    cluster.run(1)
    cluster.expect(JobState.BASELINE)


def test_a_job_at_stock_stays_there_but_discards_old_measurements() -> None:
    cluster = planned()
    for _ in range(3):
        cluster.machine._lifecycle.fall_back(StockReason.NO_FRONTIER, "forced by the test")
    set_limits(cluster, GpuLimits(200.0))
    cluster.run(2)
    cluster.expect(JobState.STOCK)
    assert cluster.machine.run.profiler.profiles == ()
