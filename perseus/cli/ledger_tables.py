"""The table of `perseus ledger`."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from perseus.v1.ledger_service_pb2 import LedgerAccount, LedgerEntry


def ledger_table(entries: Iterable[LedgerEntry], total: LedgerAccount) -> Table:
    """Return a table with a line for each run and the total, and notes on parts and assumptions below."""
    table = Table(caption="\n".join(_notes(total)))
    table.add_column("job")
    table.add_column("run", justify="right")
    table.add_column("hours (UTC)", min_width=16)
    for column in ("energy, kWh", "saved, kWh", "saved, %", "cost", "saved", "CO2, kg", "saved, kg"):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in entries:
        first, end = entry.start_time.ToDatetime(), entry.end_time.ToDatetime()
        table.add_row(
            entry.job_id + (" (deleted)" if entry.is_deleted else ""),
            str(entry.run_number),
            f"{first:%Y-%m-%d %H:%M} – {end:%Y-%m-%d %H:%M}",
            *_figures(entry.account),
        )
    table.add_section()
    table.add_row("total", "", "", *_figures(total))
    return table


def account_lines(account: LedgerAccount) -> list[str]:
    """Return one run's usage and savings in words."""
    energy, saved, percent, cost, saved_cost, carbon, saved_carbon = _figures(account)
    lines = [f"used {energy} kWh; {f'saved {saved} kWh, {percent} %' if saved else 'saving unknown'}"]
    if cost:
        lines.append(f"cost {cost}" + (f", saved {saved_cost}" if saved_cost else ""))
    if carbon:
        lines.append(f"{carbon} kg of CO2" + (f", saved {saved_carbon} kg" if saved_carbon else ""))
    return [*lines, *_notes(account)]


def _figures(account: LedgerAccount) -> Sequence[str]:
    return (
        _number(account.energy_kwh),
        _known(account, "saved_energy_kwh", "saved_energy_margin_kwh"),
        _percent(account),
        _known(account, "cost"),
        _known(account, "saved_cost", "saved_cost_margin"),
        _known(account, "carbon_g", scale=1e-3),
        _known(account, "saved_carbon_g", "saved_carbon_margin_g", scale=1e-3),
    )


def _known(account: LedgerAccount, field: str, margin: str = "", *, scale: float = 1.0) -> str:
    """Format a figure with half its 95 % interval, as far as they are known."""
    if not account.HasField(field):  # type: ignore[arg-type]
        return ""
    shown = _number(scale * getattr(account, field))
    if margin and account.HasField(margin):  # type: ignore[arg-type]
        shown += f" ± {_number(scale * getattr(account, margin))}"
    return shown


def _percent(account: LedgerAccount) -> str:
    if not account.HasField("saved_percent"):
        return ""
    shown = f"{account.saved_percent:+z.1f}"
    if not account.HasField("saved_margin_percent"):
        return shown
    return f"{shown} ± {account.saved_margin_percent:.1f}"


def _number(value: float) -> str:
    """Format with three decimals, or more for numbers that three would round to zero."""
    return f"{value:z.3f}" if abs(value) >= 0.1 or not value else f"{value:.3g}"


def _notes(account: LedgerAccount) -> list[str]:
    notes = ["saved ± half its 95 % interval, against the stock baseline"]
    if account.profiling_energy_kwh:
        extra = ""
        if account.HasField("profiling_extra_energy_kwh"):
            extra = f", {_signed(account.profiling_extra_energy_kwh)} kWh against stock"
        notes.append(f"of it for profiling: {_number(account.profiling_energy_kwh)} kWh{extra}")
    if account.uncompared_energy_kwh:
        notes.append(f"{_number(account.uncompared_energy_kwh)} kWh could not be compared with a baseline")
    if account.straggler_energy_kwh:
        notes.append(
            f"{_number(account.straggler_energy_kwh)} kWh with a straggler: their saving is understated"
        )
    if account.unmeasured_iteration_count:
        notes.append(f"{account.unmeasured_iteration_count} iterations were not measured on all GPUs")
    assumed = []
    if account.HasField("price_per_kwh"):
        assumed.append(f"{account.price_per_kwh:g} per kWh")
    if account.HasField("intensity_g_per_kwh"):
        assumed.append(f"{account.intensity_g_per_kwh:g} g CO2 per kWh")
    notes.append(f"assumed: {', '.join(assumed) or 'no price and no carbon intensity (none is set)'}")
    return notes


def _signed(value: float) -> str:
    return f"+{_number(value)}" if value > 0 else _number(value)
