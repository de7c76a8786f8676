"""Do jobs whose work varies keep their promise, and is what they claim true? On the state machine, emulated.

Each iteration, every pipeline draws the lengths of its microbatches from a log-normal distribution; the
others wait for the longest. The emulation knows how long the same iterations take at stock.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, stdev

import numpy as np

from benchmarks.harness import Cell, Column, Table, main
from perseus.service.domain.inputs import TelemetryArrived
from perseus.service.domain.model import HoldClocks, JobState, PlannedClocks
from perseus.service.domain.specification import OperatingPolicy
from perseus.service.domain.telemetry import EnergyEstimate, EnergySample
from perseus.service.job import views
from perseus.solver import Kind, Measurement, Pipeline, replay
from tests.service.job.clusters import EmulatedCluster, clocks_of
from tests.service.service_fakes import CLOCKS_MHZ, FakeRank, energy_j, make_spec, time_s

SEEDS = 20
ITERATIONS = 800
MICROBATCHES = 8
BLOCKING_W = 60.0
OVERHEAD_S = 0.02
TOLERANCE = 0.01
_EPOCH = 200
_ELEMENTS = 1e6
_SHOWN_PERCENT = 0.1
"""Percentages are shown in tenths."""
_ERROR = 1e-3
_MIN_ITERATIONS = 4

Order = Callable[[np.ndarray], np.ndarray]
ORDERS: dict[str, Order] = {
    "independent": lambda works: works,
    "sorted by length": lambda works: np.concatenate(
        [part[np.argsort(part.max(axis=1))] for part in np.array_split(works, len(works) // _EPOCH)]
    ),
    "a curriculum": lambda works: works * np.linspace(0.6, 1.4, len(works))[:, None],
}
SHAPES = {"4 replicas": (4, 1), "2 pipelines of 2 stages": (2, 2)}


class Training(EmulatedCluster):
    """A job whose iterations have work that varies; `truth` has what they took, and would take at stock."""

    def __init__(
        self,
        shape: tuple[int, int],
        sigma: float,
        order: Order,
        budget_percent: float,
        seed: int,
    ) -> None:
        pipelines, stages = shape
        policy = OperatingPolicy(budget_percent)
        super().__init__(
            make_spec(pipelines=pipelines, stages=stages, microbatches=MICROBATCHES, policy=policy)
        )
        rng = np.random.default_rng(seed)
        lengths = np.exp(
            sigma * rng.standard_normal((2 * ITERATIONS, pipelines, MICROBATCHES)) - sigma**2 / 2
        )
        self.works = order(lengths.mean(axis=2))
        self.truth: list[tuple[JobState, bool, float, float, float, float]] = []
        self._number = -1
        self._worked: dict[object, tuple[int, list[float]]] = {}
        self._units: dict[tuple[int, object], tuple[float, float]] = {}

    def iteration_time_s(self) -> float:
        self._number += 1
        works = self.works[self._number]
        taken = [self._unit(rank) for place, rank in self.ranks.items() if place.stage == 0]
        stock_s, stock_j = self._unit_of(dict.fromkeys(self.schedule.computations, CLOCKS_MHZ[0]), None)
        time_s = max(work * unit_s for work, (unit_s, _) in zip(works, taken, strict=True)) + OVERHEAD_S
        at_stock_s = works.max() * stock_s + OVERHEAD_S
        stages = self.spec.parallelism.stage_count
        used_j = sum(
            work * unit_j + BLOCKING_W * stages * (time_s - work * unit_s)
            for work, (unit_s, unit_j) in zip(works, taken, strict=True)
        )
        at_stock_j = sum(
            work * stock_j + BLOCKING_W * stages * (at_stock_s - work * stock_s) for work in works
        )
        is_planned = all(isinstance(rank.in_force.clocks, PlannedClocks) for rank in self.ranks.values())
        state = self.machine.record.state
        self.truth.append((state, is_planned, time_s, float(at_stock_s), used_j, at_stock_j))
        return float(time_s)

    def end(self, rank: FakeRank, duration_s: float) -> TelemetryArrived:
        work = float(self.works[self._number, rank.place.pipeline])
        rank.work = round(_ELEMENTS * work)
        version, worked = self._worked.get(rank.place, (-1, []))
        worked = [*worked, work] if version == rank.in_force.version else [work]
        self._worked[rank.place] = rank.in_force.version, worked
        event = rank.end(duration_s)
        count = len(self.ranks)
        batch = event.batch._replace(
            iterations=event.batch.iterations._replace(energy_j=[self.truth[-1][3] / count]),
            energy=self._estimate(rank, worked),
        )
        return replace(event, batch=batch)

    def _unit(self, rank: FakeRank) -> tuple[float, float]:
        return self._unit_of(clocks_of(rank, self.schedule.computations), rank.in_force.version)

    def _unit_of(self, clocks: dict, version: object) -> tuple[float, float]:  # type: ignore[type-arg]
        """Return time and energy of an iteration with one unit of work, waits within it included."""
        key = (len(clocks), version)
        if key not in self._units or version is None:
            stages = range(self.spec.parallelism.stage_count)
            profiles = {
                (stage, 0, kind): tuple(
                    Measurement(mhz, time_s(stage, kind, mhz), energy_j(stage, kind, mhz))
                    for mhz in CLOCKS_MHZ
                )
                for stage in stages
                for kind in (Kind.FORWARD, Kind.BACKWARD)
            }
            whole = replay(Pipeline(self.schedule, profiles, (BLOCKING_W,) * len(stages)), clocks)
            self._units[key] = whole.iteration_time_s, whole.energy_j
        return self._units[key]

    def _estimate(self, rank: FakeRank, worked: list[float]) -> EnergyEstimate | None:
        """Return what an agent's regression knows: means over iterations.

        Their scatter is their error, unless the agent knows the iterations' work.
        """
        own = [(c.kind, mhz) for c, mhz in clocks_of(rank, rank.order).items() if c.stage == rank.place.stage]
        mean = fmean(worked)
        error = stdev(worked) / math.sqrt(len(worked)) if len(worked) > 1 else mean / 2
        error = _ERROR if len(worked) >= _MIN_ITERATIONS else max(_ERROR, error)
        is_at_stock = not isinstance(rank.in_force.clocks, PlannedClocks | HoldClocks)
        return EnergyEstimate(
            rank.in_force.version,
            len(worked),
            tuple(
                EnergySample(
                    kind,
                    0,
                    0 if is_at_stock else mhz,
                    count * len(worked),
                    mean * time_s(rank.place.stage, kind, mhz),
                    error * time_s(rank.place.stage, kind, mhz),
                    mean * energy_j(rank.place.stage, kind, mhz),
                    error * energy_j(rank.place.stage, kind, mhz),
                )
                for (kind, mhz), count in Counter(own).items()
            ),
            BLOCKING_W,
            0.5,
            work=_ELEMENTS * mean,
        )


def run() -> list[Table]:
    """Run all jobs."""
    columns = (
        Column("job"),
        Column("σ of lengths", "g"),
        Column("order"),
        Column("budget, %", "g"),
        Column("promise kept, of 20", "d"),
        Column("worst slowdown, %", ".1f"),
        Column("claims true, of those made"),
        Column("planned at the end, of 20", "d"),
        Column("saved, mean, %", ".1f"),
    )
    rows = [
        _row(name, shape, sigma, order, budget)
        for name, shape in SHAPES.items()
        for sigma in (0.1, 0.35, 0.7)
        for order in ORDERS
        for budget in (0.0, 10.0)
    ]
    note = (
        f"{ITERATIONS:,} iterations each, {SEEDS} seeds, judged by the emulation that made the iterations. "
        f"Kept: from the first plan on, iterations took at most {TOLERANCE:.0%} more than promised, against "
        "the same ones at stock. True: the last plan's slowdown is within the 95 % interval that is shown."
    )
    return [Table("Jobs whose work varies", columns, tuple(rows), note)]


def _row(
    name: str, shape: tuple[int, int], sigma: float, order: str, budget_percent: float
) -> tuple[Cell, ...]:
    kept = planned = claims = true = 0
    slowdowns, savings = [], []
    for seed in range(SEEDS):
        job = Training(shape, sigma, ORDERS[order], budget_percent, seed)
        job.join_all()
        job.run(ITERATIONS)
        states = [state for state, *_ in job.truth]
        begin = states.index(JobState.PLANNED) if JobState.PLANNED in states else len(states)
        after = np.array([figures for _, _, *figures in job.truth[begin:]])
        slowdown = after[:, 0].sum() / after[:, 1].sum() - 1 if len(after) else 0.0
        slowdowns.append(100 * float(slowdown))
        savings.append(100 * (1 - after[:, 2].sum() / after[:, 3].sum()) if len(after) else 0.0)
        kept += int(slowdown <= budget_percent / 100 + TOLERANCE)
        planned += states[-1] is JobState.PLANNED
        period, _ = job.machine.run.log.latest_period() or (None, None)
        claim = views.saving(job.machine.run)
        if period is not None and claim is not None and claim.slowdown_margin_percent is not None:
            its = job.truth[period.first_iteration : period.last_iteration + 1]
            own = np.array([figures for _, is_planned, *figures in its if is_planned])
            real = 100 * (own[:, 0].sum() / own[:, 1].sum() - 1)
            claims += 1
            true += abs(claim.slowdown_percent - real) <= claim.slowdown_margin_percent + _SHOWN_PERCENT / 2
    return (
        name,
        sigma,
        order,
        budget_percent,
        kept,
        max(slowdowns),
        f"{true} of {claims}",
        planned,
        fmean(savings),
    )


if __name__ == "__main__":
    main("varying_work", run)
