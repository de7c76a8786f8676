"""The schedules that are known by name, written down as each stage's order."""

from collections.abc import Iterator

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

    Microbatches go round in groups of ``stage_count``: a group passes a stage's first chunk, then its second
    and so on; backward the other way. (Narayanan et al., Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM, SC '21, section 2.2.)

    Raises:
        ScheduleError: a count is below 1, or the microbatches are no whole number of groups.
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
    """ZB-H1: the backward is split, and the weights' part is put off to where a stage would wait.

    Stage s is s microbatches late with the weights, so that no stage holds more than 1F1B's first one. (Qi et
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
