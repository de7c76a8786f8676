"""The ledger's statement: the account of each run, and the total."""

from dataclasses import dataclass

from perseus.service.domain.ledger import EnergySums, Rates

J_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True)
class Quantity:
    """An amount used, and saved against stock: energy in joules, money, or carbon in grams.

    None means unknown; `saved_se` is the standard error of `saved`, `saved_margin` half its 95 % interval.
    """

    used: float | None = None
    saved: float | None = None
    saved_se: float | None = None
    saved_margin: float | None = None


@dataclass(frozen=True, slots=True)
class Account:
    """Amounts used and saved; `LedgerAccount` in the contract defines each figure."""

    sums: EnergySums
    energy_j: Quantity
    cost: Quantity
    carbon_g: Quantity
    saved_percent: float | None
    saved_se_percent: float | None
    saved_margin_percent: float | None
    profiling_extra_j: float | None
    rates: Rates


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The account of a run, from the beginning of its first hour to the end of its last."""

    job_id: str
    deletion: int
    run_number: int
    start_time_s: float
    end_time_s: float
    account: Account


@dataclass(frozen=True, slots=True)
class Statement:
    """Entries by job, deletion and run, and their total."""

    entries: tuple[LedgerEntry, ...]
    total: Account


@dataclass(frozen=True, slots=True)
class LedgerTotals:
    """Amounts that all runs in the ledger have used and saved, without standard errors.

    `saved_energy_j` is None if nothing was compared with a baseline; `cost` and `carbon_g` are None if some
    rates are unknown.
    """

    energy_j: float = 0.0
    saved_energy_j: float | None = None
    cost: Quantity | None = Quantity(0.0)
    carbon_g: Quantity | None = Quantity(0.0)
