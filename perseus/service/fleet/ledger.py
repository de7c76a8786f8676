"""The ledger: energy, money and carbon dioxide that runs have used and saved. Pure.

n iterations under clocks other than stock have saved n × b − a, where b is the mean energy of an iteration in
the stock baseline and a the energy of the n. Every term may have a weight: the price or carbon intensity of
its hour gives money or carbon, a weight of 1 gives energy.

The standard error combines those of two means: the baseline's, σ_b / √n_b, and the iterations' own, σ / √n.
All iterations compared with a baseline share its error: it is multiplied by their number (by the sum of their
weights), not by its root, and the hours of one run together are no more certain than each alone. With a
baseline of 10 iterations and a day under plans, it is nearly all of the error. Different baselines and
iterations are independent, so their squared errors add up. σ is the deviation of iterations under the same
plans from their own mean, pooled over all plans; a change of plans is not noise.

Intervals are Student's, with Welch's and Satterthwaite's degrees of freedom. They assume that iterations vary
independently, and about equally under all plans, and that the baseline was typical. If iterations are
correlated over time, the error is larger: by √((1 + r) / (1 − r)) for a correlation r of neighbours that
decays geometrically.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby

from perseus.service.domain.ledger import (
    HOUR_S,
    EnergyGroup,
    EnergyHour,
    EnergySums,
    Rates,
    RatesAt,
    Reference,
    WeightedSums,
)
from perseus.service.domain.statement import J_PER_KWH, Account, LedgerEntry, Quantity, Statement
from perseus.service.domain.student_t import interval_factor


def constant(rates: Rates) -> RatesAt:
    """Return rates that never change."""
    return lambda _time_s: rates


def priced(hour: EnergyHour, rates_at: RatesAt) -> EnergyHour:
    """Return an hour with its assumed rates: those at its beginning."""
    return replace(hour, rates=rates_at(hour.hour * HOUR_S))


def statement(groups: Iterable[EnergyGroup], now: Rates) -> Statement:
    """Return the ledger's statement.

    Args:
        groups: sums over hours; those of a run are consecutive.
        now: the rates to assume for hours without known rates.
    """
    entries: list[LedgerEntry] = []
    everything: list[EnergyGroup] = []
    for (job_id, deletion, run_number), found in groupby(groups, _run):
        own = list(found)
        if all(group.reference is None for group in own):
            # Without a baseline, nothing shows that even these iterations ran as at stock.
            own = [replace(group, sums=_uncompared(group.sums)) for group in own]
        everything += own
        entries.append(
            LedgerEntry(
                job_id,
                deletion=deletion,
                run_number=run_number,
                start_time_s=min(group.first_hour for group in own) * HOUR_S,
                end_time_s=(max(group.last_hour for group in own) + 1) * HOUR_S,
                account=account(own, now),
            )
        )
    return Statement(tuple(entries), account(everything, now))


def account(groups: Sequence[EnergyGroup], now: Rates) -> Account:
    """Add up groups; those of one run and baseline share the baseline's error. `now` fills unknown rates."""
    sums = EnergySums(
        **{each.name: sum(getattr(group.sums, each.name) for group in groups) for each in fields(EnergySums)}
    )
    energy_j, errors = _quantity(groups, lambda group: WeightedSums.of_hour(1.0, group.sums))
    cost = _per_kwh(_quantity(groups, lambda group: group.cost.filled(now.price_per_kwh))[0])
    carbon_g = _per_kwh(_quantity(groups, lambda group: group.carbon.filled(now.intensity_g_per_kwh))[0])
    saved_percent = saved_se_percent = saved_margin_percent = None
    used_j = sums.stock_energy_j + sums.compared_energy_j
    if energy_j.saved is not None and used_j + energy_j.saved > 0:
        stock_j = used_j + energy_j.saved
        saved_percent = 100 * energy_j.saved / stock_j
        if errors is not None:
            # To first order, both errors contribute, the baselines' times the share used.
            se_j = math.sqrt(errors.own + (used_j / stock_j) ** 2 * errors.of_baselines)
            saved_se_percent = 100 * se_j / stock_j
            saved_margin_percent = interval_factor(errors.freedom) * saved_se_percent
    profiled = [(group.sums, group.reference) for group in groups if group.sums.profiling_count]
    return Account(
        sums=sums,
        energy_j=energy_j,
        cost=cost,
        carbon_g=carbon_g,
        saved_percent=saved_percent,
        saved_se_percent=saved_se_percent,
        saved_margin_percent=saved_margin_percent,
        profiling_extra_j=math.fsum(
            own.profiling_energy_j - own.profiling_count * reference.energy_j
            for own, reference in profiled
            if reference is not None
        )
        if profiled
        else None,
        rates=Rates(_mean_rate(cost.used, sums), _mean_rate(carbon_g.used, sums)),
    )


