"""Schedules: in which order each stage runs its computations, and what each of them waits for.

A schedule is each stage's explicit order, and the *paths* along which activations flow through the stages'
chunks; gradients flow back the same way. With no path given, activations flow through all stages of chunk 0,
then through all stages of chunk 1 and so on. A V-shaped schedule has one path that turns round at the last
stage; a dual (bidirectional) one has two, from either end, and each microbatch takes one of them. So a
framework's own table is given as it is.

:mod:`perseus.solver.named_schedules` writes down the orders that are known by name.
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
        paths: how activations flow; no two share a stage's chunk. Left empty, it is filled with the one path
            through all stages chunk by chunk.
        dependencies: the (earlier, later) pairs between different stages; those inside a stage are kept by
            its order.
        arcs: the same pairs as indices into ``computations``; shape (dependencies, 2).
        levels: per computation, the number of those that it waits for, one after another.

    Raises:
        ScheduleError: a computation stands in the wrong stage, twice, on no path, or lacks one that it needs
            (a forward without backward, a microbatch that another stage of its path never sees); a path
            names what is not there; or the orders deadlock, and then the cycle is named.
    """

    orders: tuple[tuple[Computation, ...], ...]
    paths: tuple[Path, ...] = ()
    dependencies: tuple[tuple[Computation, Computation], ...] = field(init=False)
    arcs: IndexArray = field(init=False, repr=False, compare=False)
    levels: IndexArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        table = OrderTable(self.orders)
        paths = self.paths or table.path_chunk_by_chunk()
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
        """Refuse further (earlier, later) pairs that can't be.

        Raises:
            ScheduleError: a computation is in no stage's order, or with the pairs the orders deadlock.
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
