"""The hooks into Megatron-Core, with stand-ins for its functions; tests/frameworks uses the real ones."""

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from perseus.agent.link.computation import Kind
from perseus.agent.megatron import (
    MarkedSchedules,
    MarkedTimers,
    OfThisProcess,
    refuse_shared_weights,
    wrap_train,
)
from perseus.agent.probe.attachment import Attachment
from perseus.agent.probe.placement import Placement
from tests.agent.marks_stub import MarksStub, Tensor, attached, iteration_of

FORWARD, BACKWARD = Kind.FORWARD, Kind.BACKWARD
ITERATIONS = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)
# (is forward, microbatch, virtual stage)
Step = tuple[bool, int, int | None]
ONE_CHUNK: list[Step] = [(True, 0, None), (True, 1, None), (False, 0, None), (False, 1, None)]
TWO_CHUNKS: list[Step] = [
    (True, 0, 0),
    (True, 1, 0),
    (True, 0, 1),
    (False, 0, 1),
    (True, 1, 1),
    (False, 1, 1),
    (False, 0, 0),
    (False, 1, 0),
]


class Megatron:
    """A stand-in for `schedules`, which executes `steps` as Megatron does: by look-ups in the module."""

    def __init__(self, version: str, steps: Sequence[Step]) -> None:
        self.virtual_stage: int | None = None
        self.model: Any = None
        self.module = SimpleNamespace(
            forward_step=_FORWARD_STEPS[version],
            backward_step=_backward_step,
            **dict.fromkeys(ITERATIONS, self.run),
        )
        self.input: Any = None
        self._calls_with_stage = version != "0.12"
        self._steps = steps

    def run(self, *, forward_only: bool = False) -> str:
        outputs: dict[tuple[int, int | None], Any] = {}
        for is_forward, microbatch, stage in self._steps:
            if is_forward:
                self.virtual_stage = stage
                reported = {"vp_stage": stage} if self._calls_with_stage else {}
                outputs[microbatch, stage], tokens = self.module.forward_step(
                    None, None, self.model, 2, self.input, [], None, current_microbatch=microbatch, **reported
                )
                assert tokens == 7
            elif not forward_only:
                self.virtual_stage = None
                gradient = self.module.backward_step(None, outputs.pop((microbatch, stage)), None, None, None)
                assert gradient == "gradient"
        return "losses"


def _forward_step_of_0_12(
    forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: Any, input_tensor: Any,
    forward_data_store: Any, config: Any, collect_non_loss_data: Any = False,
    checkpoint_activations_microbatch: Any = None, is_first_microbatch: Any = False,
    current_microbatch: Any = None, encoder_decoder_xattn: Any = False,
) -> tuple[Any, int]:  # fmt: skip
    return object(), 7


def _forward_step_of_0_16(
    step: Any,
    data_iterator: Any,
    model: Any,
    num_microbatches: Any,
    input_tensor: Any,
    *_more: Any,
    current_microbatch: Any = None,
    vp_stage: Any = None,
) -> tuple[Any, int]:
    # With several inputs, a stage's output is a list.
    return [Tensor(100)], 7


def _backward_step(
    input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, model_type: Any, config: Any
) -> str:
    return "gradient"


_FORWARD_STEPS = {"0.12": _forward_step_of_0_12, "0.16": _forward_step_of_0_16}


def marked(steps: Sequence[Step]) -> list[tuple[Any, ...]]:
    return iteration_of(
        *((FORWARD if is_forward else BACKWARD, number, stage or 0) for is_forward, number, stage in steps)
    )


def attached_schedules(
    steps: Sequence[Step] = ONE_CHUNK, version: str = "0.16", **functions: Callable[..., Any]
) -> tuple[MarksStub, Megatron]:
    """Return a marked stand-in; `functions` replace the module's before that."""
    marks, megatron = MarksStub(), Megatron(version, steps)
    vars(megatron.module).update(functions)
    MarkedSchedules(megatron.module, lambda: megatron.virtual_stage).mark(attached(marks))
    return marks, megatron


