"""What moving layers between stages would bring beside clocks, in `perseus solve` and `perseus jobs`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

if TYPE_CHECKING:
    from perseus.v1.frontier_pb2 import FrontierPoint, IterationCost, Partition, Rebalancing

_CAPTION = (
    "saved: against stock's iteration with the present layers",
    "by clocks alone: with the present layers, in the same time: stock's, or the shortest if that is longer",
)


def parse_layers(text: str) -> tuple[int, ...]:
    """Return the numbers of layers.

    Raises:
        BadParameter: it is not a list of whole numbers.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        expected = "a whole number for each stage, as 7,8,8,7, or one for all"
        raise typer.BadParameter(f"expected {expected}, found {text!r}", param_hint="--layers") from None


def partitions_of(found: "Rebalancing") -> "dict[str, Partition]":
    """Return the partitions that moves lead to, by the moves from the present one."""
    partitions = [*found.steps, *([found.other] if found.HasField("other") else [])]
    has_chunks = any(partition.move.from_chunk or partition.move.to_chunk for partition in partitions)
    moves = [_move(partition, has_chunks=has_chunks) for partition in partitions]
    return {", ".join(moves[: n + 1]): partition for n, partition in enumerate(partitions)}


def _move(partition: "Partition", *, has_chunks: bool) -> str:
    move = partition.move
    places = (move.from_stage, move.from_chunk), (move.to_stage, move.to_chunk)
    return " → ".join(f"{stage}/{chunk}" if has_chunks else str(stage) for stage, chunk in places)


def rows_with_partitions(rows: Sequence[Mapping[str, Any]], found: "Rebalancing") -> list[dict[str, Any]]:
    """Return a frontier's rows with the columns of partitions, followed by a row for each partition."""
    no_advice = {"clocks_alone_saving_percent": None, "is_advised": None}
    shown = [{**row, **_columns(found, found.present), **no_advice} for row in rows]
    for moves, partition in partitions_of(found).items():
        plan = partition.plan
        shown.append(
            {
                "point": f"layers {moves}",
                "iteration_time_s": plan.iteration_time_s,
                "energy_j": plan.energy_j,
                "bound_energy_j": plan.bound_energy_j,
                "saving_percent": _saving_percent(plan, found),
                "confidence_percent": None,
                **_columns(found, partition),
                "clocks_alone_saving_percent": _saving_percent(partition.clocks_alone, found),
                "is_advised": bool(found.steps),
            }
        )
    return shown


def _columns(found: "Rebalancing", partition: "Partition") -> dict[str, Any]:
    return {
        "layers": [*partition.layer_counts],
        "t_min_s": partition.fastest.iteration_time_s,
        "t_min_saving_percent": _saving_percent(partition.fastest, found),
    }


def partitions_table(found: "Rebalancing") -> Table:
    """Return the table of the present partition and of those that moves lead to."""
    table = Table(title="What moving layers would bring beside clocks", caption_justify="left")
    table.add_column("moved")
    table.add_column("layers")
    for column in ("shortest", "against stock", "saved", "saved in stock's time", "by clocks alone"):
        table.add_column(column, justify="right")
    for moves, partition in {"none": found.present, **partitions_of(found)}.items():
        t_min_s = partition.fastest.iteration_time_s
        # Of equal times some are rounded up.
        is_slower = t_min_s > found.stock.iteration_time_s * (1 + 1e-9)
        table.add_row(
            moves,
            ",".join(map(str, partition.layer_counts)),
            f"{t_min_s:.4f} s",
            f"{_slowdown_percent(partition, found):+.2f} %",
            f"{_saving_percent(partition.fastest, found):.2f} %",
            "" if is_slower else f"{_saving_percent(partition.plan, found):.2f} %",
            f"{_saving_percent(partition.clocks_alone, found):.2f} %",
        )
    table.caption = "\n".join([*_CAPTION, *_notes(found)])
    return table


def advice_text(found: "Rebalancing") -> str:
    """Return the advice in one line, with its assumption."""
    if not found.steps:
        return "none would save 0.5 % of stock's energy beyond clocks alone (assuming equal layers)"
    moves, partition = [*partitions_of(found).items()][-1]
    return (
        f"{moves} would save {_saving_percent(partition.plan, found):.1f} % of stock's energy, clocks alone "
        f"{_saving_percent(partition.clocks_alone, found):.1f} % in the same time; shortest iteration "
        f"{_slowdown_percent(partition, found):+.1f} % (assuming equal layers, and memory for them)"
    )


def _notes(found: "Rebalancing") -> Iterator[str]:
    if not found.steps:
        yield "advice: move none; less than 0.5 % of stock's energy is saved beyond clocks alone"
    yield (
        "assumed: layers are equal, each as an inner stage's in the mean; "
        f"{found.first_fixed_percent:.1f} % of the first stage's time"
    )
    yield (
        f"and {found.last_fixed_percent:.1f} % of the last one's are more than layers, and stay there. "
        "Memory is not considered."
    )


def _slowdown_percent(partition: "Partition", found: "Rebalancing") -> float:
    return 100 * (partition.fastest.iteration_time_s / found.stock.iteration_time_s - 1)


def _saving_percent(plan: "FrontierPoint | IterationCost", found: "Rebalancing") -> float:
    return 100 * (1 - plan.energy_j / found.stock.energy_j)
