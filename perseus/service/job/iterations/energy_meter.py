"""A run's energy, hour by hour, and the part comparable with stock: the job's part of the ledger.

Every complete iteration of the job counts once, in the hour (UTC) in which its last rank reported it, with
the gap before it. The report's periods are narrower: they leave out the first iteration under new plans,
irregular iterations and gaps. A bill has to include them.

An iteration at stock saves nothing by definition. One under other clocks is compared with the report's latest
stock baseline, if the energy of all its GPUs is known; without a baseline, or with one that proved wrong, its
saving is unknown.

A changed hour is returned whole and stored together with the iterations that changed it: a coordinator that
is killed counts nothing twice and leaves nothing out.
"""

from collections.abc import Iterable
from dataclasses import replace

from perseus.service.domain.ledger import (
    HOUR_S,
    NO_BASELINE,
    EnergyHour,
    EnergySums,
    Reference,
    UncomparedHours,
)
from perseus.service.domain.measured import JobIteration, Period
from perseus.service.domain.model import JobState


class EnergyMeter:
    """Counts the energy of one run.

    Attributes:
        saved_j: energy saved against stock since the coordinator loaded the run, None if unknown.
    """

    def __init__(self) -> None:
        self.saved_j: float | None = None
        # The part of it that is saved against the baseline of that number.
        self._of_baseline: tuple[int, float] = NO_BASELINE, 0.0
        self._hour: EnergyHour | None = None
        # Count and mean of consecutive iterations under the same plans: a different mean would look like
        # noise. The first iteration may have begun under other clocks.
        self._plans: object = None
        self._count = 0
        self._mean_j = 0.0

    def restore(self, latest: EnergyHour | None) -> None:
        """Continue with the latest stored hour."""
        self._hour = latest

    def take(
        self, iterations: Iterable[JobIteration], baseline: Period | None, wall_time_s: float
    ) -> EnergyHour:
        """Count one or more iterations reported at this time; return the updated hour.

        `baseline` is the report's latest one.
        """
        reference = (
            Reference(
                number=baseline.number,
                iteration_count=baseline.iteration_count,
                energy_j=baseline.energy_j,
                energy_m2=baseline.energy_m2,
            )
            if baseline is not None and baseline.energy_j > 0
            else None
        )
        is_wrong = baseline is not None and baseline.is_wrong
        # A wall clock that is set back must not reopen an earlier stored hour.
        number = int(wall_time_s // HOUR_S)
        if self._hour is not None:
            number = max(number, self._hour.hour)
        hour = EnergyHour(number, reference)
        if self._hour is not None and (hour.hour, hour.baseline_number) == (
            self._hour.hour,
            self._hour.baseline_number,
        ):
            hour = replace(hour, sums=self._hour.sums)
        for iteration in iterations:
            hour = replace(hour, sums=self._added(hour.sums, iteration, None if is_wrong else reference))
        self._hour = hour
        return hour

    def refute(self, baseline: Period) -> UncomparedHours:
        """Count what was compared with a baseline that proved wrong as uncompared; return the record."""
        number, saved_j = self._of_baseline
        if number == baseline.number and self.saved_j is not None:
            self.saved_j -= saved_j
            self._of_baseline = NO_BASELINE, 0.0
        if self._hour is not None and self._hour.baseline_number == baseline.number:
            self._hour = replace(self._hour, sums=self._hour.sums.uncompared())
        return UncomparedHours(baseline.number)

    def _added(self, sums: EnergySums, iteration: JobIteration, reference: Reference | None) -> EnergySums:
        energy_j = sum(iteration.pipeline_energy_j)
        is_measured = not iteration.unmeasured_rank_count
        sums = replace(
            sums,
            iteration_count=sums.iteration_count + 1,
            unmeasured_count=sums.unmeasured_count + iteration.skipped_count + (not is_measured),
            time_s=sums.time_s + iteration.iteration_time_s + iteration.gap_time_s,
            stock_energy_j=sums.stock_energy_j + iteration.gap_energy_j,
        )
        if iteration.is_at_stock or not iteration.is_regular:
            return replace(sums, stock_energy_j=sums.stock_energy_j + energy_j)
        if reference is None or not is_measured:
            return replace(sums, uncompared_energy_j=sums.uncompared_energy_j + energy_j)
        saved_j = reference.energy_j - energy_j
        self.saved_j = (self.saved_j or 0.0) + saved_j
        number, before_j = self._of_baseline
        self._of_baseline = reference.number, saved_j + (before_j if number == reference.number else 0.0)
        m2, freedom_count = self._deviation(iteration, energy_j)
        is_profiling = iteration.state is JobState.PROFILING
        return replace(
            sums,
            compared_count=sums.compared_count + 1,
            compared_energy_j=sums.compared_energy_j + energy_j,
            energy_m2=sums.energy_m2 + m2,
            freedom_count=sums.freedom_count + freedom_count,
            profiling_count=sums.profiling_count + is_profiling,
            profiling_energy_j=sums.profiling_energy_j + (energy_j if is_profiling else 0.0),
            straggler_energy_j=sums.straggler_energy_j + (energy_j if iteration.has_straggler else 0.0),
        )

    def _deviation(self, iteration: JobIteration, energy_j: float) -> tuple[float, int]:
        """Return what an iteration adds to the squared deviations and to their number (Welford's update)."""
        if iteration.versions is None:
            self._plans = None
            return 0.0, 0
        plans = (iteration.versions, iteration.has_straggler)
        if plans != self._plans:
            self._plans, self._count, self._mean_j = plans, 0, 0.0
            return 0.0, 0
        self._count += 1
        step_j = energy_j - self._mean_j
        self._mean_j += step_j / self._count
        return (step_j * (energy_j - self._mean_j), 1) if self._count > 1 else (0.0, 0)
