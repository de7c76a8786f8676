"""Do jobs whose work varies keep their promise, and is what they claim true? On the state machine, emulated.

Each iteration draws the lengths of its microbatches from a log-normal distribution, and is replayed on the
schedule's event graph: the critical path goes through other computations each time, and the pipelines wait
for the one that takes longest. The emulation knows what the same iteration takes and costs at stock.

Other jobs have nearly constant work, but a machine that drifts, a neighbour on a GPU's node that comes and
goes, or a straggler while the baseline and the first clocks are measured.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

import numpy as np

from benchmarks.harness import Cell, Column, Table, main
from perseus.service.domain.commands import Command, Store
from perseus.service.domain.inputs import Input, TelemetryArrived
from perseus.service.domain.model import HoldClocks, JobState, PlannedClocks
from perseus.service.domain.specification import OperatingPolicy
from perseus.service.domain.telemetry import EnergyEstimate, EnergySample
from perseus.service.job import views
from perseus.solver import Computation, Measurement, Pipeline
from perseus.solver.graph import order_computations
from perseus.solver.plan import earliest_finishes_ps
from tests.service.job.clusters import EmulatedCluster, clocks_of
from tests.service.service_fakes import CLOCKS_MHZ, START_S, FakeRank, energy_j, make_spec, time_s

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

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
"""By iteration and pipeline; of works also by microbatch."""
Order = Callable[[Array], Array]
ORDERS: dict[str, Order] = {
    "independent": lambda works: works,
    "sorted by length": lambda works: np.concatenate(
        [
            part[np.argsort(part.mean(axis=2).max(axis=1))]
            for part in np.array_split(works, len(works) // _EPOCH)
        ]
    ),
    "a curriculum": lambda works: works * np.linspace(0.6, 1.4, len(works))[:, None, None],
}
SHAPES = {"4 replicas": (4, 1), "2 pipelines of 2 stages": (2, 2)}

Disturbance = Callable[[np.random.Generator, int, int], Array]
"""Returns by how much longer each pipeline's computations take, at all clocks, in so many iterations."""


def _undisturbed(_rng: np.random.Generator, iterations: int, pipelines: int) -> Array:
    return np.ones((iterations, pipelines))


def _neighbour(rng: np.random.Generator, iterations: int, pipelines: int) -> Array:
    """The first pipeline is 8 % slower for a third of the time, for 30 iterations at a time on average."""
    factors = np.ones((iterations, pipelines))
    begin = 0
    while begin < iterations:
        begin += round(rng.exponential(60.0))
        end = begin + 1 + round(rng.exponential(30.0))
        factors[begin:end, 0] = 1.08
        begin = end
    return factors


def _early_straggler(_rng: np.random.Generator, iterations: int, pipelines: int) -> Array:
    """The first pipeline is 20 % slower for 30 iterations."""
    factors = np.ones((iterations, pipelines))
    factors[:30, 0] = 1.2
    return factors


DISTURBANCES: dict[str, Disturbance] = {
    "10 % slower in 17 min": lambda _rng, iterations, pipelines: np.tile(
        np.linspace(1.0, 1.1, iterations)[:, None], (1, pipelines)
    ),
    "a neighbour": _neighbour,
    "a straggler at the beginning": _early_straggler,
}


class Ran(NamedTuple):
    """What an iteration took, and would have at stock."""

    state: JobState
    is_planned: bool
    time_s: float
    stock_s: float
    energy_j: float
    stock_j: float


@dataclass(frozen=True, slots=True)
class _Costs:
    """By computation, in topological order: time and energy with one unit of work."""

    times_s: Array
    energies_j: Array