@dataclass(frozen=True, slots=True)
class _Held:
    """Iterations of a run that are compared with a baseline, plain and weighted."""

    run: tuple[str, int, int]
    reference: Reference
    sums: EnergySums
    weighted: WeightedSums


@dataclass(frozen=True, slots=True)
class _Errors:
    """Variances of the saving, from baselines and from iterations, and their degrees of freedom."""

    of_baselines: float
    own: float
    freedom: float

    @property
    def standard_error(self) -> float:
        return math.sqrt(self.of_baselines + self.own)


def _quantity(
    groups: Sequence[EnergyGroup], weigh: Callable[[EnergyGroup], WeightedSums | None]
) -> tuple[Quantity, _Errors | None]:
    """Return the weighted amounts used and saved, and the errors of the saving."""
    used: list[float] = []
    held: list[_Held] = []
    for group in groups:
        weighted = weigh(group)
        if weighted is None:
            return Quantity(), None
        used.append(weighted.energy)
        if group.reference is not None:
            held.append(_Held(_run(group), group.reference, group.sums, weighted))
    if not held:
        return Quantity(math.fsum(used)), None
    saved = math.fsum(
        one.weighted.compared_count * one.reference.energy_j - one.weighted.compared_energy for one in held
    )
    errors = _errors([one for one in held if one.sums.compared_count])
    if errors is None:
        return Quantity(math.fsum(used), saved), None
    se = errors.standard_error
    return Quantity(
        used=math.fsum(used), saved=saved, saved_se=se, saved_margin=interval_factor(errors.freedom) * se
    ), errors


def _errors(held: Iterable[_Held]) -> _Errors | None:
    """Return the errors of the saving; None with too few iterations."""
    of_baselines = own = per_freedom = 0.0
    for _, found in groupby(held, lambda one: (one.run, one.reference.number)):
        same = list(found)
        freedom_count = sum(one.sums.freedom_count for one in same)
        baseline_count = min(one.reference.iteration_count for one in same)
        if baseline_count < 2 or not freedom_count:
            return None
        # A baseline that grew between two hours differs a little; treat it as the same.
        baseline = math.fsum(one.weighted.compared_count * one.reference.energy_se_j for one in same)
        variance_j2 = math.fsum(one.sums.energy_m2 for one in same) / freedom_count
        iterations = variance_j2 * math.fsum(one.weighted.compared_square for one in same)
        of_baselines += baseline**2
        own += iterations
        per_freedom += baseline**4 / (baseline_count - 1) + iterations**2 / freedom_count
    freedom = (of_baselines + own) ** 2 / per_freedom if per_freedom else math.inf
    return _Errors(of_baselines, own, freedom)


def _run(group: EnergyGroup) -> tuple[str, int, int]:
    return group.job_id, group.deletion, group.run_number


def _per_kwh(quantity: Quantity) -> Quantity:
    """Return joules × rate per kWh as what the rate is of."""
    parts = (quantity.used, quantity.saved, quantity.saved_se, quantity.saved_margin)
    return Quantity(*(None if part is None else part / J_PER_KWH for part in parts))


def _mean_rate(used: float | None, sums: EnergySums) -> float | None:
    """Return the mean rate of a kWh; None if nothing was used."""
    return None if used is None or not sums.energy_j else used / sums.energy_j * J_PER_KWH


def _uncompared(sums: EnergySums) -> EnergySums:
    return replace(
        sums, stock_energy_j=0.0, uncompared_energy_j=sums.stock_energy_j + sums.uncompared_energy_j
    )
