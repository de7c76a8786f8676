"""Schedules: in which order each stage runs its computations, and what each of them waits for.

A schedule is each stage's explicit order. The named ones are functions that write such orders down, so
everything behind this module is the same for any of them. From the orders follow the data dependencies:
activations flow through all stages of chunk 0, then through all stages of chunk 1 and so on; gradients flow
back the same way.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from perseus.solver.computation import Computation, Kind
from perseus.solver.errors import ScheduleError

_GRADIENT_KINDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
"""The kinds whose end lets the stage before go on with its own backward."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Each stage's computations in the order in which the stage runs them.

    ``orders[s]`` is the order of stage ``s``. ``dependencies`` are the (earlier, later) pairs between
    different stages; those inside a stage are kept by its order.

    Raises:
        ScheduleError: a computation stands in the wrong stage, twice, or lacks one that it needs (a forward
            without backward, a microbatch that another stage never sees); or the orders deadlock, and then
            the cycle is named.
    """

    orders: tuple[tuple[Computation, ...], ...]
    dependencies: tuple[tuple[Computation, Computation], ...] = field(init=False)

    def __post_init__(self) -> None:
        _check_orders(self.orders)
        dependencies = tuple(_data_dependencies(self.orders))
        _check_deadlock(self.orders, dependencies)
        across = tuple(pair for pair in dependencies if pair[0].stage != pair[1].stage)
        object.__setattr__(self, "dependencies", across)

    @property
    def stage_count(self) -> int:
        """Number of pipeline stages."""
        return len(self.orders)

    @property
    def computations(self) -> Iterator[Computation]:
        """Every computation, stage by stage, in order."""
        return (computation for order in self.orders for computation in order)


def gpipe(stage_count: int, microbatch_count: int) -> Schedule:
    """GPipe: all forwards, then all backwards, last microbatch first."""
    _check_counts(stage_count, microbatch_count)
    return Schedule(
        tuple(
            tuple(Computation(stage, Kind.FORWARD, m) for m in range(microbatch_count))
            + tuple(Computation(stage, Kind.BACKWARD, m) for m in reversed(range(microbatch_count)))
            for stage in range(stage_count)
        )
    )


def one_forward_one_backward(stage_count: int, microbatch_count: int) -> Schedule:
    """1F1B (PipeDream-flush): some forwards, then forward and backward in turn, then the last backwards."""
    _check_counts(stage_count, microbatch_count)

    def order(stage: int) -> Iterator[Computation]:
        warm_up = min(stage_count - stage - 1, microbatch_count)
        for m in range(warm_up):
            yield Computation(stage, Kind.FORWARD, m)
        for m in range(warm_up, microbatch_count):
            yield Computation(stage, Kind.FORWARD, m)
            yield Computation(stage, Kind.BACKWARD, m - warm_up)
        for m in range(microbatch_count - warm_up, microbatch_count):
            yield Computation(stage, Kind.BACKWARD, m)

    return Schedule(tuple(tuple(order(stage)) for stage in range(stage_count)))


def _check_counts(stage_count: int, microbatch_count: int) -> None:
    for name, count in (("stage_count", stage_count), ("microbatch_count", microbatch_count)):
        if count < 1:
            raise ScheduleError(f"{name}: expected at least 1, found {count}", field=name, found=count)


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
    _check_complete(orders)


def _check_complete(orders: Sequence[Sequence[Computation]]) -> None:
    """Refuse a chunk of a stage that a microbatch does not pass forward and backward, whole or split."""
    present = {computation for order in orders for computation in order}
    worked = [computation for computation in present if computation.kind is not Kind.FIXED]
    chunks = range(max((c.chunk for c in worked), default=-1) + 1)
    for microbatch in sorted({c.microbatch for c in worked}):
        for stage in range(len(orders)):
            for chunk in chunks:
                kinds = frozenset(
                    kind for kind in Kind if Computation(stage, kind, microbatch, chunk) in present
                )
                needed = kinds - {Kind.FIXED, Kind.RECOMPUTATION}
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


def _data_dependencies(
    orders: Sequence[Sequence[Computation]],
) -> Iterator[tuple[Computation, Computation]]:
    """Yield (earlier, later) for every activation, gradient and same-stage dependency."""
    present = {computation for order in orders for computation in order}
    last_chunk = max((c.chunk for c in present if c.kind is not Kind.FIXED), default=0)
    last_stage = len(orders) - 1

    def existing(stage: int, chunk: int, microbatch: int, kinds: Iterable[Kind]) -> Iterator[Computation]:
        wanted = (Computation(stage, kind, microbatch, chunk) for kind in kinds)
        return (computation for computation in wanted if computation in present)

    for later in sorted(present):
        stage, chunk, m = later.stage, later.chunk, later.microbatch
        if later.kind is Kind.FORWARD:
            if stage > 0:
                earlier = existing(stage - 1, chunk, m, [Kind.FORWARD])
            elif chunk > 0:
                earlier = existing(last_stage, chunk - 1, m, [Kind.FORWARD])
            else:
                continue
            yield from ((one, later) for one in earlier)
        elif later.kind is Kind.RECOMPUTATION:
            yield Computation(stage, Kind.FORWARD, m, chunk), later
        elif later.kind is Kind.BACKWARD_WEIGHT:
            yield Computation(stage, Kind.BACKWARD_INPUT, m, chunk), later
        elif later.kind in _GRADIENT_KINDS:
            yield from ((one, later) for one in existing(stage, chunk, m, [Kind.FORWARD, Kind.RECOMPUTATION]))
            if stage < last_stage:
                yield from ((one, later) for one in existing(stage + 1, chunk, m, _GRADIENT_KINDS))
            elif chunk < last_chunk:
                yield from ((one, later) for one in existing(0, chunk + 1, m, _GRADIENT_KINDS))


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
