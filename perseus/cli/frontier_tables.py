"""Tables of frontiers and plans, and what is said below them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from perseus.cli.amounts import joules, seconds
from perseus.cli.comparison import RULES, comparison_rows

if TYPE_CHECKING:
    from perseus.solver import Frontier, FrontierPoint, Pipeline, Plan, PlannedComputation

SAVED = "saved: against all-max waiting until the same time"

_PLAIN_PLAN_COLUMNS = 6
"""Columns of a plan's rows; those of further settings follow."""


def frontier_promise(frontier: "Frontier", pipeline: "Pipeline", *, is_graph: bool) -> str:
    """Describe what plans promise, and of which times no error is known."""
    errors_s = [m.time_se_s for some in pipeline.profiles.values() for m in some]
    unknown = "all" if not any(errors_s) else f"{errors_s.count(0.0)} of {len(errors_s)}"
    doubt = (
        f"No standard errors are known of {unknown} times: they count as exact, and with noise plans take "
        f"longer than they say. {'timeSeS states' if is_graph else '--assume-error-percent assumes'} some."
    )
    if frontier.margin is None:
        return f"Plans have no margin and promise nothing. {doubt}"
    promise = (
        f"Measurements are noisy: times have a margin of {100 * frontier.margin.time_share:.2f} %, so that "
        f"plans keep their times in {100 * frontier.margin.confidence:g} of 100 cases. It costs "
        f"{100 * frontier.margin_energy_share:.2f} % of the energy."
    )
    return promise if all(errors_s) else f"{promise} {doubt}"


def _confidence_percent(confidence: float) -> float | None:
    """Return the probability, in percent, with which a plan keeps its time; None if nothing is promised."""
    return round(100 * confidence, 9) or None


def frontier_rows(frontier: "Frontier", others: "Mapping[str, tuple[Plan, ...]]") -> list[dict[str, Any]]:
    """Return rows for all-max, T_min, no slowdown if longer, T* and T_slow, against all-max waiting as long.

    Rows for the others' plans follow, if there are any.
    """
    baseline = frontier.baseline
    not_slower = [
        index
        for index, point in enumerate(frontier.points)
        if point.iteration_time_s <= baseline.iteration_time_s
    ]
    marked = {
        "T_min": 0,
        **({"no slowdown": not_slower[-1]} if not_slower[-1:] > [0] else {}),
        "T*": frontier.t_star_index,
        "T_slow": len(frontier.points) - 1,
    }
    promise = _confidence_percent(frontier.margin.confidence if frontier.margin else 0.0)
    rows: list[dict[str, Any]] = [
        {
            "point": "all-max",
            "iteration_time_s": baseline.iteration_time_s,
            "energy_j": baseline.energy_j,
            "bound_energy_j": None,
            "saving_percent": None,
            "confidence_percent": promise,
        }
    ]
    for name, index in marked.items():
        point = frontier.points[index]
        rows.append(
            {
                "point": name,
                "iteration_time_s": point.iteration_time_s,
                "energy_j": point.energy_j,
                "bound_energy_j": point.bound_energy_j,
                "saving_percent": saved_percent(baseline, point),
                "confidence_percent": promise,
            }
        )
    if others:
        rows += comparison_rows(frontier, marked, others)
    return rows


def saved_percent(baseline: "Plan", made: "Plan | FrontierPoint") -> float:
    """Return what is saved against the baseline waiting until the same time."""
    return 100 * (1 - made.energy_j / baseline.energy_until_j(made.iteration_time_s))


def frontier_table(rows: list[dict[str, Any]], is_of_graph: bool) -> Table:
    """Return the table of a frontier's rows, with what its points mean below."""
    table = Table(title=f"Iteration time-energy frontier of {'the graph' if is_of_graph else 'one pipeline'}")
    table.add_column("")
    for column in ("iteration time", "energy", "lower bound", "saved"):
        table.add_column(column, justify="right")
    for row in rows:
        bound_j, saving_percent = row["bound_energy_j"], row["saving_percent"]
        table.add_row(
            row["point"],
            seconds(row["iteration_time_s"], 4),
            joules(row["energy_j"], 1),
            joules(bound_j, 1) if bound_j is not None else "",
            f"{saving_percent:.2f} %" if saving_percent is not None else "",
        )
    meanings = {"no slowdown": "no slowdown: the time of all-max"} | RULES
    shown = [line for part, line in meanings.items() if any(part in row["point"] for row in rows)]
    table.caption = "\n".join([SAVED, *shown])
    table.caption_justify = "left"
    return table


def plan_rows(made: "Plan", confidence: float) -> list[dict[str, Any]]:
    """Return a row for each kind of computation of each stage."""
    rows = []
    for stage, computations in enumerate(made.stages):
        for kind in sorted({planned.computation.kind for planned in computations}, key=lambda k: k.value):
            of_kind = [planned for planned in computations if planned.computation.kind is kind]
            clocks_mhz = [planned.clock_mhz for planned in of_kind]
            rows.append(
                {
                    "stage": stage,
                    "kind": kind.value,
                    "computation_count": len(clocks_mhz),
                    "confidence_percent": _confidence_percent(confidence),
                    "lowest_clock_mhz": min(clocks_mhz),
                    "highest_clock_mhz": max(clocks_mhz),
                    **_further_used(of_kind),
                }
            )
    return rows


def _further_used(computations: "Sequence[PlannedComputation]") -> dict[str, list[Any]]:
    """Return the values of further settings that the computations use, by name."""
    used: dict[str, set[Any]] = {}
    for planned in computations:
        for name, value in planned.further:
            used.setdefault(name, set()).add(value)
    return {name: sorted(values) for name, values in used.items()}


def plan_promise(confidence: float) -> str:
    """Describe what one plan promises; a confidence of 0 is none."""
    if confidence:
        return f"It keeps its time in {_confidence_percent(confidence):g} of 100 cases."
    return "It has no margin and promises nothing: no errors of measurements are known."


def plan_table(made: "Plan", saving_percent: float, rows: list[dict[str, Any]], caption: str) -> Table:
    """Return the table of a plan's rows."""
    cost = f"{seconds(made.iteration_time_s, 4)} and {joules(made.energy_j, 1)}"
    title = f"Plan of {cost}, {saving_percent:.2f} % saved"
    table = Table(title=title, caption=caption, caption_justify="left")
    table.add_column("stage", justify="right")
    table.add_column("kind")
    for column in ("computations", "lowest clock", "highest clock"):
        table.add_column(column, justify="right")
    further = list(rows[0])[_PLAIN_PLAN_COLUMNS:]
    for name in further:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["stage"]),
            row["kind"],
            str(row["computation_count"]),
            f"{row['lowest_clock_mhz']} MHz",
            f"{row['highest_clock_mhz']} MHz",
            *(", ".join(f"{v:g}" if isinstance(v, float) else v for v in row[name]) for name in further),
        )
    return table
