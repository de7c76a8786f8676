"""Output of `perseus solve --rebalance`: what moving layers between stages would bring beside clocks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

if TYPE_CHECKING:
    from perseus.solver import FrontierPoint, Partition, Pipeline, Plan, Rebalancing

_CAPTION = (
    "saving: against stock's iteration with the present layers",
    "by clocks alone: with the present layers, in the same time: stock's, or the shortest if that is longer",
)


def read_layers(text: str, pipeline: "Pipeline") -> tuple[int, ...]:
    """Return the number of layers of each place; a single number holds for all.

    Raises:
        BadParameter: it is not a list of whole numbers.
        SolverError: there is another number of places, or a place has no layer.
    """
    from perseus.solver.rebalancing import check_layers

    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        expected = "a whole number for each stage, as 7,8,8,7, or one for all"
        raise typer.BadParameter(f"expected {expected}, found {text!r}", param_hint="--layers") from None
    if len(layers) == 1:
        layers *= len(pipeline.schedule.paths[0])
    check_layers(pipeline, layers)
    return layers


def partitions_of(rebalancing: "Rebalancing") -> "dict[str, Partition]":
    """Return the partitions that moves lead to, by the moves from the present one."""
    found, moves = {}, ""
    for partition in (*rebalancing.steps, *([rebalancing.other] if rebalancing.other else [])):
        moves += (", " if moves else "") + _move(rebalancing, partition)
        found[moves] = partition
    return found


def rows_with_partitions(
    rows: Sequence[dict[str, Any]], rebalancing: "Rebalancing", stock: "Plan"
) -> list[dict[str, Any]]:
    """Return a frontier's rows with the columns of partitions, followed by a row for each partition."""
    present = rebalancing.present
    columns = {
        "layers": [*present.layers],
        "t_min_s": present.frontier.t_min_s,
        "t_min_saving_percent": _saving_percent(present.frontier.points[0], stock),
        "clocks_alone_saving_percent": None,
        "is_advised": None,
    }
    shown = [row | columns for row in rows]
    for moves, partition in partitions_of(rebalancing).items():
        plan, frontier = partition.plan, partition.frontier
        shown.append(
            {
                "point": f"layers {moves}",
                "iteration_time_s": plan.iteration_time_s,
                "energy_j": plan.energy_j,
                "bound_energy_j": frontier.bound_energy_j(plan.iteration_time_s),
                "saving_percent": _saving_percent(plan, stock),
                "layers": [*partition.layers],
                "t_min_s": frontier.t_min_s,
                "t_min_saving_percent": _saving_percent(frontier.points[0], stock),
                "clocks_alone_saving_percent": _saving_percent(partition.clocks_alone, stock),
                "is_advised": partition is not rebalancing.other,
            }
        )
    return shown


def partitions_table(rebalancing: "Rebalancing", stock: "Plan") -> Table:
    """Return the table of the present partition and of those that moves lead to."""
    table = Table(title="What moving layers would bring beside clocks", caption_justify="left")
    table.add_column("moved")
    table.add_column("layers")
    for column in ("shortest", "against stock", "saving", "saving in stock's time", "by clocks alone"):
        table.add_column(column, justify="right")
    for moves, partition in {"none": rebalancing.present, **partitions_of(rebalancing)}.items():
        frontier = partition.frontier
        is_slower = frontier.t_min_s > stock.iteration_time_s
        table.add_row(
            moves,
            ",".join(map(str, partition.layers)),
            f"{frontier.t_min_s:.4f} s",
            f"{100 * (frontier.t_min_s / stock.iteration_time_s - 1):+.2f} %",
            f"{_saving_percent(frontier.points[0], stock):.2f} %",
            "" if is_slower else f"{_saving_percent(partition.plan, stock):.2f} %",
            f"{_saving_percent(partition.clocks_alone, stock):.2f} %",
        )
    table.caption = "\n".join([*_CAPTION, *_notes(rebalancing)])
    return table


def _notes(rebalancing: "Rebalancing") -> list[str]:
    first, last = (100 * share for share in rebalancing.fixed_shares)
    advice = (
        []
        if rebalancing.steps
        else ["advice: move none; less than 0.5 % of stock's energy is saved beyond clocks alone"]
    )
    return [
        *advice,
        "assumed: layers are equal, each as an inner stage's in the mean; "
        f"{first:.1f} % of the first stage's time",
        f"and {last:.1f} % of the last one's are more than layers, and stay there. Memory is not considered.",
    ]


def _saving_percent(plan: "Plan | FrontierPoint", stock: "Plan") -> float:
    return 100 * (1 - plan.energy_j / stock.energy_j)


def _move(rebalancing: "Rebalancing", partition: "Partition") -> str:
    """Name the places of a move: by stage, and by chunk if there are several."""
    assert partition.move is not None
    has_chunks = any(chunk for _, chunk in rebalancing.path)
    places = (rebalancing.path[index] for index in partition.move if index is not None)
    return " → ".join(f"{stage}/{chunk}" if has_chunks else str(stage) for stage, chunk in places)
