"""`perseus simulate`: days of jobs under budgets and signals, in seconds. No service."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from perseus.cli.destination import Destination
from perseus.cli.progress import working
from perseus.cli.rows import Format, FormatOption, show_rows
from perseus.cli.solve import check_picture, without_pyplot, wrong_unit
from perseus.cli.terminal import fail, warn

if TYPE_CHECKING:
    from perseus.simulation.replay import Fleet, Replay

_MAX_PLOTTED_STEPS = 20_000
"""Most steps in a picture; more of them would be indistinguishable."""


def simulate(
    scenario: Annotated[
        Path,
        typer.Argument(
            metavar="SCENARIO.toml",
            help="Feeds, jobs, budgets and signals, as TOML or JSON (docs/power.md).",
            show_default=False,
        ),
    ],
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw power, speeds and signals here; the suffix names the format, PNG if none."),
    ] = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Simulate the coordinator's decisions for jobs, power budgets and signals, and show the result."""
    with without_pyplot():
        from perseus.simulation.build import build_fleet
        from perseus.simulation.replay import replay
        from perseus.simulation.scenario import ScenarioError, read_scenario

    picture = None if plot is None else Destination("--plot", plot)
    if picture is not None:
        picture.check(scenario)
        check_picture(picture)
    try:
        described = read_scenario(scenario)
        with working("Solving", is_measured=True) as report:
            fleet = build_fleet(described, report)
    except ScenarioError as error:
        fail(str(error))
    for part, job in zip(described.jobs, fleet.jobs, strict=True):
        blocking_power = f"{scenario}: job {part.job_id!r}: blocking_power_w"
        if found := wrong_unit(job.frontier.pipeline, part.gpus_per_stage, str(part.profile), blocking_power):
            warn(found)
    with working("Simulating", is_measured=True) as report:
        done = replay(fleet, report)
    if picture is None or not picture.is_standard_output:
        rows = _rows(done)
        show_rows(form, rows, list(rows[0]), lambda: _table(fleet, done, rows))
    if picture is not None:
        with working("Drawing"):
            _draw(picture, scenario.stem, fleet, done)


def _rows(done: "Replay") -> list[dict[str, Any]]:
    """Return a row for each job; `stock_*`: the same iterations at the highest clocks."""
    return [
        {
            "job_id": job_id,
            "iteration_count": totals.iteration_count,
            "time_s": totals.time_s,
            "stock_time_s": totals.stock_time_s,
            "energy_j": totals.energy_j,
            "stock_energy_j": totals.stock_energy_j,
            "carbon_g": totals.carbon_g,
            "stock_carbon_g": totals.stock_carbon_g,
            "cost": totals.cost,
            "stock_cost": totals.stock_cost,
        }
        for job_id, totals in done.totals.items()
    ]


def _table(fleet: "Fleet", done: "Replay", rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"{(fleet.end_s - fleet.begin_s) / 3600:g} hours of {len(rows)} jobs")
    table.add_column("job")
    for column in (
        "iterations",
        "time over stock",
        "energy",
        "of stock",
        "carbon",
        "of stock",
        "cost",
        "of stock",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["job_id"],
            f"{row['iteration_count']:.0f}",
            _ratio(row["time_s"], row["stock_time_s"]),
            f"{row['energy_j'] / 3.6e6:.1f} kWh",
            _ratio(row["energy_j"], row["stock_energy_j"]),
            "" if row["carbon_g"] is None else f"{row['carbon_g'] / 1000:.1f} kg",
            _ratio(row["carbon_g"], row["stock_carbon_g"]),
            "" if row["cost"] is None else f"{row['cost']:.2f}",
            _ratio(row["cost"], row["stock_cost"]),
        )
    begin_s = fleet.begin_s
    violated = [(time_s, status) for time_s, status in done.statuses if not status.is_compliant]
    lines = [
        f"{(time_s - begin_s) / 3600:.2f} h: feed {status.feed} is not compliant"
        + (f", to be paused: {', '.join(status.to_pause)}" if status.to_pause else "")
        for time_s, status in violated
    ]
    lines.append("of stock: relative to the same iterations at the highest clocks from the job's start")
    table.caption = "\n".join(lines)
    return table


def _ratio(value: float | None, of: float | None) -> str:
    return "" if value is None or not of else f"{100 * value / of:.1f} %"


def _draw(destination: Destination, title: str, fleet: "Fleet", done: "Replay") -> None:
    from perseus import pictures

    names = {"carbon": "carbon (gCO2/kWh)", "price": "price (per kWh)"}
    step = -(-len(done.times_s) // _MAX_PLOTTED_STEPS)
    picture = pictures.FleetPicture(
        title=title,
        times=((done.times_s - fleet.begin_s) / 3600)[::step].tolist(),
        supplies=[
            pictures.Supply(
                name,
                power_w[::step].tolist(),
                done.limits_w[name][::step].tolist(),
                done.power_caps_w[name][::step].tolist(),
            )
            for name, power_w in done.feeds_w.items()
        ],
        speeds={job_id: speeds[::step].tolist() for job_id, speeds in done.speeds.items()},
        signals={names[kind.value]: values[::step].tolist() for kind, values in done.signals.items()},
    )
    image = pictures.draw_fleet(picture, pictures.image_format(destination.path))
    destination.write(lambda stream: stream.write(image))
