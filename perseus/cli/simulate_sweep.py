"""`perseus simulate --sweep`: one scenario under many combinations, a table and a picture over them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from rich.table import Table

from perseus.cli.destination import Destination
from perseus.cli.executor import Executor
from perseus.cli.progress import working
from perseus.cli.rows import Format, show_rows
from perseus.cli.terminal import FAILURE, fail
from perseus.printable import printable

if TYPE_CHECKING:
    from perseus.simulation.sweep import Outcome, Setting

_FIGURES = {"time": "time", "energy": "energy", "carbon": "CO2", "cost": "cost"}
_UNITS = {"time": "s", "energy": "j", "carbon": "g", "cost": ""}
_NAMES = ("budgets", "forecast", "policy")

Runs = Mapping[tuple[str, ...], Sequence[dict[str, Any]]]
"""Rows by names of the setting, which differ in their seeds."""


def simulate_sweep(
    scenario: Path, sweep: Path, executor: Executor, picture: Destination | None, form: Format
) -> None:
    """Simulate all combinations; show a row for each run, or in a table for those that differ in seeds."""
    from perseus.simulation.scenario import ScenarioError, read_scenario
    from perseus.simulation.sweep import fleets, outcome, read_sweep

    done: dict[int, Outcome] = {}

    def end(number: int, answer: "Outcome | Exception") -> None:
        if isinstance(answer, Exception):
            fail(f"{scenario}, {_text(settings[number])}: {answer}", FAILURE)
        done[number] = answer

    try:
        described, wanted = read_scenario(scenario), read_sweep(sweep)
        with working("Solving", is_measured=True) as report:
            runs = list(fleets(described, wanted, report))
    except ScenarioError as error:
        fail(str(error))
    settings = [setting for setting, _ in runs]
    executor.run("Simulating", [partial(outcome, fleet) for _, fleet in runs], end, math.inf)
    rows = [asdict(setting) | asdict(done[number]) for number, setting in enumerate(settings)]
    by_setting: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        by_setting.setdefault(tuple(row[name] for name in _NAMES), []).append(row)
    if picture is None or not picture.is_standard_output:
        show_rows(form, rows, list(rows[0]), lambda: _table(scenario.stem, by_setting))
    if picture is not None:
        with working("Drawing"):
            _draw(picture, scenario.stem, by_setting)


def _table(title: str, runs: Runs) -> Table:
    rows = [row for some in runs.values() for row in some]
    shown = _shown(runs)
    table = Table(title=f"{title}: {len(rows)} runs", title_justify="left", caption_justify="left")
    for name in _NAMES:
        table.add_column(name, overflow="fold")
    for column in ("runs", *(f"{_FIGURES[name]}, %\nof stock" for name in shown), "budgets\nkept"):
        table.add_column(column, justify="right", no_wrap=True)
    for names, some in runs.items():
        table.add_row(
            *map(printable, names),
            str(len(some)),
            *(_spread([percent for row in some if (percent := _percent(row, name))]) for name in shown),
            f"{sum(row['kept_budget_count'] for row in some)} of {sum(row['budget_count'] for row in some)}",
        )
    table.caption = (
        "of stock: relative to the same iterations at the highest clocks; mean (least to most) of the runs"
    )
    return table


def _shown(runs: Runs) -> list[str]:
    """Return the figures that are known of all runs."""
    rows = [row for some in runs.values() for row in some]
    return [name for name in _FIGURES if all(_percent(row, name) is not None for row in rows)]


def _percent(row: Mapping[str, Any], name: str) -> float | None:
    """Return a figure in percent of stock; None if it is unknown, or stock's is zero."""
    key = f"{name}_{_UNITS[name]}".removesuffix("_")
    value, stock = row[key], row[f"stock_{key}"]
    return None if value is None or not stock else 100 * value / stock


def _spread(percents: Sequence[float]) -> str:
    if not percents:
        return ""
    least, most = (f"{pick(percents):.1f}" for pick in (min, max))
    return f"{mean(percents):.1f}" + (f" ({least} to {most})" if least != most else "")


def _text(setting: "Setting") -> str:
    return ", ".join(f"{name} {value}" for name, value in asdict(setting).items())


def _draw(destination: Destination, title: str, runs: Runs) -> None:
    from perseus import pictures

    # Names that all settings share say nothing.
    varied = [place for place in range(len(_NAMES)) if len({names[place] for names in runs}) > 1]
    picture = pictures.SweepPicture(
        title=f"{title}: {sum(map(len, runs.values()))} runs",
        settings=[", ".join(names[place] for place in varied) for names in runs],
        percents={
            _FIGURES[name]: [[_percent(row, name) or 0.0 for row in some] for some in runs.values()]
            for name in _shown(runs)
        },
    )
    image = pictures.draw_sweep(picture, pictures.image_format(destination.path))
    destination.write(lambda stream: stream.write(image))
