"""What the ledger is kept in: a run's energy by hours of UTC, each held against one stock baseline."""

from collections.abc import Callable
from dataclasses import dataclass

from perseus.service.domain.moments import standard_error

HOUR_S = 3600.0
NO_BASELINE = -1
"""Stands for the baseline's number where there is none."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a kWh is assumed to cost, in the operator's currency, and to stand for in grams of CO2.

    None is not known.
    """

    price_per_kwh: float | None = None
    intensity_g_per_kwh: float | None = None


UNKNOWN = Rates()

RatesAt = Callable[[float], Rates]
"""The rates at a time of the wall clock: constants or a series, that is not the ledger's to know."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A stock baseline that iterations are held against: the report's period of that number.

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
    """Sums over iterations of a whole job, with the gaps before them. Those of several hours add up.

    Energy is at stock, compared (under other clocks, held against a baseline) or uncompared; all together is
    what was used. What ran at stock, or was no training iteration, is its own measure: it saves nothing.

    Attributes:
        iteration_count: those that all ranks have reported.
        unmeasured_count: those that some rank never reported, or whose energy is not known of all GPUs.
        time_s: of the slowest rank, with the gaps.
        stock_energy_j: at stock, irregular, and in gaps.
        uncompared_energy_j: under other clocks, without a baseline or not measured on all GPUs.
        compared_count, compared_energy_j: held against the baseline.
        energy_m2: of those under the same plans, the squared deviations from the mean under them.
        freedom_count: how many independent deviations that are.
        profiling_count, profiling_energy_j: of those compared, under the clocks that profiling held.
        straggler_energy_j: of those compared, while a straggler was known.
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


@dataclass(frozen=True, slots=True)
class EnergyHour:
    """What a run used in one hour while one baseline, or none, was there to be held against.

    `hour` counts from 1970-01-01T00:00Z; `rates` are those assumed in it.
    """

    hour: int
    reference: Reference | None
    sums: EnergySums = EnergySums()
    rates: Rates = UNKNOWN

    @property
    def baseline_number(self) -> int:
        """The reference's, or NO_BASELINE."""
        return NO_BASELINE if self.reference is None else self.reference.number


@dataclass(frozen=True, slots=True)
class EnergyGroup:
    """Hours of one run, held against the same baseline at the same rates, added up.

    `deletion` is 0 for the job that has the name now; those of that name before it are numbered from 1.
    """

    job_id: str
    deletion: int
    run_number: int
    first_hour: int
    last_hour: int
    reference: Reference | None
    rates: Rates
    sums: EnergySums


@dataclass(frozen=True, slots=True)
class HourFilter:
    """Which of the ledger is wanted; all by default. `first_hour` counts, `end_hour` does not any more."""

    first_hour: int | None = None
    end_hour: int | None = None
    job_id: str = ""
