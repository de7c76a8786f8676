"""An emulated cluster with ranks that are silent, or spoil their reports."""

from collections.abc import Callable
from dataclasses import replace

from perseus.service.domain.inputs import RankLeft, TelemetryArrived
from perseus.service.domain.model import RankLeftReason
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import TelemetryBatch
from perseus.service.job.rules import Rules
from tests.service.job.emulated_cluster import EmulatedCluster
from tests.service.service_fakes import FakeRank, make_spec

Spoil = Callable[[TelemetryBatch], TelemetryBatch]


def irregular(batch: TelemetryBatch) -> TelemetryBatch:
    return batch._replace(iterations=batch.iterations._replace(is_regular=[False]))


def of_another_version(batch: TelemetryBatch) -> TelemetryBatch:
    return batch._replace(iterations=batch.iterations._replace(plan_version=[4711]))


def of_iteration_0(batch: TelemetryBatch) -> TelemetryBatch:
    rows, computations = batch.iterations, batch.computations
    return batch._replace(
        iterations=rows._replace(iteration=[0]),
        computations=computations._replace(iteration=[0] * len(computations.iteration)),
    )


def without_estimate(batch: TelemetryBatch) -> TelemetryBatch:
    return batch._replace(energy=None)


def without_energy(batch: TelemetryBatch) -> TelemetryBatch:
    """Report that computations cost nothing."""
    if batch.energy is None:
        return batch
    samples = tuple(replace(sample, energy_j=0.0) for sample in batch.energy.samples)
    return batch._replace(energy=replace(batch.energy, samples=samples))


SPOILS: tuple[Spoil, ...] = (irregular, of_another_version, of_iteration_0, without_estimate, without_energy)


class TroubledCluster(EmulatedCluster):
    """All ranks have joined; those in `spoiling` spoil their reports."""

    has_ticks = True

    def __init__(self, rules: Rules | None = None) -> None:
        super().__init__(
            make_spec(), rules or Rules(lease_s=1000.0, baseline_iterations=2, profile_iterations=2)
        )
        self.spoiling: dict[Coordinates, Spoil] = {}

    def end(self, rank: FakeRank, duration_s: float) -> TelemetryArrived:
        event = super().end(rank, duration_s)
        spoil = self.spoiling.get(rank.place)
        return event if spoil is None else replace(event, batch=spoil(event.batch))

    def start_trainers_again(self, iteration: int = -1) -> None:
        """Let all trainers end, and others start after an iteration."""
        for rank in self.ranks.values():
            self.send(RankLeft(rank.place, rank.instance_id, RankLeftReason.TRAINER_GONE))
            rank.start_trainer(iteration)
        self.join_all()
