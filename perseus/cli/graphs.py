"""Graphs of computations in `perseus solve --graph` and `perseus plan`: their file, and a plan's nodes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from perseus.cli.amounts import joules, seconds
from perseus.cli.terminal import fail
from perseus.regular_file import read_bounded

if TYPE_CHECKING:
    from perseus.solver import ComputationGraph, Frontier, Plan


def read_graph(path: Path, point_count: int, max_computations: int) -> "ComputationGraph":
    """Return the graph of a file; exit if it has none.

    Raises:
        SolverError: the solver refuses it.
    """
    from google.protobuf import json_format

    from perseus.cli.frontier_file import graph_from_text
    from perseus.service.domain.errors import ServiceError, cut

    try:
        return graph_from_text(read_bounded(path).decode("utf-8-sig"), point_count, max_computations)
    except OSError as error:
        fail(f"{path}: can't be read: {error.strerror}")
    except (json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        fail(f"{path}: expected a graph as JSON, found: {cut(error)}")
    except ServiceError as error:
        fail(f"{path}: {error}")


def node_rows(graph: "ComputationGraph", frontier: "Frontier", made: "Plan") -> list[dict[str, Any]]:
    """Return a row for each node, by its start."""
    stock_s = {p.computation: p.duration_s for stage in frontier.baseline.stages for p in stage}
    planned = {p.computation: p for stage in made.stages for p in stage}
    rows = []
    for name, computation in graph.computations.items():
        p = planned[computation]
        rows.append(
            {
                "node": name,
                "resource": graph.nodes[name].resource or None,
                "clock_mhz": p.clock_mhz,
                "start_s": p.start_s,
                "duration_s": p.duration_s,
                "slowdown_percent": 100 * (p.duration_s / stock_s[computation] - 1),
            }
        )
    return sorted(rows, key=lambda row: row["start_s"])


def node_table(made: "Plan", saving_percent: float, rows: Sequence[Mapping[str, Any]], caption: str) -> Table:
    """Return a plan's nodes as a table."""
    cost = f"{seconds(made.iteration_time_s, 4)} and {joules(made.energy_j, 1)}"
    table = Table(
        title=f"Plan of {cost}, {saving_percent:.2f} % saved",
        caption=f"{caption}\nslower: than at the highest clock",
        caption_justify="left",
    )
    table.add_column("node", overflow="fold")
    table.add_column("resource", overflow="fold")
    for column in ("clock", "start", "duration", "slower"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["node"],
            row["resource"] or "",
            f"{row['clock_mhz']} MHz",
            seconds(row["start_s"]),
            seconds(row["duration_s"]),
            f"{row['slowdown_percent']:.1f} %" if row["slowdown_percent"] else "",
        )
    return table