@pytest.mark.parametrize("version", _FORWARD_STEPS)
@pytest.mark.parametrize("steps", [ONE_CHUNK, TWO_CHUNKS])
@pytest.mark.parametrize("iteration", ITERATIONS)
def test_schedules_are_marked(version: str, steps: list[Step], iteration: str) -> None:
    marks, megatron = attached_schedules(steps, version)
    for _ in range(2):
        assert getattr(megatron.module, iteration)() == "losses"
    assert marks.calls == [*marked(steps), ("register",), *marked(steps)]


def test_arguments_are_found_by_position_or_name() -> None:
    marks, module = MarksStub(), Megatron("0.12", []).module

    def run() -> None:
        output, _ = module.forward_step(None, None, None, 2, None, [], None, False, None, False, 5)
        module.backward_step(
            output_tensor=output, input_tensor=None, output_tensor_grad=None, model_type=None, config=None
        )

    module.forward_backward_no_pipelining = run
    MarkedSchedules(module, lambda: None).mark(attached(marks))
    module.forward_backward_no_pipelining()
    assert marks.calls == [*marked([(True, 5, 0), (False, 5, 0)]), ("register",)]


def test_an_iteration_that_fails_is_not_ended_and_the_next_one_is_whole() -> None:
    errors = [RuntimeError("out of memory")]

    def fail_once(
        input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, model_type: Any, config: Any
    ) -> str:
        if errors:
            raise errors.pop()
        return "gradient"

    marks, megatron = attached_schedules(backward_step=fail_once)
    with pytest.raises(RuntimeError, match="out of memory"):
        megatron.module.forward_backward_no_pipelining()
    assert marks.calls[-1] == ("begin", BACKWARD, 0, 0)
    marks.calls.clear()
    megatron.module.forward_backward_no_pipelining()
    assert marks.calls == [*marked(ONE_CHUNK), ("register",)]


def test_an_unknown_megatron_is_refused() -> None:
    module = Megatron("0.16", ONE_CHUNK).module
    del module.forward_backward_no_pipelining
    with pytest.raises(
        ValueError, match=r"pipeline_parallel\.schedules: .* without forward_backward_no_pipelining$"
    ):
        MarkedSchedules(module, lambda: None)
    module = Megatron("0.16", ONE_CHUNK).module
    module.forward_step = lambda model, microbatch: None
    with pytest.raises(
        ValueError, match="expected a parameter 'current_microbatch', found model, microbatch"
    ):
        MarkedSchedules(module, lambda: None)


def test_an_iterations_work_is_the_size_of_its_inputs_or_on_the_first_stage_outputs() -> None:
    marks, megatron = attached_schedules()
    megatron.module.forward_backward_no_pipelining()
    assert marks.work == 2 * 100
    megatron.module.forward_backward_no_pipelining(forward_only=True)
    megatron.input = [Tensor(50), None]
    megatron.module.forward_backward_no_pipelining()
    assert marks.work == 2 * 100 + 2 * 50


def test_forward_only_iterations_are_not_marked_wherever_the_argument_is() -> None:
    def run(step: Any, forward_only: bool = False) -> str:
        return megatron.run(forward_only=forward_only)

    marks, megatron = attached_schedules(forward_backward_no_pipelining=run)
    assert megatron.module.forward_backward_no_pipelining(None, True) == "losses"
    assert megatron.module.forward_backward_no_pipelining(None, forward_only=True) == "losses"
    assert marks.calls == []


def test_an_unknown_output_ends_marking_but_not_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def forward_step(current_microbatch: int, vp_stage: int | None) -> None:
        return None

    def run() -> None:
        for microbatch in range(2):
            assert megatron.module.forward_step(current_microbatch=microbatch, vp_stage=None) is None

    marks, megatron = attached_schedules(forward_step=forward_step, forward_backward_no_pipelining=run)
    for _ in range(2):
        megatron.module.forward_backward_no_pipelining()
    assert marks.calls[-1] == ("close",)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


