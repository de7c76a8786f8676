"""`perseus simulate`: days of jobs under budgets and signals, in seconds. No service."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from perseus.cli.destination import Destination
from perseus.cli.executor import DaskInsecureOption, DaskOption, Executor, ProcessesOption
from perseus.cli.progress import working
from perseus.cli.rows import Format, FormatOption, show_rows
from perseus.cli.simulate_sweep import simulate_sweep
from perseus.cli.solve import check_picture, without_pyplot, wrong_unit
from perseus.cli.terminal import fail, warn

if TYPE_CHECKING:
    from perseus.service.domain.power import FeedStatus
    from perseus.simulation.replay import Fleet, Replay
    from perseus.v1.power_service_pb2 import FeedState

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
    sweep: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Simulate every combination of the budgets, forecasts, policies and seeds in this file.",
            show_default=False,
        ),
    ] = None,
    processes: ProcessesOption = None,
    dask: DaskOption = None,
    dask_insecure: DaskInsecureOption = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Simulate the coordinator's decisions for jobs, power budgets and signals, and show the result."""
    with without_pyplot():
        from perseus.simulation.build import build_fleet
        from perseus.simulation.replay import replay
        from perseus.simulation.scenario import ScenarioError, read_scenario

    picture = None if plot is None else Destination("--plot", plot)
    if picture is not None:
        picture.check(scenario, *([] if sweep is None else [sweep]))
        check_picture(picture)
    if sweep is not None:
        executor = Executor.of_flags(processes, dask, dask_insecure)
        simulate_sweep(scenario, sweep, executor, picture, form)
        return
    if dask is not None:
        fail("--dask: expected --sweep beside it")
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
        show_rows(form, rows, list(rows[0]), lambda: tables(fleet, done, rows))
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


def tables(fleet: "Fleet", done: "Replay", rows: list[dict[str, Any]]) -> RenderableType:
    """Return the tables of jobs and budgets; `rows` are those of `--format json`."""
    jobs = _table(fleet, done, rows)
    return Group(jobs, Text(), _budget_table(fleet, done)) if done.outcomes else jobs


def _table(fleet: "Fleet", done: "Replay", rows: list[dict[str, Any]]) -> Table:
    from perseus.cli.power_tables import feed_line, has_excess

    table = _plain(f"{(fleet.end_s - fleet.begin_s) / 3600:g} hours of {len(rows)} jobs")
    table.add_column("job", overflow="fold")
    for column in (
        "iterations",
        "time\nover\nstock",
        "energy,\nkWh",
        "of\nstock",
        "CO2,\nkg",
        "of\nstock",
        "cost",
        "of\nstock",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            Text(row["job_id"]),
            f"{row['iteration_count']:.0f}",
            _ratio(row["time_s"], row["stock_time_s"]),
            f"{row['energy_j'] / 3.6e6:.1f}",
            _ratio(row["energy_j"], row["stock_energy_j"]),
            "" if row["carbon_g"] is None else f"{row['carbon_g'] / 1000:.1f}",
            _ratio(row["carbon_g"], row["stock_carbon_g"]),
            "" if row["cost"] is None else f"{row['cost']:.2f}",
            _ratio(row["cost"], row["stock_cost"]),
        )
    lines = [
        f"{(time_s - fleet.begin_s) / 3600:.2f} h: {feed_line(state)}"
        for time_s, state in ((time_s, _feed_state(fleet, status)) for time_s, status in done.statuses)
        if has_excess(state)
    ]
    lines.append("of stock: relative to the same iterations at the highest clocks from the job's start")
    table.caption = Text("\n".join(lines))
    return table


def _plain(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        header_style="dim",
        caption_justify="left",
    )


def _budget_table(fleet: "Fleet", done: "Replay") -> Table:
    """Return a table with a line for each budget that was in force, as it was at its end."""
    from perseus.cli.power_tables import judged_mean, limit_text, state_text

    table = _plain("Budgets, at their ends")
    for column in ("budget", "feed"):
        table.add_column(column, overflow="fold")
    for column in ("limit, W", "from – until, h", "judged mean, W"):
        table.add_column(column)
    table.add_column("state", overflow="fold")
    for each, status in done.outcomes:
        state, budget = _feed_state(fleet, status), each.budget
        ramp_w_per_s = fleet.feeds[budget.feed].ramp_down_w_per_s
        hours = [
            (time_s - fleet.begin_s) / 3600 for time_s in (budget.start_s, min(each.over_s, fleet.end_s))
        ]
        table.add_row(
            Text(budget.budget_id),
            Text(budget.feed),
            limit_text(budget.limit_w, None, ramp_w_per_s if ramp_w_per_s < math.inf else None),
            " – ".join(f"{hour:g}" for hour in hours),
            judged_mean(state),
            state_text(state),
        )
    return table


def _feed_state(fleet: "Fleet", status: "FeedStatus") -> "FeedState":
    from perseus.service.api.translate_power import feed_to_proto

    return feed_to_proto(fleet.feeds[status.feed], status)


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
