"""The ledger's values: a run's energy by UTC hour, each hour compared with one stock baseline."""

from collections.abc import Callable
from dataclasses import dataclass

from perseus.service.domain.moments import standard_error

HOUR_S = 3600.0
MAX_INTENSITY_G_PER_KWH = 2000.0
"""No power station emits more: a higher figure has another unit."""
NO_BASELINE = -1
"""The baseline number that means no baseline."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The assumed price of a kWh, in the operator's currency, and its carbon intensity in grams of CO2.

    None means unknown.
    """

    price_per_kwh: float | None = None
    intensity_g_per_kwh: float | None = None


UNKNOWN = Rates()

RatesAt = Callable[[float], Rates]
"""Returns the rates at a time of the wall clock, whether they are constants or a series."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A stock baseline that iterations are compared with: the report's period of that number.

    `energy_j` is the mean energy of its iterations, `energy_m2` the sum of the squared deviations from it.
    """

    number: int
    iteration_count: int
    energy_j: float
    energy_m2: float

    @property
    def energy_se_j(self) -> float:
        """Standard error of the mean energy; 0 for a single iteration."""
        return standard_error(self.energy_m2, self.iteration_count)


@dataclass(frozen=True, slots=True)
class EnergySums:
    """Sums over iterations of a whole job, with the gaps before them; sums of several hours can be added.

    Energy is at stock, compared (under other clocks, with a baseline) or uncompared; the three add up to the
    energy used. Energy at stock, or outside training iterations, is its own reference: it saves nothing.

    Attributes:
        iteration_count: iterations that all ranks have reported.
        unmeasured_count: iterations that some rank never reported, or without the energy of all GPUs.
        time_s: of the slowest rank, with the gaps.
        stock_energy_j: at stock, in irregular iterations, and in gaps.
        uncompared_energy_j: under other clocks, without a baseline, with one that proved wrong, or not
            measured on all GPUs.
        compared_count, compared_energy_j: iterations compared with the baseline.
        energy_m2: squared deviations of iterations from the mean under the same plans.
        freedom_count: the number of independent deviations in `energy_m2`.
        profiling_count, profiling_energy_j: compared iterations under clocks held for profiling.
        straggler_energy_j: compared iterations while a straggler was known.
    """

    iteration_count: int = 0
    unmeasured_count: int = 0
    time_s: float = 0.0
    stock_energy_j: float = 0.0
    uncompared_energy_j: float = 0.0
    compared_count: int = 0
    compared_energy_j: float = 0.0
    energy_m2: float = 0.0
    freedom_count: int = 0
    profiling_count: int = 0
    profiling_energy_j: float = 0.0
    straggler_energy_j: float = 0.0

    @property
    def energy_j(self) -> float:
        """All energy that was measured."""
        return self.stock_energy_j + self.uncompared_energy_j + self.compared_energy_j

    def uncompared(self) -> "EnergySums":
        """Return the sums as if there had been no baseline to compare with."""
        return EnergySums(
            iteration_count=self.iteration_count,
            unmeasured_count=self.unmeasured_count,
            time_s=self.time_s,
            stock_energy_j=self.stock_energy_j,
            uncompared_energy_j=self.uncompared_energy_j + self.compared_energy_j,
        )


@dataclass(frozen=True, slots=True)
class EnergyHour:
    """A run's energy in one hour, compared with one baseline or none.

    `hour` counts from 1970-01-01T00:00Z; `rates` are those assumed in it.
    """

    hour: int
    reference: Reference | None
    sums: EnergySums = EnergySums()
    rates: Rates = UNKNOWN

    @property
    def baseline_number(self) -> int:
        """The reference's number, or NO_BASELINE."""
        return NO_BASELINE if self.reference is None else self.reference.number


@dataclass(frozen=True, slots=True)
class UncomparedHours:
    """A run's hours that were compared with this baseline count as uncompared: it was wrong."""

    baseline_number: int


@dataclass(frozen=True, slots=True)
class WeightedSums:
    """Sums over hours, each multiplied by a rate of its own; hours whose rate is unknown are summed apart.

    Rates are per kWh and energies in joules, so products still have to be divided by `J_PER_KWH`.

    Attributes:
        energy: sum of rate × energy.
        compared_count, compared_energy: sums of rate × count and of rate × energy of compared iterations.
        compared_square: sum of rate² × count of compared iterations, for the variance of their sum.
        unknown_hours: how many hours have no rate.
        unknown_energy_j, unknown_compared_count, unknown_compared_energy_j: plain sums over those hours.
    """

    energy: float = 0.0
    compared_count: float = 0.0
    compared_energy: float = 0.0
    compared_square: float = 0.0
    unknown_hours: int = 0
    unknown_energy_j: float = 0.0
    unknown_compared_count: int = 0
    unknown_compared_energy_j: float = 0.0

    @classmethod
    def of_hour(cls, rate: float | None, sums: EnergySums) -> "WeightedSums":
        """Return the sums of one hour."""
        if rate is None:
            return cls(
                unknown_hours=1,
                unknown_energy_j=sums.energy_j,
                unknown_compared_count=sums.compared_count,
                unknown_compared_energy_j=sums.compared_energy_j,
            )
        return cls(
            rate * sums.energy_j,
            rate * sums.compared_count,
            rate * sums.compared_energy_j,
            rate**2 * sums.compared_count,
        )

    def filled(self, rate: float | None) -> "WeightedSums | None":
        """Return the sums with a rate for the hours that have none; None if that is unknown, too."""
        if not self.unknown_hours:
            return self
        if rate is None:
            return None
        return WeightedSums(
            self.energy + rate * self.unknown_energy_j,
            self.compared_count + rate * self.unknown_compared_count,
            self.compared_energy + rate * self.unknown_compared_energy_j,
            self.compared_square + rate**2 * self.unknown_compared_count,
        )


@dataclass(frozen=True, slots=True)
class EnergyGroup:
    """The sum of a run's hours with the same baseline.

    `cost` and `carbon` are weighted by each hour's price and carbon intensity.
    `deletion` is 0 for the job that has the name now; deleted jobs of that name are numbered from 1.
    """

    job_id: str
    deletion: int
    run_number: int
    first_hour: int
    last_hour: int
    reference: Reference | None
    sums: EnergySums
    cost: WeightedSums
    carbon: WeightedSums

    @classmethod
    def of_hour(cls, job_id: str, deletion: int, run_number: int, hour: EnergyHour) -> "EnergyGroup":
        """Return a group of one hour."""
        return cls(
            job_id,
            deletion,
            run_number,
            hour.hour,
            hour.hour,
            hour.reference,
            hour.sums,
            WeightedSums.of_hour(hour.rates.price_per_kwh, hour.sums),
            WeightedSums.of_hour(hour.rates.intensity_g_per_kwh, hour.sums),
        )


@dataclass(frozen=True, slots=True)
class HourFilter:
    """Which hours to return; all by default. `first_hour` is inclusive, `end_hour` exclusive.

    With `after`, a run as (job_id, deletion, run_number), only those of the `run_count` runs that follow it.
    """

    first_hour: int | None = None
    end_hour: int | None = None
    job_id: str = ""
    after: tuple[str, int, int] | None = None
    run_count: int = 0