class UsersTimers:
    """Existing timers."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        def note(edge: str) -> Callable[..., None]:
            return lambda barrier=False: self.calls.append((name, edge, log_level, barrier))

        return SimpleNamespace(start=note("start"), stop=note("stop"), elapsed=lambda: 1.5)

    def log(self, names: Sequence[str]) -> str:
        return f"times of {', '.join(names)}"


def run_with_timers(timers: Any, steps: Sequence[Step]) -> None:
    """Start and stop timers as Megatron does."""
    timers("forward-backward", log_level=1).start(barrier=True)
    for is_forward, _, _ in steps:
        name = "forward-compute" if is_forward else "backward-compute"
        timers("forward-recv", log_level=2).start()
        timers("forward-recv").stop()
        timers(name, log_level=2).start()
        timers(name).stop()
    timers("forward-backward").stop()


def test_timers_are_marked_and_existing_ones_keep_working() -> None:
    marks, users, alone = MarksStub(), UsersTimers(), UsersTimers()
    timers = MarkedTimers(attached(marks), users, lambda: True)
    for _ in range(2):
        run_with_timers(timers, ONE_CHUNK)
        run_with_timers(alone, ONE_CHUNK)
    assert marks.calls == [*marked(ONE_CHUNK), ("register",), *marked(ONE_CHUNK)]
    assert users.calls == alone.calls
    assert timers.log(["forward-backward"]) == "times of forward-backward"
    assert timers("forward-compute").elapsed() == 1.5
    assert timers("forward-compute").start() is alone("forward-compute").start(), "results pass unchanged"


@pytest.mark.parametrize(
    ("runs", "is_training", "expected"),
    [
        ([ONE_CHUNK], True, [*marked(ONE_CHUNK), ("register",)]),
        ([ONE_CHUNK[:2]], False, []),
        (
            [ONE_CHUNK[:2], ONE_CHUNK],
            True,
            [*marked(ONE_CHUNK[:2])[:-1], *marked(ONE_CHUNK), ("register",)],
        ),
    ],
    ids=["training", "an evaluation", "forwards alone are no iteration to register"],
)
def test_timers_are_marked_without_existing_ones(
    runs: list[list[Step]], is_training: bool, expected: list[tuple[Any, ...]]
) -> None:
    marks = MarksStub()
    timers = MarkedTimers(attached(marks), None, lambda: is_training)
    for steps in runs:
        run_with_timers(timers, steps)
    assert marks.calls == expected


def test_a_copied_configuration_has_a_copy_of_the_timers_before() -> None:
    timers = MarkedTimers(attached(MarksStub()), UsersTimers(), lambda: True)
    assert type(copy.deepcopy(SimpleNamespace(timers=timers)).timers) is UsersTimers


class Loop:
    """A stand-in for Megatron-LM's `megatron.training.training`, with its calls in order."""

    def __init__(self, megatron: Megatron, iterations: int, ends: BaseException | None = None) -> None:
        self._megatron = megatron
        self._iterations = iterations
        self._ends = ends
        self.train = self._train

    def pretrain(self, config: Any) -> tuple[int, int]:
        """As in Megatron-LM, look up `train` in the module, and pass all arguments by position."""
        return self.train(None, ["chunk"], None, None, None, None, None, config, {}, None)

    def _train(
        self, forward_step_func: Any, model: Any, optimizer: Any, opt_param_scheduler: Any,
        train_data_iterator: Any, valid_data_iterator: Any, process_non_loss_data_func: Any, config: Any,
        checkpointing_context: Any, non_loss_data_func: Any, inference_model: Any = None,
    ) -> tuple[int, int]:  # fmt: skip
        config.timers = "Megatron-LM's own"
        run = self._megatron.module.forward_backward_pipelining_without_interleaving
        for _ in range(self._iterations):
            run()
        config.timers = None
        run(forward_only=True)
        config.timers = "Megatron-LM's own"
        if self._ends is not None:
            raise self._ends
        return self._iterations, 0


