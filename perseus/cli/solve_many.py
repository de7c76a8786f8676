"""`perseus solve` of several profiles: one table, and a folder of frontiers."""

import glob
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from perseus.cli.destination import Destination
from perseus.cli.executor import Executor
from perseus.cli.frontier_tables import SAVED
from perseus.cli.progress import working
from perseus.cli.rows import Format, show_rows
from perseus.cli.terminal import FAILURE, error_console, fail, os_error_text
from perseus.printable import printable

if TYPE_CHECKING:
    from perseus.solver import Frontier, Pipeline

_COLUMNS = {
    "profile": "",
    "baseline_time_s": "all-max, s",
    "t_min_s": "T_min, s",
    "t_min_energy_j": "energy, J",
    "t_min_saving_percent": "saved, %",
    "t_star_s": "T*, s",
    "t_star_energy_j": "energy, J",
    "t_star_saving_percent": "saved, %",
}


def expanded(paths: Sequence[Path]) -> list[Path]:
    """Return the files that paths name: themselves, or those that a pattern in quotes matches."""
    found: list[Path] = []
    for path in paths:
        is_pattern = not path.exists() and glob.has_magic(str(path))
        matching = sorted(map(Path, glob.glob(str(path), recursive=True))) if is_pattern else [path]
        if not matching:
            fail(f"{path}: expected at least one file, found none")
        found += matching
    return found


def solve_many(
    paths: Sequence[Path],
    read: Callable[[Path], "Pipeline"],
    options: dict[str, Any],
    folder: Path | None,
    executor: Executor,
    limit_s: float,
    form: Format,
) -> None:
    """Solve the profiles, write each frontier as soon as it is known, and show a row for each.

    `read` returns a profile's problem; `options` are those of `perseus.solver.solve`.
    """
    files = {} if folder is None else _files(paths, folder)
    rows: dict[int, dict[str, Any]] = {}
    errors: list[str] = []

    def end(number: int, answer: tuple[dict[str, Any], str] | Exception) -> None:
        path = paths[number]
        if isinstance(answer, Exception):
            errors.append(f"{path}: {answer}")
            return
        row, text = answer
        rows[number] = {"profile": str(path), **row}
        if files:
            Destination("--output", files[path]).write(lambda stream: stream.write(text.encode()))

    with working("Reading"):
        pieces = [partial(_solved, read(path), options, is_written=bool(files)) for path in paths]
    executor.run("Solving", pieces, end, limit_s)
    shown = [rows[number] for number in sorted(rows)]
    show_rows(form, shown, list(shown[0]) if shown else list(_COLUMNS), lambda: _table(shown))
    for text in sorted(errors):
        error_console.print(f"error: {printable(text)}", highlight=False)
    if errors:
        raise typer.Exit(FAILURE)


def _files(paths: Sequence[Path], folder: Path) -> dict[Path, Path]:
    """Return where each profile's frontier goes; make the folder."""
    files: dict[Path, Path] = {}
    names: dict[str, Path] = {}
    for path in paths:
        other = names.setdefault(path.stem, path)
        if other != path:
            fail(f"--output: expected profiles of different names, found {other} and {path}")
        files[path] = folder / f"{path.stem}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--output: expected a folder for several frontiers: {os_error_text(error)}")
    for file in files.values():
        Destination("--output", file).check(*paths)
    return files


def _solved(problem: "Pipeline", options: dict[str, Any], *, is_written: bool) -> tuple[dict[str, Any], str]:
    """Solve in a worker: return a row of figures, and the frontier's file if it is written."""
    from perseus import solver
    from perseus.cli.frontier_file import frontier_text

    frontier = solver.solve(problem, **options)
    return _row(frontier), frontier_text(frontier) if is_written else ""


def _row(frontier: "Frontier") -> dict[str, Any]:
    baseline = frontier.baseline
    row: dict[str, Any] = {
        "baseline_time_s": baseline.iteration_time_s,
        "baseline_energy_j": baseline.energy_j,
    }
    for name, index in (("t_min", 0), ("t_star", frontier.t_star_index), ("t_slow", -1)):
        point = frontier.points[index]
        waiting_j = baseline.energy_until_j(point.iteration_time_s)
        row |= {
            f"{name}_s": point.iteration_time_s,
            f"{name}_energy_j": point.energy_j,
            f"{name}_saving_percent": 100 * (1 - point.energy_j / waiting_j),
        }
    return row


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=f"Iteration time-energy frontiers of {len(rows)} pipelines")
    for name, column in _COLUMNS.items():
        table.add_column(column, justify="left" if name == "profile" else "right", overflow="fold")
    for row in rows:
        figures = [format(row[name], _form(name)) for name in list(_COLUMNS)[1:]]
        table.add_row(printable(row["profile"]), *figures)
    table.caption = SAVED
    table.caption_justify = "left"
    return table


def _form(name: str) -> str:
    return ".2f" if name.endswith("_percent") else ".1f" if name.endswith("_j") else ".4f"
