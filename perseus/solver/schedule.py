"""Schedules: the order of each stage's computations, and their dependencies.

A schedule is each stage's explicit order, and the *paths* along which activations flow through the stages'
chunks; gradients flow back the same way. By default, activations flow through all stages of chunk 0, then
through all stages of chunk 1 and so on. A V-shaped schedule has one path that turns round at the last stage;
a dual (bidirectional) one has two, from either end, and each microbatch takes one of them. So a framework's
own table can be used unchanged.

:mod:`perseus.solver.named_schedules` generates the orders of named schedules.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from perseus.solver.computation import Computation
from perseus.solver.errors import ScheduleError
from perseus.solver.order_table import IndexArray, OrderTable, Path

__all__ = ["Path", "Schedule"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Each stage's computations in the order in which the stage runs them.

    Attributes:
        orders: ``orders[s]`` is the order of stage ``s``.
        paths: how activations flow; no two share a stage's chunk. The default is the one path through all
            stages chunk by chunk.
        has_data_flow: whether activations and gradients flow. Otherwise there are no paths, and the orders
            are the only dependencies.
        dependencies: the (earlier, later) pairs between different stages; a stage's order implies those
            inside it.
        arcs: the same pairs as indices into ``computations``; shape (dependencies, 2).
        levels: per computation, the length of the longest chain that it waits for.

    Raises:
        ScheduleError: a computation is in the wrong stage, twice, or on no path, or lacks one that it needs
            (on a path of several places a forward without backward, or a microbatch that another stage never
            sees); a path names a missing place; or the orders deadlock (the message names the cycle).
    """

    orders: tuple[tuple[Computation, ...], ...]
    paths: tuple[Path, ...] = ()
    has_data_flow: bool = True
    dependencies: tuple[tuple[Computation, Computation], ...] = field(init=False)
    arcs: IndexArray = field(init=False, repr=False, compare=False)
    levels: IndexArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        table = OrderTable(self.orders)
        paths, dependencies = self.paths, np.empty((0, 2), np.int64)
        if self.has_data_flow:
            paths = paths or table.path_chunk_by_chunk()
            table.check_paths(paths)
            dependencies = table.data_dependencies(paths)
        stages = np.repeat(np.arange(len(self.orders)), table.lengths)
        levels = table.levels(dependencies)
        arcs = dependencies[stages[dependencies[:, 0]] != stages[dependencies[:, 1]]]
        at = table.computations.__getitem__
        pairs = zip(map(at, arcs[:, 0].tolist()), map(at, arcs[:, 1].tolist()), strict=True)
        object.__setattr__(self, "paths", paths)
        object.__setattr__(self, "dependencies", tuple(pairs))
        object.__setattr__(self, "arcs", arcs)
        object.__setattr__(self, "levels", levels)

    @property
    def stage_count(self) -> int:
        """Number of pipeline stages."""
        return len(self.orders)

    @property
    def computations(self) -> Iterator[Computation]:
        """Every computation, stage by stage, in order."""
        return (computation for order in self.orders for computation in order)

    def check_dependencies(self, further: Iterable[tuple[Computation, Computation]]) -> None:
        """Check further (earlier, later) pairs.

        Raises:
            ScheduleError: a computation is in no stage's order, or the pairs deadlock the orders.
        """
        table = OrderTable(self.orders)
        index_of = {computation: index for index, computation in enumerate(table.computations)}
        arcs = self.arcs.tolist()
        for pair in further:
            for computation in pair:
                if computation not in index_of:
                    raise ScheduleError(f"{computation} is in no stage's order", computation=computation)
            arcs.append([index_of[computation] for computation in pair])
        table.levels(np.array(arcs, np.int64).reshape(-1, 2))
