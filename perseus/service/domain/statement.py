"""What the ledger tells: accounts of runs, and of all of them together."""

from dataclasses import dataclass

from perseus.service.domain.ledger import EnergySums, Rates

J_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True)
class Quantity:
    """So much was used, and saved against stock: of energy in joules, of money or of grams.

    None is not known; `saved_se` is the standard error of `saved`, and `saved_margin` half its 95 % interval.
    """

    used: float | None = None
    saved: float | None = None
    saved_se: float | None = None
    saved_margin: float | None = None


@dataclass(frozen=True, slots=True)
class Account:
    """What was used and saved; `LedgerAccount` in the contract says what each figure means."""

    sums: EnergySums
    energy_j: Quantity
    cost: Quantity
    carbon_g: Quantity
    saved_percent: float | None
    saved_se_percent: float | None
    profiling_extra_j: float | None
    rates: Rates


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """What a run has used and saved, from the begin of its first hour to the end of its last."""

    job_id: str
    deletion: int
    run_number: int
    start_time_s: float
    end_time_s: float
    account: Account


@dataclass(frozen=True, slots=True)
class Statement:
    """Entries by job, deletion and run, and all of them together."""

    entries: tuple[LedgerEntry, ...]
    total: Account


@dataclass(frozen=True, slots=True)
class LedgerTotals:
    """What all runs in the ledger have used and saved, without standard errors.

    `saved_energy_j` is None where nothing was held against a baseline; `cost` and `carbon_g` are None where
    not all rates are known.
    """

    energy_j: float = 0.0
    saved_energy_j: float | None = None
    cost: Quantity | None = Quantity(0.0)
    carbon_g: Quantity | None = Quantity(0.0)