@pytest.mark.parametrize("ends", [None, SystemExit(0)], ids=["to the end", "to an interval's exit"])
def test_megatron_lms_loop_is_attached_while_it_trains(ends: BaseException | None) -> None:
    marks, megatron, config = MarksStub(), Megatron("0.16", ONE_CHUNK), SimpleNamespace(timers=None)
    untouched = dict(vars(megatron.module))
    loop = Loop(megatron, 2, ends)
    configs = []

    def attach_config(config: Any) -> Attachment:
        configs.append(config)
        attachment = attached(marks)
        MarkedSchedules(megatron.module, lambda: None).mark(attachment)
        return attachment

    wrap_train(loop, attach_config)
    with pytest.raises(SystemExit) if ends else nullcontext():
        assert loop.pretrain(config) == (2, 0)
    assert configs == [config]
    iteration, finished = marked(ONE_CHUNK), [] if ends else [("finish",)]
    assert marks.calls == [*iteration, ("register",), *iteration, *finished, ("close",)]
    assert vars(megatron.module) == untouched


def test_a_loop_that_cannot_be_attached_trains_as_before(caplog: pytest.LogCaptureFixture) -> None:
    def refused(_config: Any) -> Attachment:
        raise ValueError("no parallel state")

    loop = Loop(Megatron("0.16", ONE_CHUNK), 2)
    wrap_train(loop, refused)
    assert loop.pretrain(SimpleNamespace(timers=None)) == (2, 0)
    assert caplog.messages == ["not attached, training continues at stock clocks: no parallel state"]


def test_a_sharded_model_is_not_marked_and_trains_as_before(caplog: pytest.LogCaptureFixture) -> None:
    marks, megatron = attached_schedules()
    sharded = type("TorchFullyShardedDataParallel", (), {})()
    megatron.model = SimpleNamespace(modules=lambda: [sharded])
    for _ in range(2):
        assert megatron.module.forward_backward_no_pipelining() == "losses"
    assert marks.calls == [("begin_iteration",), ("close",)]
    (message,) = caplog.messages
    assert "training continues at stock clocks: chunk 0: expected at most a DistributedData" in message


@pytest.mark.parametrize(
    ("of_experts", "gathering", "refusal"),
    [
        ((1, 2), {}, ""),
        ((2, 1), {}, ""),
        ((2, 2), {}, "found them on 4"),
        ((1, 1), {"gtp_weight_remat_size": 1}, ""),
        (
            (1, 1),
            {"expert_gtp_weight_remat_size": 2},
            "expert_gtp_weight_remat_size: expected 1, found 2 ranks",
        ),
    ],
)
def test_weights_that_ranks_or_replicas_share_are_refused(
    of_experts: tuple[int, int], gathering: dict[str, int], refusal: str
) -> None:
    placement = Placement(0, 2, 0, 1, 0, 2)
    refuse_shared_weights(SimpleNamespace(), placement)
    names = ("expert_model_parallel_size", "expert_tensor_parallel_size")
    config = SimpleNamespace(**dict(zip(names, of_experts, strict=True)), **gathering)
    with pytest.raises(ValueError, match=refusal) if refusal else nullcontext():
        refuse_shared_weights(config, placement)


def test_a_loop_without_a_configuration_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"megatron\.training\.training: train: expected a parameter 'config'"
    ):
        wrap_train(SimpleNamespace(train=lambda model: None), lambda config: attached(MarksStub()))


def test_a_rank_that_attaches_for_every_virtual_stage_is_attached_once() -> None:
    attachment = attached(MarksStub())
    assert OfThisProcess.attachment("gpt", "schedules") is None
    OfThisProcess.keep(attachment, "gpt", "schedules")
    assert OfThisProcess.attachment("gpt", "schedules") is attachment
    with pytest.raises(ValueError, match=r"expected job 'gpt' and seam 'schedules'.*found 'bert'"):
        OfThisProcess.attachment("bert", "schedules")
    attachment.detach()
    assert OfThisProcess.attachment("bert", "schedules") is None