class Training(EmulatedCluster):
    """A job whose iterations vary; `truth` has what they took, and would have taken at stock."""

    def __init__(
        self,
        shape: tuple[int, int],
        budget_percent: float,
        seed: int,
        sigma: float,
        order: Order = ORDERS["independent"],
        disturbance: Disturbance | None = None,
    ) -> None:
        pipelines, stages = shape
        policy = OperatingPolicy(budget_percent)
        super().__init__(
            make_spec(pipelines=pipelines, stages=stages, microbatches=MICROBATCHES, policy=policy)
        )
        rng = np.random.default_rng(seed)
        normal = rng.standard_normal((ITERATIONS, pipelines, MICROBATCHES))
        self.works = order(np.exp(sigma * normal - sigma**2 / 2))
        self.factors = (disturbance or _undisturbed)(rng, ITERATIONS, pipelines)
        self.truth: list[Ran] = []
        self._number = -1
        # By rank: the version of its clocks, and the work and the slowness of each iteration since.
        self._worked: dict[object, tuple[int, list[tuple[float, float]]]] = {}
        any_profile = (Measurement(CLOCKS_MHZ[0], 1.0, 1.0),)
        profiles = {(c.stage, c.chunk, c.kind): any_profile for c in self.schedule.computations}
        self._computations, self._dependencies = order_computations(
            Pipeline(self.schedule, profiles, (BLOCKING_W,) * stages)
        )
        self._microbatches = np.array([c.microbatch for c in self._computations])
        self._stock = self._costs(dict.fromkeys(self._computations, CLOCKS_MHZ[0]))
        self._planned: dict[int, _Costs] = {}
        self._clocks_mhz: dict[int, dict[Computation, int]] = {}

    def handle(self, event: Input) -> list[Command]:
        """Give the machine an input; its invariants are for tests, and checking them takes half the time."""
        commands = self.machine.handle(event, self.now_s, START_S + self.now_s)
        self.history.extend(commands)
        return [command for command in commands if not isinstance(command, Store)]

    def iteration_time_s(self) -> float:
        self._number += 1
        first = [rank for place, rank in self.ranks.items() if place.stage == 0]
        time_s, energy_j = self._replay([self._costs_of(rank) for rank in first])
        stock_s, stock_j = self._replay([self._stock] * len(first))
        is_planned = all(isinstance(rank.in_force.clocks, PlannedClocks) for rank in self.ranks.values())
        state = self.machine.record.state
        self.truth.append(Ran(state, is_planned, time_s, stock_s, energy_j, stock_j))
        return time_s

    def end(self, rank: FakeRank, duration_s: float) -> TelemetryArrived:
        pipeline = rank.place.pipeline
        work = float(self.works[self._number, pipeline].mean())
        rank.work = round(_ELEMENTS * work)
        version, worked = self._worked.get(rank.place, (-1, []))
        if version != rank.in_force.version:
            worked = []
        worked.append((work, float(self.factors[self._number, pipeline])))
        self._worked[rank.place] = rank.in_force.version, worked
        event = rank.end(duration_s)
        costs, place = self._costs_of(rank), {c: i for i, c in enumerate(self._computations)}
        own = [place[c] for c in rank.order]
        works = (
            self.works[self._number, pipeline, self._microbatches[own]] * self.factors[self._number, pipeline]
        )
        batch = event.batch._replace(
            computations=event.batch.computations._replace(
                duration_s=(costs.times_s[own] * works).tolist(),
                clock_mhz=[self._clocks_mhz[rank.in_force.version][c] for c in rank.order],
            ),
            iterations=event.batch.iterations._replace(energy_j=[self.truth[-1].energy_j / len(self.ranks)]),
            energy=self._estimate(rank, worked),
        )
        return replace(event, batch=batch)

    def _costs_of(self, rank: FakeRank) -> _Costs:
        """Return the costs in a rank's pipeline at its clocks, which a version never changes."""
        version = rank.in_force.version
        if version not in self._planned:
            self._clocks_mhz[version] = clocks_of(rank, self._computations)
            self._planned[version] = self._costs(self._clocks_mhz[version])
        return self._planned[version]

    def _costs(self, clocks_mhz: dict[Computation, int]) -> _Costs:
        places = [(c.stage, c.kind, clocks_mhz[c] or CLOCKS_MHZ[0]) for c in self._computations]
        return _Costs(
            np.array([time_s(*place) for place in places]), np.array([energy_j(*place) for place in places])
        )

    def _replay(self, pipelines: list[_Costs]) -> tuple[float, float]:
        """Return time and energy of the current iteration, at each pipeline's clocks."""
        works = self.works[self._number][:, self._microbatches] * self.factors[self._number][:, None]
        busy = [costs.times_s * work for costs, work in zip(pipelines, works, strict=True)]
        stages = len(self.schedule.orders)
        whole_s = OVERHEAD_S + 1e-12 * max(
            max(earliest_finishes_ps(self._dependencies, (1e12 * times_s).astype(np.int64).tolist()))
            for times_s in busy
        )
        used_j = sum(
            float(costs.energies_j @ work) + BLOCKING_W * (stages * whole_s - float(times_s.sum()))
            for costs, work, times_s in zip(pipelines, works, busy, strict=True)
        )
        return whole_s, used_j

    def _estimate(self, rank: FakeRank, worked: list[tuple[float, float]]) -> EnergyEstimate:
        """Return what an agent's regression knows: means over iterations.

        Their scatter is their error, unless the agent knows the iterations' work.
        """
        own = [(c.kind, mhz) for c, mhz in clocks_of(rank, rank.order).items() if c.stage == rank.place.stage]
        mean_work = fmean(work for work, _ in worked)
        costs = np.array(worked).prod(axis=1)
        mean = float(costs.mean())
        error = float(costs.std(ddof=1)) / math.sqrt(len(costs)) if len(costs) > 1 else mean / 2
        error = _ERROR if len(costs) >= _MIN_ITERATIONS else max(_ERROR, error)
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
                    mean * time_s(rank.place.stage, kind, mhz or CLOCKS_MHZ[0]),
                    error * time_s(rank.place.stage, kind, mhz or CLOCKS_MHZ[0]),
                    mean * energy_j(rank.place.stage, kind, mhz or CLOCKS_MHZ[0]),
                    error * energy_j(rank.place.stage, kind, mhz or CLOCKS_MHZ[0]),
                )
                for (kind, mhz), count in Counter(own).items()
            ),
            BLOCKING_W,
            0.5,
            work=_ELEMENTS * mean_work,
        )


