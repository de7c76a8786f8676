"""Schedules: in which order each stage runs its computations, and what each of them waits for.

A schedule is each stage's explicit order, and the *paths* along which activations flow through the stages'
chunks; gradients flow back the same way. With no path given, activations flow through all stages of chunk 0,
then through all stages of chunk 1 and so on. A V-shaped schedule has one path that turns round at the last
stage; a dual (bidirectional) one has two, from either end, and each microbatch takes one of them. So a
framework's own table is given as it is.

:mod:`perseus.solver.named_schedules` writes down the orders that are known by name.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from perseus.solver.computation import Computation, Kind
from perseus.solver.errors import ScheduleError

_GRADIENT_KINDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
"""The kinds whose end lets the stage before go on with its own backward."""


Path = tuple[tuple[int, int], ...]
"""(stage, chunk) after (stage, chunk), as activations flow."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Each stage's computations in the order in which the stage runs them.

    Attributes:
        orders: ``orders[s]`` is the order of stage ``s``.
        paths: how activations flow; no two share a stage's chunk. Left empty, it is filled with the one path
            through all stages chunk by chunk.
        extra_dependencies: further (earlier, later) pairs, for what activations and gradients don't imply: a
            synchronisation between stages, for one.
        dependencies: all (earlier, later) pairs between different stages; those inside a stage are kept by
            its order.

    Raises:
        ScheduleError: a computation stands in the wrong stage, twice, on no path, or lacks one that it needs
            (a forward without backward, a microbatch that another stage of its path never sees); a path or
            an extra dependency names what is not there; or the orders deadlock, and then the cycle is named.
    """

    orders: tuple[tuple[Computation, ...], ...]
    paths: tuple[Path, ...] = ()
    extra_dependencies: tuple[tuple[Computation, Computation], ...] = ()
    dependencies: tuple[tuple[Computation, Computation], ...] = field(init=False)

    def __post_init__(self) -> None:
        _check_orders(self.orders)
        object.__setattr__(self, "paths", self.paths or _path_chunk_by_chunk(self.orders))
        _check_paths(self.orders, self.paths)
        _check_complete(self.orders, self.paths)
        _check_extra(self.orders, self.extra_dependencies)
        dependencies = (*_data_dependencies(self.orders, self.paths), *self.extra_dependencies)
        _check_deadlock(self.orders, dependencies)
        across = tuple(dict.fromkeys(pair for pair in dependencies if pair[0].stage != pair[1].stage))
        object.__setattr__(self, "dependencies", across)

    @property
    def stage_count(self) -> int:
        """Number of pipeline stages."""
        return len(self.orders)

    @property
    def computations(self) -> Iterator[Computation]:
        """Every computation, stage by stage, in order."""
        return (computation for order in self.orders for computation in order)


def _check_orders(orders: Sequence[Sequence[Computation]]) -> None:
    """Refuse computations that are misplaced, repeated or missing."""
    if not orders:
        raise ScheduleError("orders: expected at least one stage, found none")
    for stage, order in enumerate(orders):
        if not order:
            raise ScheduleError(f"stage {stage}: expected at least one computation, found none", stage=stage)
        seen: set[Computation] = set()
        for computation in order:
            if computation.stage != stage:
                raise ScheduleError(
                    f"order of stage {stage}: expected computations of stage {stage}, found {computation}",
                    stage=stage,
                    computation=computation,
                )
            if computation.microbatch < 0 or computation.chunk < 0:
                raise ScheduleError(
                    f"order of stage {stage}: microbatch and chunk must be 0 or more, found {computation!r}",
                    stage=stage,
                    computation=computation,
                )
            if computation in seen:
                raise ScheduleError(
                    f"order of stage {stage}: {computation} stands there twice",
                    stage=stage,
                    computation=computation,
                )
            seen.add(computation)


def _path_chunk_by_chunk(orders: Sequence[Sequence[Computation]]) -> tuple[Path, ...]:
    """Return the path through all stages of chunk 0, then of chunk 1, and so on."""
    chunk_count = 1 + max(
        (c.chunk for order in orders for c in order if c.kind is not Kind.FIXED), default=-1
    )
    path = tuple((stage, chunk) for chunk in range(chunk_count) for stage in range(len(orders)))
    return (path,) if path else ()


def _check_paths(orders: Sequence[Sequence[Computation]], paths: Iterable[Path]) -> None:
    """Refuse paths that leave the pipeline or cross, and computations off every path."""
    seen: set[tuple[int, int]] = set()
    for path in paths:
        for stage, chunk in path:
            if not (0 <= stage < len(orders) and chunk >= 0):
                raise ScheduleError(
                    f"paths: expected stages 0 to {len(orders) - 1} and chunks of 0 or more, "
                    f"found stage {stage}, chunk {chunk}",
                    stage=stage,
                    chunk=chunk,
                )
            if (stage, chunk) in seen:
                raise ScheduleError(
                    f"paths: expected each stage's chunk once, found stage {stage}, chunk {chunk} again",
                    stage=stage,
                    chunk=chunk,
                )
            seen.add((stage, chunk))
    for order in orders:
        for c in order:
            if c.kind is not Kind.FIXED and (c.stage, c.chunk) not in seen:
                raise ScheduleError(f"{c} is on no path", computation=c, stage=c.stage, chunk=c.chunk)


def _check_complete(orders: Sequence[Sequence[Computation]], paths: Iterable[Path]) -> None:
    """Refuse a chunk of a path that a microbatch of that path does not pass forward and backward."""
    kinds_of: dict[tuple[int, int, int], set[Kind]] = {}
    microbatches_at: dict[tuple[int, int], set[int]] = {}
    for order in orders:
        for c in order:
            if c.kind is not Kind.FIXED:
                kinds_of.setdefault((c.stage, c.chunk, c.microbatch), set()).add(c.kind)
                microbatches_at.setdefault((c.stage, c.chunk), set()).add(c.microbatch)
    for path in paths:
        for microbatch in sorted(set().union(*(microbatches_at.get(place, ()) for place in path))):
            for stage, chunk in path:
                needed = kinds_of.get((stage, chunk, microbatch), set()) - {Kind.RECOMPUTATION}
                if needed not in (
                    {Kind.FORWARD, Kind.BACKWARD},
                    {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT},
                ):
                    found = ", ".join(sorted(kind.value for kind in needed)) or "nothing"
                    raise ScheduleError(
                        f"stage {stage}, chunk {chunk}, microbatch {microbatch}: expected forward with "
                        f"backward, or with backward-input and backward-weight, found {found}",
                        stage=stage,
                        chunk=chunk,
                        microbatch=microbatch,
                        found=found,
                    )


def _check_extra(
    orders: Sequence[Sequence[Computation]], extra: Iterable[tuple[Computation, Computation]]
) -> None:
    present = {computation for order in orders for computation in order}
    for pair in extra:
        for computation in pair:
            if computation not in present:
                raise ScheduleError(
                    f"extra_dependencies: {computation} is in no stage's order", computation=computation
                )


def _data_dependencies(
    orders: Sequence[Sequence[Computation]], paths: Iterable[Path]
) -> Iterator[tuple[Computation, Computation]]:
    """Yield (earlier, later) for every activation, gradient and same-stage dependency."""
    present = {computation for order in orders for computation in order}
    previous: dict[tuple[int, int], tuple[int, int]] = {}
    following: dict[tuple[int, int], tuple[int, int]] = {}
    for path in paths:
        for here, there in pairwise(path):
            following[here], previous[there] = there, here

    def existing(place: tuple[int, int] | None, m: int, kinds: Iterable[Kind]) -> Iterator[Computation]:
        if place is not None:
            stage, chunk = place
            wanted = (Computation(stage, kind, m, chunk) for kind in kinds)
            yield from (computation for computation in wanted if computation in present)

    for later in sorted(present):
        here, m = (later.stage, later.chunk), later.microbatch
        earlier: Iterable[Computation] = ()
        if later.kind is Kind.FORWARD:
            earlier = existing(previous.get(here), m, [Kind.FORWARD])
        elif later.kind is Kind.RECOMPUTATION:
            earlier = existing(here, m, [Kind.FORWARD])
        elif later.kind is Kind.BACKWARD_WEIGHT:
            earlier = existing(here, m, [Kind.BACKWARD_INPUT])
        elif later.kind in _GRADIENT_KINDS:
            earlier = (
                *existing(here, m, [Kind.FORWARD, Kind.RECOMPUTATION]),
                *existing(following.get(here), m, _GRADIENT_KINDS),
            )
        yield from ((one, later) for one in earlier)


def _check_deadlock(
    orders: Sequence[Sequence[Computation]], dependencies: Iterable[tuple[Computation, Computation]]
) -> None:
    """Refuse orders under which some computations wait for each other in a circle."""
    sorter: TopologicalSorter[Computation] = TopologicalSorter()
    for order in orders:
        for earlier, later in pairwise(order):
            sorter.add(later, earlier)
    for earlier, later in dependencies:
        sorter.add(later, earlier)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle: list[Computation] = error.args[1]
        path = " → ".join(str(computation) for computation in cycle)
        raise ScheduleError(f"the orders deadlock: {path}", cycle=path) from None
