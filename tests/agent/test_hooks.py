"""What every framework's hook does, on the stand-ins of the hooks' own tests."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from perseus.agent.deepspeed import mark_engine
from perseus.agent.link.computation import Kind
from perseus.agent.megatron import MarkedSchedules
from perseus.agent.probe.attachment import Attachment
from perseus.agent.torch import identities_of, mark_schedule, stages_of
from tests.agent.marks_stub import MarksStub, attached, iteration_of
from tests.agent.test_deepspeed_hook import Engine
from tests.agent.test_megatron_hook import ONE_CHUNK, Megatron
from tests.agent.test_torch_hook import Schedule, Stage

Standing = tuple[Callable[..., object], list[Any], Callable[[Attachment], None]]
"""An iteration of a stand-in, or of its copy, the objects that its hook changes, and the hook."""


def megatron() -> Standing:
    standing = Megatron("0.16", ONE_CHUNK)
    hook = MarkedSchedules(standing.module, lambda: None)
    return lambda: standing.module.forward_backward_no_pipelining(), [standing.module], hook.mark


def deepspeed() -> Standing:
    engine = Engine()

    def iterate(engine: Engine = engine) -> str:
        return engine.train_batch("data")

    return iterate, [engine], lambda attachment: mark_engine(attachment, engine)


def torch() -> Standing:
    stage = Stage()
    schedule = Schedule(stage)
    stages = stages_of(schedule)

    def hook(attachment: Attachment) -> None:
        mark_schedule(attachment, schedule, stages, identities_of(stages))

    def iterate(schedule: Schedule = schedule) -> object:
        return schedule.step("inputs")

    return iterate, [schedule, stage], hook


F, B = Kind.FORWARD, Kind.BACKWARD
ORDERS = {
    megatron: [(F, 0), (F, 1), (B, 0), (B, 1)],
    deepspeed: [(F, 0), (B, 0), (F, 1), (B, 1)],
    torch: [(F, 7), (Kind.BACKWARD_INPUT, 7), (Kind.BACKWARD_WEIGHT, 7)],
}
of_every_hook = pytest.mark.parametrize("standing", ORDERS, ids=lambda make: make.__name__)


@of_every_hook
def test_every_computation_arrives_under_its_identity(standing: Callable[[], Standing]) -> None:
    marks = MarksStub()
    iterate, _, hook = standing()
    expected = iterate()
    hook(attached(marks))
    assert [iterate(), iterate()] == [expected, expected]
    iteration = iteration_of(*ORDERS[standing])
    assert marks.calls == [*iteration, ("register",), *iteration]


@of_every_hook
def test_detaching_leaves_everything_as_it_was(standing: Callable[[], Standing]) -> None:
    marks = MarksStub()
    iterate, changed, hook = standing()
    before = [(type(each), dict(vars(each))) for each in changed]
    attachment = attached(marks)
    hook(attachment)
    assert all((type(each), vars(each)) != was for each, was in zip(changed, before, strict=True))
    attachment.detach()
    assert [(type(each), dict(vars(each))) for each in changed] == before
    iterate()
    assert marks.calls == [("finish",), ("close",)]


@pytest.mark.parametrize("standing", [deepspeed, torch])
def test_a_copy_trains_itself_unmarked_and_no_cycle_keeps_the_original(
    standing: Callable[[], Standing],
) -> None:
    marks = MarksStub()
    iterate, changed, hook = standing()
    hook(attached(marks))
    copied = copy.deepcopy(changed)
    iterate(copied[0])
    assert copied[-1].calls
    assert (changed[-1].calls, marks.calls) == ([], [])
    references = [weakref.ref(each) for each in changed]
    gc.disable()
    del iterate, changed, hook
    is_any_alive = any(reference() for reference in references)
    gc.enable()
    assert not is_any_alive


@pytest.mark.parametrize("failing", ["begin_iteration", "begin", "end", "end_iteration", "register"])
@of_every_hook
def test_no_failure_of_ours_reaches_training(
    standing: Callable[[], Standing], failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    marks = MarksStub()
    marks.failing = failing
    iterate, _, hook = standing()
    expected = iterate()
    hook(attached(marks))
    assert [iterate(), iterate()] == [expected, expected]
    assert marks.calls[-1] == ("close",), "the agent brings the GPU back to stock"
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
