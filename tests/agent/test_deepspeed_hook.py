"""The hook into DeepSpeed, with a stand-in for its engine; tests/frameworks uses the real one."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from perseus.agent.deepspeed import attach, mark_engine, table_of
from perseus.agent.link.computation import Kind
from tests.agent.marks_stub import MarksStub, Tensor, attached, iteration_of

FORWARD, BACKWARD = Kind.FORWARD, Kind.BACKWARD


class Instruction:
    """One instruction of a schedule."""

    def __init__(self, **kwargs: int) -> None:
        self.kwargs = kwargs


# As DeepSpeed names them.
ForwardPass = type("ForwardPass", (Instruction,), {})
BackwardPass = type("BackwardPass", (Instruction,), {})
OptimizerStep = type("OptimizerStep", (Instruction,), {})


class TwoMicrobatches:
    """A schedule whose only buffer is used twice."""

    def steps(self) -> Iterator[list[Instruction]]:
        yield []
        yield [ForwardPass(buffer_id=0)]
        yield [BackwardPass(buffer_id=0)]
        yield [ForwardPass(buffer_id=0)]
        yield [BackwardPass(buffer_id=0), OptimizerStep()]

    def _step_to_micro_batch(self, step: int) -> tuple[int, bool]:
        return [(-1, True), (0, True), (0, False), (1, True), (1, False)][step]


class Engine:
    """Executes a schedule as DeepSpeed does: by binding the functions in its map."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.pipe_buffers: dict[str, list[Any]] = {"inputs": [None, None]}

    def _exec_forward(self, buffer_id: int) -> None:
        self.calls.append(f"F{buffer_id}")

    def _exec_backward(self, buffer_id: int) -> None:
        self.calls.append(f"B{buffer_id}")

    def _exec_optimizer_step(self, lr_kwargs: object = None) -> None:
        self.calls.append("step")

    _INSTRUCTION_MAP: dict[type, Callable[..., Any]] = {  # noqa: RUF012
        ForwardPass: _exec_forward,
        BackwardPass: _exec_backward,
        OptimizerStep: _exec_optimizer_step,
    }

    def train_batch(self, data_iter: object = None) -> str:
        self.execute()
        return f"loss of {data_iter}"

    def eval_batch(self) -> None:
        self._INSTRUCTION_MAP[ForwardPass](self, buffer_id=1)

    def execute(self) -> None:
        for step in TwoMicrobatches().steps():
            for instruction in step:
                self._INSTRUCTION_MAP[type(instruction)](self, **instruction.kwargs)


ITERATION = iteration_of((FORWARD, 0), (BACKWARD, 0), (FORWARD, 1), (BACKWARD, 1))


def test_an_iterations_work_is_the_elements_of_its_inputs() -> None:
    engine, marks = Engine(), MarksStub()
    mark_engine(attached(marks), engine)
    engine.pipe_buffers["inputs"][0] = (Tensor(100), [Tensor(20)], {"mask": Tensor(3)})
    engine.train_batch()
    assert marks.work == 2 * 123
    engine.pipe_buffers["inputs"][1] = Tensor(7)
    engine.eval_batch()
    assert marks.work == 2 * 123


def test_an_engine_works_as_before_and_evaluations_are_not_marked(caplog: pytest.LogCaptureFixture) -> None:
    marks, engine = MarksStub(), Engine()
    mark_engine(attached(marks, table=table_of(TwoMicrobatches())), engine)
    assert engine.train_batch("data") == "loss of data"
    engine.eval_batch()
    assert engine.train_batch(data_iter="more") == "loss of more"
    assert marks.calls == [*ITERATION, ("register",), *ITERATION]
    batch = ["F0", "B0", "F0", "B0", "step"]
    assert engine.calls == [*batch, "F1", *batch]
    assert not caplog.records, "the engine's table says the same"


class OtherEngine(Engine):
    """Has a grid, and none of the instructions that are marked."""

    device, grid = "cpu", Mock()
    _INSTRUCTION_MAP = {OptimizerStep: Engine._exec_optimizer_step}  # noqa: RUF012


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (object(), "expected DeepSpeed's PipelineEngine, found object"),
        (Engine(), r"engine: expected train_batch, device, grid, .* without device, grid"),
        (OtherEngine(), "expected ForwardPass and BackwardPass, found OptimizerStep"),
    ],
)
def test_an_unknown_engine_is_refused(engine: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attach(engine, job_id="gpt")
