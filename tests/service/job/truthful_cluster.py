"""An emulated cluster whose iterations take as long as its computations, and whose plans may be wrong."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from perseus.service.domain.inputs import TelemetryArrived
from perseus.service.domain.model import HoldClocks, JobState, PlannedClocks
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import ComputationColumns, EnergyEstimate, EnergySample
from perseus.service.job.rules import Rules
from perseus.solver import Computation, Kind, Measurement, Pipeline, replay, with_lag
from tests.service.job.emulated_cluster import EmulatedCluster
from tests.service.service_fakes import CLOCKS_MHZ, FakeRank, energy_j, make_spec, time_s

OVERHEAD_S = 0.02
Slowness = Callable[[int, int], float]
"""By stage and clock: how much longer computations really take than they were profiled."""


def never(_stage: int, _clock_mhz: int) -> float:
    return 1.0


def slower_below_the_highest_clock(stage: int, clock_mhz: int) -> float:
    """Stage 1 is slower than profiled, as in a plan that violates its prediction."""
    return 1.3 if stage == 1 and clock_mhz < CLOCKS_MHZ[0] else 1.0


class TruthfulCluster(EmulatedCluster):
    """Iterations take as long as their computations and transfers; agents keep estimating under plans.

    `work`: by stage, the factor by which the work has grown since the beginning, at every clock. `caps_mhz`:
    by rank, the highest clock that its GPU reaches, whatever is set, for `capping_reasons`.
    """

    def __init__(
        self,
        slowness: Slowness = never,
        rules: Rules | None = None,
        lag_s: float = 0.0,
        *,
        reports_timelines: bool = False,
    ) -> None:
        super().__init__(make_spec(microbatches=8), rules)
        self.slowness = slowness
        self.lag_s = lag_s
        self.work: Callable[[int], float] = lambda _stage: 1.0
        self.caps_mhz: dict[Coordinates, int] = {}
        self.capping_reasons = 0x4
        self._reports_timelines = reports_timelines
        # By rank: the version of its clocks, and how much work there was in each iteration since.
        self._worked: dict[Coordinates, tuple[int, list[float]]] = {}

    def iteration_time_s(self) -> float:
        return max(self._computing_time_s(rank) for rank in self.ranks.values()) + OVERHEAD_S

    def end(self, rank: FakeRank, duration_s: float) -> TelemetryArrived:
        clocks = rank.in_force.clocks
        rank.capped_mhz = self.caps_mhz.get(rank.place, 0)
        rank.reasons = self.capping_reasons if rank.capped_mhz else 0
        version, worked = self._worked.get(rank.place, (-1, []))
        if version != rank.in_force.version:
            worked = []
        worked.append(self.work(rank.place.stage))
        self._worked[rank.place] = rank.in_force.version, worked
        event = rank.end(duration_s)
        batch = event.batch
        if isinstance(clocks, PlannedClocks):
            batch = batch._replace(energy=self._estimate(rank, clocks))
        if self._is_above_cap(rank) and batch.energy is not None:
            batch = batch._replace(energy=replace(batch.energy, samples=()))  # windows are discarded
        if batch.energy is not None:
            batch = batch._replace(energy=_scaled(batch.energy, median(worked)))
        if self._reports_timelines:
            batch = batch._replace(computations=self._timeline(rank, batch.computations))
        return replace(event, batch=batch)

    def plan(self) -> "TruthfulCluster":
        """Bring the job to its first plans, in force everywhere."""
        self.join_all()
        self.run_until(JobState.PLANNED)
        while not all(isinstance(rank.in_force.clocks, PlannedClocks) for rank in self.ranks.values()):
            self.run(1)
        return self

    def _is_above_cap(self, rank: FakeRank) -> bool:
        """Tell whether a rank holds a clock that it does not reach."""
        clocks = rank.in_force.clocks
        return isinstance(clocks, HoldClocks) and 0 < rank.capped_mhz < clocks.clocks_mhz[rank.place.stage]

    def _computing_time_s(self, rank: FakeRank) -> float:
        clocks = rank.in_force.clocks
        planned_mhz = clocks.plan.clocks_mhz if isinstance(clocks, PlannedClocks) else {}

        def clock_mhz(c: Computation) -> int:
            if c in planned_mhz:
                return planned_mhz[c]
            return clocks.clocks_mhz[c.stage] if isinstance(clocks, HoldClocks) else CLOCKS_MHZ[0]

        is_planned = isinstance(clocks, PlannedClocks)

        def time_now_s(stage: int, kind: Kind, mhz: int) -> float:
            cap_mhz = self.caps_mhz.get(replace(rank.place, stage=stage), mhz)
            slowness = self.slowness(stage, mhz) if is_planned else 1.0
            mhz = min(mhz, cap_mhz)
            return time_s(stage, kind, mhz) * slowness * self.work(stage)

        profiles = {
            (stage, 0, kind): tuple(
                Measurement(
                    mhz,
                    time_now_s(stage, kind, mhz),
                    energy_j(stage, kind, mhz),
                )
                for mhz in CLOCKS_MHZ
            )
            for stage in range(2)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        }
        pipeline = with_lag(Pipeline(self.schedule, profiles, (60.0, 60.0)), self.lag_s)
        return replay(pipeline, {c: clock_mhz(c) for c in self.schedule.computations}).iteration_time_s

    def _timeline(self, rank: FakeRank, rows: ComputationColumns) -> ComputationColumns:
        """Return each computation's time and clock under plans."""
        if not isinstance(rank.in_force.clocks, PlannedClocks):
            return rows
        stage = rank.place.stage
        own = rank.in_force.clocks.plan.stages[stage]
        return rows._replace(
            duration_s=[
                time_s(stage, each.computation.kind, each.clock_mhz) * self.work(stage) for each in own
            ],
            clock_mhz=[each.clock_mhz for each in own],
        )

    def _estimate(self, rank: FakeRank, clocks: PlannedClocks) -> EnergyEstimate:
        iterations = rank.iteration - rank.in_force_since + 1
        own = clocks.plan.stages[rank.place.stage]
        counts = Counter((each.computation.kind, each.clock_mhz) for each in own)
        return EnergyEstimate(
            rank.in_force.version,
            iterations,
            tuple(
                EnergySample(
                    kind,
                    0,
                    mhz,
                    count * iterations,
                    time_s(rank.place.stage, kind, mhz) * self.slowness(rank.place.stage, mhz),
                    1e-5,
                    energy_j(rank.place.stage, kind, mhz),
                    1e-2,
                )
                for (kind, mhz), count in counts.items()
            ),
            60.0,
            0.5,
        )


def _scaled(reported: EnergyEstimate, factor: float) -> EnergyEstimate:
    samples = (
        replace(some, time_s=some.time_s * factor, energy_j=some.energy_j * factor)
        for some in reported.samples
    )
    return replace(reported, samples=tuple(samples))
