"""Named schedules, as each stage's order."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from perseus.schedule_name import ScheduleName
from perseus.solver.computation import Computation, Kind
from perseus.solver.errors import ScheduleError
from perseus.solver.schedule import Schedule


def gpipe(stage_count: int, microbatch_count: int) -> Schedule:
    """GPipe: all forwards, then all backwards, last microbatch first."""
    _check_counts(stage_count=stage_count, microbatch_count=microbatch_count)
    return Schedule(
        tuple(
            tuple(Computation(stage, Kind.FORWARD, m) for m in range(microbatch_count))
            + tuple(Computation(stage, Kind.BACKWARD, m) for m in reversed(range(microbatch_count)))
            for stage in range(stage_count)
        )
    )


def one_forward_one_backward(stage_count: int, microbatch_count: int) -> Schedule:
    """1F1B (PipeDream-flush): some forwards, then forward and backward in turn, then the last backwards."""
    _check_counts(stage_count=stage_count, microbatch_count=microbatch_count)

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


def interleaved_one_forward_one_backward(
    stage_count: int, microbatch_count: int, chunk_count: int
) -> Schedule:
    """Interleaved 1F1B (virtual stages): every stage holds ``chunk_count`` parts of the model.

    Microbatches circulate in groups of ``stage_count``: a group passes a stage's first chunk, then its second
    and so on; backward the other way. (Narayanan et al., Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM, SC '21, section 2.2.)

    Raises:
        ScheduleError: a count is below 1, or the microbatches are not a whole number of groups.
    """
    _check_counts(stage_count=stage_count, microbatch_count=microbatch_count, chunk_count=chunk_count)
    if microbatch_count % stage_count:
        raise ScheduleError(
            f"microbatch_count: expected a multiple of {stage_count}, the number of stages, "
            f"found {microbatch_count}",
            field="microbatch_count",
            found=microbatch_count,
        )
    visit_count = microbatch_count * chunk_count

    def visit(stage: int, kind: Kind, number: int) -> Computation:
        group, within = divmod(number, stage_count * chunk_count)
        chunk, place = divmod(within, stage_count)
        if kind is Kind.BACKWARD:
            chunk = chunk_count - 1 - chunk
        return Computation(stage, kind, group * stage_count + place, chunk)

    def order(stage: int) -> Iterator[Computation]:
        warm_up = min(2 * (stage_count - stage - 1) + (chunk_count - 1) * stage_count, visit_count)
        for n in range(visit_count + warm_up):
            if n < visit_count:
                yield visit(stage, Kind.FORWARD, n)
            if n >= warm_up:
                yield visit(stage, Kind.BACKWARD, n - warm_up)

    return Schedule(tuple(tuple(order(stage)) for stage in range(stage_count)))


def early_recomputation(stage_count: int, microbatch_count: int) -> Schedule:
    """1F1B with activation recomputation that does not wait for the gradient.

    A microbatch is recomputed just before its backward, except where the backward follows its forward at
    once and the activations are still there. (Lai et al., Merak, TPDS '23.)

    Raises:
        ScheduleError: a count is below 1.
    """
    orders = one_forward_one_backward(stage_count, microbatch_count).orders

    def order(stage: int) -> Iterator[Computation]:
        before: Computation | None = None
        for c in orders[stage]:
            if c.kind is Kind.BACKWARD and before != Computation(stage, Kind.FORWARD, c.microbatch):
                yield Computation(stage, Kind.RECOMPUTATION, c.microbatch)
            yield c
            before = c

    return Schedule(tuple(tuple(order(stage)) for stage in range(stage_count)))


def zero_bubble_h1(stage_count: int, microbatch_count: int) -> Schedule:
    """ZB-H1: the backward is split, and its weight part is postponed to where a stage would wait.

    Stage s lags by s microbatches with the weights, so that no stage holds more than 1F1B's first one. (Qi et
    al., Zero Bubble Pipeline Parallelism, ICLR '24, section 3.1.)

    Raises:
        ScheduleError: a count is below 1.
    """
    _check_counts(stage_count=stage_count, microbatch_count=microbatch_count)

    def order(stage: int) -> Iterator[Computation]:
        warm_up = min(stage_count - stage - 1, microbatch_count)
        for m in range(warm_up):
            yield Computation(stage, Kind.FORWARD, m)
        for m in range(microbatch_count):
            if m + warm_up < microbatch_count:
                yield Computation(stage, Kind.FORWARD, m + warm_up)
            yield Computation(stage, Kind.BACKWARD_INPUT, m)
            if m >= stage:
                yield Computation(stage, Kind.BACKWARD_WEIGHT, m - stage)
        for m in range(max(0, microbatch_count - stage), microbatch_count):
            yield Computation(stage, Kind.BACKWARD_WEIGHT, m)

    return Schedule(tuple(tuple(order(stage)) for stage in range(stage_count)))


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ScheduleError(f"{name}: expected at least 1, found {count}", field=name, found=count)


def zero_bubble_v(stage_count: int, microbatch_count: int) -> Schedule:
    """ZBV: two chunks per stage in the shape of a V, the backward split, no bubble if all take the same time.

    Activations pass the first chunks from the first stage to the last, and the second chunks back. (Qi et
    al., Pipeline Parallelism with Controllable Memory, NeurIPS '24, section 3; Zero Bubble Pipeline
    Parallelism, ICLR '24.)

    Raises:
        ScheduleError: a count is below 1.
    """
    _check_counts(stage_count=stage_count, microbatch_count=microbatch_count)
    # The warm-up needs a minimum of microbatches: generate that many, and drop the excess.
    count = max(2 * stage_count - 1, microbatch_count)

    def order(stage: int) -> Iterator[Computation]:
        turns = _Turns(stage)
        behind = stage_count - stage
        for _ in range(2 * behind - 1):
            yield turns.forward(0)
        for _ in range(stage):
            yield turns.forward(1)
            yield turns.forward(0)
        for _ in range(behind):
            yield turns.forward(1)
            yield from turns.split_backward(1)
        while turns.forward_counts[1] < turns.forward_counts[0] or turns.forward_counts[0] < count:
            if turns.forward_counts[0] < count:
                yield turns.forward(0)
            yield from turns.split_backward(0)
            yield turns.forward(1)
            yield from turns.split_backward(1)
        for _ in range(stage):
            yield turns.input_backward(0)
            yield turns.input_backward(1)
        for _ in range(behind):
            yield turns.input_backward(0)
            yield turns.weight_backward(0)
        while turns.weight_counts[1] < turns.input_counts[1]:
            yield turns.weight_backward(1)
        while turns.weight_counts[0] < turns.input_counts[0]:
            yield turns.weight_backward(0)

    return _v_shaped(stage_count, microbatch_count, order)


class _Turns:
    """One stage of two chunks: the next microbatch of each kind."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self.forward_counts = [0, 0]
        self.input_counts = [0, 0]
        self.weight_counts = [0, 0]

    def forward(self, chunk: int) -> Computation:
        return self._next(Kind.FORWARD, self.forward_counts, chunk)

    def input_backward(self, chunk: int) -> Computation:
        return self._next(Kind.BACKWARD_INPUT, self.input_counts, chunk)

    def weight_backward(self, chunk: int) -> Computation:
        return self._next(Kind.BACKWARD_WEIGHT, self.weight_counts, chunk)

    def whole_backward(self, chunk: int) -> Computation:
        self.weight_counts[chunk] += 1
        return self._next(Kind.BACKWARD, self.input_counts, chunk)

    def split_backward(self, chunk: int) -> Iterator[Computation]:
        yield self.input_backward(chunk)
        yield self.weight_backward(chunk)

    def _next(self, kind: Kind, counts: list[int], chunk: int) -> Computation:
        counts[chunk] += 1
        return Computation(self._stage, kind, counts[chunk] - 1, chunk)


def _v_shaped(
    stage_count: int, microbatch_count: int, order: Callable[[int], Iterable[Computation]]
) -> Schedule:
    """Return the schedule of these orders without the excess microbatches."""
    there = tuple((stage, 0) for stage in range(stage_count))
    back = tuple((stage, 1) for stage in reversed(range(stage_count)))
    return Schedule(
        tuple(
            tuple(c for c in order(stage) if c.microbatch < microbatch_count) for stage in range(stage_count)
        ),
        (there + back,),
    )


def dual_pipe_v(stage_count: int, microbatch_count: int) -> Schedule:
    """DualPipeV: two chunks per stage in the shape of a V, with alternating forwards and backwards of both.

    Most backwards are whole; those at the begin and the end, where stages would wait, are split. Where
    frameworks overlap a forward with a backward, the forward comes first here. (DeepSeek-AI, DeepSeek-V3
    technical report, 2024; its DualPipe cut in half.)

    Raises:
        ScheduleError: a count is below 1, or there are fewer than two microbatches per stage.
    """
    _check_counts(stage_count=stage_count, microbatch_count=microbatch_count)
    if microbatch_count < 2 * stage_count:
        raise ScheduleError(
            f"microbatch_count: expected at least {2 * stage_count}, two for each stage, "
            f"found {microbatch_count}",
            field="microbatch_count",
            found=microbatch_count,
        )

    def order(stage: int) -> Iterator[Computation]:
        turns = _Turns(stage)
        behind = stage_count - stage - 1
        for _ in range(2 * behind):
            yield turns.forward(0)
        for _ in range(stage + 1):
            yield turns.forward(0)
            yield turns.forward(1)
        for _ in range(behind):
            yield from turns.split_backward(1)
            yield turns.forward(1)
        for _ in range(microbatch_count - 2 * stage_count + stage + 1):
            yield turns.forward(0)
            yield turns.whole_backward(1)
            yield turns.forward(1)
            yield turns.whole_backward(0)
        for _ in range(behind):
            yield turns.whole_backward(1)
            yield turns.forward(1)
            yield turns.whole_backward(0)
        # From the middle on, run only what others wait for; the weights follow when nothing else is left.
        chunks = [1, 0] * (stage + 1)
        put_off = []
        for place, chunk in enumerate(chunks):
            if place <= stage:
                yield turns.whole_backward(chunk)
            else:
                yield turns.input_backward(chunk)
                put_off.append(chunk)
        for _ in range(behind):
            yield turns.weight_backward(put_off.pop(0))
            yield turns.input_backward(0)
            put_off.append(0)
        for chunk in put_off:
            yield turns.weight_backward(chunk)

    return _v_shaped(stage_count, microbatch_count, order)


class _Builder(NamedTuple):
    """The generator of a schedule with a fixed number of chunks.

    Attributes:
        chunk_count: model chunks on each stage.
        max_kinds: kinds of computation per chunk and microbatch, at most.
    """

    build: Callable[[int, int], Schedule]
    chunk_count: int
    max_kinds: int


_INTERLEAVED = ScheduleName.INTERLEAVED_ONE_FORWARD_ONE_BACKWARD

_BUILDERS: Mapping[ScheduleName, _Builder] = {
    ScheduleName.GPIPE: _Builder(gpipe, 1, 2),
    ScheduleName.ONE_FORWARD_ONE_BACKWARD: _Builder(one_forward_one_backward, 1, 2),
    ScheduleName.EARLY_RECOMPUTATION: _Builder(early_recomputation, 1, 3),
    ScheduleName.ZERO_BUBBLE_H1: _Builder(zero_bubble_h1, 1, 3),
    ScheduleName.ZERO_BUBBLE_V: _Builder(zero_bubble_v, 2, 3),
    ScheduleName.DUAL_PIPE_V: _Builder(dual_pipe_v, 2, 3),
}


def named_schedule(
    name: ScheduleName, stage_count: int, microbatch_count: int, chunk_count: int = 0
) -> Schedule:
    """Return a schedule by its name.

    ``chunk_count``: model chunks on each stage. Interleaved 1F1B needs it; any other schedule has its own
    number, for which 0 is accepted.

    Raises:
        ScheduleError: a count is impossible for the schedule.
    """
    if name is _INTERLEAVED:
        return interleaved_one_forward_one_backward(stage_count, microbatch_count, chunk_count)
    build, own_chunk_count, _ = _BUILDERS[name]
    if chunk_count not in (0, own_chunk_count):
        raise ScheduleError(
            f"chunk_count: expected {own_chunk_count} on each stage for {name}, found {chunk_count}",
            field="chunk_count",
            found=chunk_count,
        )
    return build(stage_count, microbatch_count)


def max_computations(
    name: ScheduleName, stage_count: int, microbatch_count: int, chunk_count: int = 0
) -> int:
    """Return an upper bound on the computations of such a schedule, and on the work to generate it."""
    if name is _INTERLEAVED:
        return 2 * chunk_count * stage_count * microbatch_count
    if name is ScheduleName.ZERO_BUBBLE_V:
        microbatch_count = max(microbatch_count, 2 * stage_count - 1)
    _, own_chunk_count, max_kinds = _BUILDERS[name]
    return max_kinds * own_chunk_count * stage_count * microbatch_count
