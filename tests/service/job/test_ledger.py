"""A job's entries in the ledger: every iteration once, in the right place, through all events."""

from dataclasses import astuple

import pytest

from perseus.service.domain.commands import Store
from perseus.service.domain.ledger import EnergyHour, EnergySums
from perseus.service.domain.model import JobState
from tests.service.job.machine_bench import FIRST, cluster_in
from tests.service.service_fakes import Cluster

RANK_COUNT = 4
ENERGY_J = 100.0 * 0.8 * RANK_COUNT
"""The energy of an iteration of all ranks, as the fakes report it."""


def hours(cluster: Cluster) -> dict[tuple[int, int], EnergyHour]:
    """Return all hours, as a store would have them now."""
    records = [command.record for command in cluster.history if isinstance(command, Store)]
    return {
        (record.hour, record.baseline_number): record for record in records if isinstance(record, EnergyHour)
    }


def total(cluster: Cluster) -> EnergySums:
    return EnergySums(*map(sum, zip(*(astuple(hour.sums) for hour in hours(cluster).values()), strict=True)))


@pytest.mark.parametrize("restarted_in", [None, JobState.BASELINE, JobState.PROFILING, JobState.PLANNED])
def test_every_iteration_of_a_job_counts_once_also_over_a_restart(restarted_in: JobState | None) -> None:
    cluster = cluster_in(restarted_in or JobState.BASELINE)
    cluster.iterate()
    if restarted_in is not None:
        cluster.restart()
        cluster.join_all()
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(10)
    cluster.iterate(is_regular=False)
    counted = total(cluster)
    assert len(cluster.ranks) == RANK_COUNT
    assert counted.iteration_count == cluster.ranks[FIRST].iteration + 1
    assert counted.energy_j == pytest.approx(ENERGY_J * counted.iteration_count)
    assert counted.uncompared_energy_j == 0
    assert counted.compared_count + round(counted.stock_energy_j / ENERGY_J) == counted.iteration_count
    assert counted.compared_count >= counted.profiling_count + 8 > 8
