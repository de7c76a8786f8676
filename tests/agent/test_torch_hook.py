"""The hook into torch's schedules, with stand-ins for its stages; tests/frameworks uses the real ones."""

from types import SimpleNamespace
from typing import Any

import pytest

from perseus.agent.link.computation import Kind
from perseus.agent.torch import identities_of, mark_schedule, stages_of, stepping
from tests.agent.marks_stub import MarksStub, attached


class Stage:
    """A stage as in torch 2.13; with `is_first`, it has its own backward of weights."""

    def __init__(self, stage_index: int = 0, *, is_first: bool = False) -> None:
        self.stage_index = stage_index
        self.is_first = is_first
        self.dw_builder = self.group = self.device = None
        self.group_rank, self.group_size = 0, 1
        self.submod = SimpleNamespace(modules=list)
        self.calls: list[tuple[object, ...]] = []

    def forward_one_chunk(self, fwd_chunk_id: int, args: object, kwargs: object = None) -> str:
        self.calls.append(("forward", fwd_chunk_id, args, kwargs))
        return "output"

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: object = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self.calls.append(("backward", bwd_chunk_id, loss, full_backward, last_backward))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self.calls.append(("weight", bwd_chunk_id, last_backward))


class NewerStage(Stage):
    """Has other positions, further arguments, and additional results."""

    def forward_one_chunk(self, args: object, *, fwd_chunk_id: int, stream: str = "") -> str:  # type: ignore[override]
        return f"output {fwd_chunk_id} {args} {stream}"

    def backward_one_chunk(  # type: ignore[override]
        self, loss: object, bwd_chunk_id: int, *, retain: bool = False, full_backward: bool = True
    ) -> str:
        return f"gradient {bwd_chunk_id} {loss} {retain} {full_backward}"


class Schedule:
    """Executes one microbatch with a split backward."""

    def __init__(self, stage: Any) -> None:
        self._stage = stage
        self._has_backward = True

    def step(self, *args: object, target: object = None) -> tuple[object, ...]:
        self._stage.forward_one_chunk(7, args)
        self._stage.backward_one_chunk(7, loss=None, full_backward=False)
        self._stage.backward_weight_one_chunk(7, last_backward=True)
        return args, target


def mark(schedule: Any) -> MarksStub:
    marks = MarksStub()
    stages = stages_of(schedule)
    mark_schedule(attached(marks), schedule, stages, identities_of(stages))
    return marks


@pytest.mark.parametrize(
    ("is_first", "backward"),
    [(False, [Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]), (True, [Kind.BACKWARD])],
)
def test_a_schedule_is_marked_and_works_as_before(is_first: bool, backward: list[Kind]) -> None:
    alone, schedule = Schedule(Stage(is_first=is_first)), Schedule(Stage(is_first=is_first))
    marks = mark(schedule)
    assert schedule.step("inputs", target="target") == alone.step("inputs", target="target")
    assert schedule._stage.calls == alone._stage.calls
    begun = [call[1:] for call in marks.calls if call[0] == "begin"]
    assert begun == [(kind, 7, 0) for kind in (Kind.FORWARD, *backward)]
    schedule._has_backward = False
    marks.calls.clear()
    schedule.step()
    assert marks.calls == [], "an evaluation"


def test_arguments_of_other_versions_pass_through_completely() -> None:
    schedule = Schedule(NewerStage())
    marks = mark(schedule)
    stage = schedule._stage
    assert stage.forward_one_chunk("x", fwd_chunk_id=3, stream="side") == "output 3 x side"
    assert stage.backward_one_chunk("loss", 4, retain=True) == "gradient 4 loss True True"
    assert marks.calls == [], "outside of an iteration"

    def step() -> None:
        stage.forward_one_chunk("x", fwd_chunk_id=3)
        stage.backward_one_chunk("loss", 4, full_backward=False)

    vars(schedule)["step"] = step
    again = mark(schedule)
    schedule.step()
    begun = {call[1:3] for call in again.calls if call[0] == "begin"}
    assert begun == {(Kind.FORWARD, 3), (Kind.BACKWARD_INPUT, 4)}


def without(thing: Any, attribute: str) -> Any:
    delattr(thing, attribute)
    return thing


class RenamingStage(Stage):
    """Names its parameter anew."""

    def forward_one_chunk(self, microbatch: int) -> str:  # type: ignore[override]
        raise NotImplementedError


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (object(), r"expected one of torch\.distributed\.pipelining, found object"),
        (Schedule(without(Stage(), "dw_builder")), "stage Stage: expected .* found it without dw_builder"),
        (
            without(Schedule(Stage()), "_has_backward"),
            "schedule Schedule: expected .* found it without _has_backward",
        ),
        (
            Schedule(RenamingStage()),
            "Stage: forward_one_chunk: expected a parameter 'fwd_chunk_id', found microbatch",
        ),
    ],
)
def test_unknown_objects_are_refused(schedule: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        identities_of(stages_of(schedule))


def test_the_optimizer_that_steps_is_inside_its_wrappers() -> None:
    class Optimizer:
        optimizer: object = None

        def step(self) -> None:
            pass

    inner, middle, outer = Optimizer(), Optimizer(), Optimizer()
    outer.optimizer, middle.optimizer = middle, inner
    inner.optimizer = "adamw"
    assert stepping(outer) is stepping(inner) is inner
