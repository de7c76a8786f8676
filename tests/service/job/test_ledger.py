"""A job's entries in the ledger: every iteration once, in the right place, through all events."""

from dataclasses import astuple

import pytest

from perseus.service.domain.commands import Store
from perseus.service.domain.ledger import HOUR_S, EnergyHour, EnergySums
from perseus.service.domain.model import JobState
from tests.service.service_fakes import Cluster, make_spec

RANK_COUNT = 4
ENERGY_J = 100.0 * 0.8 * RANK_COUNT
"""The energy of an iteration of all ranks, as the fakes report it."""


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster(make_spec())
    assert len(cluster.ranks) == RANK_COUNT
    cluster.join_all()
    return cluster


def hours(cluster: Cluster) -> dict[tuple[int, int], EnergyHour]:
    """Return all hours, as a store would have them now."""
    records = [command.record for command in cluster.history if isinstance(command, Store)]
    return {
        (record.hour, record.baseline_number): record for record in records if isinstance(record, EnergyHour)
    }


def total(cluster: Cluster) -> EnergySums:
    return EnergySums(*map(sum, zip(*(astuple(hour.sums) for hour in hours(cluster).values()), strict=True)))


def iteration_count(cluster: Cluster) -> int:
    return next(iter(cluster.ranks.values())).iteration + 1


def test_every_iteration_of_a_job_counts_once(cluster: Cluster) -> None:
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(10)
    found = total(cluster)
    assert found.iteration_count == iteration_count(cluster)
    assert found.energy_j == pytest.approx(ENERGY_J * found.iteration_count)
    assert found.stock_energy_j > 0
    assert found.profiling_count > 0
    assert found.uncompared_energy_j == 0
    assert found.compared_count + round(found.stock_energy_j / ENERGY_J) == found.iteration_count
    assert found.compared_count >= found.profiling_count + 8


def test_a_baseline_is_at_stock_and_others_are_compared_with_it(cluster: Cluster) -> None:
    cluster.iterate_until(JobState.PROFILING)
    found = total(cluster)
    assert (found.compared_count, found.energy_j) == (0, found.stock_energy_j)
    cluster.iterate_until(JobState.PLANNED)
    references = [hour.reference for hour in hours(cluster).values() if hour.sums.compared_count]
    period = cluster.machine.run.log.latest_baseline
    assert period is not None
    assert [reference.number for reference in references if reference] == [period.number]


def test_an_irregular_iteration_counts_like_one_at_stock(cluster: Cluster) -> None:
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(5)
    before = total(cluster)
    cluster.iterate(is_regular=False)
    after = total(cluster)
    assert after.iteration_count == before.iteration_count + 1
    assert after.compared_count == before.compared_count
    assert after.stock_energy_j == pytest.approx(before.stock_energy_j + ENERGY_J)


def test_hours_follow_the_wall_clock(cluster: Cluster) -> None:
    cluster.iterate_until(JobState.PLANNED)
    first = max(hours(cluster))
    cluster.now_s += HOUR_S
    cluster.iterate()
    second = max(hours(cluster))
    assert second[0] - first[0] == 1
    assert hours(cluster)[second].sums.iteration_count == 1


@pytest.mark.parametrize("state", [JobState.BASELINE, JobState.PROFILING, JobState.PLANNED])
def test_a_restart_at_any_time_counts_nothing_twice_and_leaves_nothing_out(
    cluster: Cluster, state: JobState
) -> None:
    cluster.iterate_until(state)
    cluster.iterate()
    cluster.restart()
    for rank in cluster.ranks.values():
        cluster.send(rank.joined())
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(3)
    found = total(cluster)
    assert found.iteration_count == iteration_count(cluster)
    assert found.energy_j == pytest.approx(ENERGY_J * found.iteration_count)
