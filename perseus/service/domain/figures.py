"""What a run tells its metrics beyond what its view shows, as plain values; None is not known."""

from dataclasses import dataclass

from perseus.service.domain.measured import JobIteration, Period, Saving


@dataclass(frozen=True, slots=True)
class Totals:
    """Complete iterations since the coordinator began with the run, and the gaps before them.

    `time_s` is of the slowest rank, `energy_j` of all GPUs.
    """

    regular_count: int = 0
    irregular_count: int = 0
    time_s: float = 0.0
    energy_j: float = 0.0

    def with_iteration(self, iteration: JobIteration) -> "Totals":
        """Return them with one more."""
        return Totals(
            self.regular_count + iteration.is_regular,
            self.irregular_count + (not iteration.is_regular),
            self.time_s + iteration.iteration_time_s + iteration.gap_time_s,
            self.energy_j + sum(iteration.pipeline_energy_j) + iteration.gap_energy_j,
        )


@dataclass(frozen=True, slots=True)
class JobFigures:
    """A run's figures at one moment.

    Attributes:
        latest: the latest complete iteration.
        totals: of all of them.
        period: what is measured under the clocks that are offered now, and `saving` that against stock.
        promised_time_s: the iteration time that the plans promise.
        detected_count: of the stragglers, those that nobody reported.
        straggler_time_s: T' of the slowest one.
        switch_count: how often pipelines were given other plans.
        saved_energy_j: against stock, since the coordinator began with the run.
    """

    latest: JobIteration | None = None
    totals: Totals | None = None
    period: Period | None = None
    saving: Saving | None = None
    promised_time_s: float | None = None
    detected_count: int = 0
    straggler_time_s: float | None = None
    switch_count: int | None = None
    saved_energy_j: float | None = None