def run() -> list[Table]:
    """Run all jobs."""
    columns = (
        Column("job"),
        Column("σ of lengths", "g"),
        Column("order, or what disturbs it"),
        Column("budget, %", "g"),
        Column("promise kept, of 20", "d"),
        Column("worst slowdown, %", ".1f"),
        Column("slowdowns truly claimed"),
        Column("savings truly claimed"),
        Column("planned at the end, of 20", "d"),
        Column("saved, mean, %", ".1f"),
    )
    varying = [(sigma, order) for sigma in (0.1, 0.35, 0.7) for order in ORDERS]
    rows = [
        row(name, sigma, order, budget)
        for name in SHAPES
        for sigma, order in [*varying, *((0.02, disturbance) for disturbance in DISTURBANCES)]
        for budget in (0.0, 10.0)
    ]
    note = (
        f"{ITERATIONS:,} iterations each, {SEEDS} seeds, judged by the emulation that made the iterations. "
        f"Kept: from the first plan on, iterations took at most {TOLERANCE:.0%} more than promised, against "
        "the same ones at stock. Truly claimed: what the last plan really cost or saved is within the 95 % "
        "interval that is shown, of the jobs that show one."
    )
    return [Table("Jobs whose work varies", columns, tuple(rows), note)]


def row(name: str, sigma: float, condition: str, budget_percent: float) -> tuple[Cell, ...]:
    """Run one job with all seeds; `condition` is an order or a disturbance."""
    order, disturbance = ORDERS.get(condition, ORDERS["independent"]), DISTURBANCES.get(condition)
    kept = planned = 0
    slowdowns, savings = [], []
    time_claims: list[bool] = []
    energy_claims: list[bool] = []
    for seed in range(SEEDS):
        job = Training(SHAPES[name], budget_percent, seed, sigma, order, disturbance)
        job.join_all()
        job.run(ITERATIONS)
        states = [ran.state for ran in job.truth]
        begin = states.index(JobState.PLANNED) if JobState.PLANNED in states else len(states)
        slowdown_percent, saved_percent = _against_stock(job.truth[begin:])
        slowdowns.append(slowdown_percent)
        savings.append(saved_percent)
        kept += slowdown_percent <= budget_percent + 100 * TOLERANCE
        planned += states[-1] is JobState.PLANNED
        period, _ = job.machine.run.log.latest_period() or (None, None)
        claim = views.saving(job.machine.run)
        if period is None or claim is None or claim.slowdown_margin_percent is None:
            continue
        of_period = job.truth[period.first_iteration : period.last_iteration + 1]
        slowdown_percent, saved_percent = _against_stock([ran for ran in of_period if ran.is_planned])
        off_percent = abs(claim.slowdown_percent - slowdown_percent)
        time_claims.append(off_percent <= claim.slowdown_margin_percent + _SHOWN_PERCENT / 2)
        if claim.energy_percent is not None and claim.energy_margin_percent is not None:
            off_percent = abs(claim.energy_percent - saved_percent)
            energy_claims.append(off_percent <= claim.energy_margin_percent + _SHOWN_PERCENT / 2)
    return (
        name,
        sigma,
        condition,
        budget_percent,
        kept,
        max(slowdowns),
        f"{sum(time_claims)} of {len(time_claims)}",
        f"{sum(energy_claims)} of {len(energy_claims)}",
        planned,
        fmean(savings),
    )


def _against_stock(iterations: list[Ran]) -> tuple[float, float]:
    """Return by how many percent they were slower, and used less energy, than at stock."""
    if not iterations:
        return 0.0, 0.0
    time_s, stock_s, used_j, stock_j = np.array([ran[2:] for ran in iterations]).sum(axis=0).tolist()
    return 100 * (time_s / stock_s - 1), 100 * (1 - used_j / stock_j)


if __name__ == "__main__":
    main("varying_work", run)
