"""Attach to DeepSpeed's `PipelineEngine`, with one line.

    from perseus.agent.deepspeed import attach

    engine, *_ = deepspeed.initialize(model=PipelineModule(...), ...)
    with attach(engine, job_id="gpt"):
        for _ in range(iterations):
            engine.train_batch(batches)

The hook replaces the instance's instruction map, which maps each instruction of the engine's schedule to the
function that executes it. An iteration is one `train_batch`, including the optimizer's step; `eval_batch` is
not marked. An instruction names its buffer and not its microbatch, and buffers are reused. So the hook counts
microbatches, as each stage executes its forwards and its backwards in order, and checks the result against
`TrainSchedule`, which knows the microbatch of each of its steps.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.probe.attachment import Attachment, Identify, never_raises
from perseus.agent.probe.client import Probe
from perseus.agent.probe.exchange import StoreExchange
from perseus.agent.probe.framework import check_attributes
from perseus.agent.probe.job_order import table_if_any
from perseus.agent.probe.marks import Connect
from perseus.agent.probe.placement import Placement, gpu_uuid
from perseus.agent.probe.stage_work import StageWork, stage_work, while_alive
from perseus.agent.probe.tested_versions import note_versions
from perseus.agent.probe.torch_marks import connect_marks
from perseus.agent.probe.unmarked_steps import watch_steps

# DeepSpeed's computing instructions, by class name.
_KINDS = {"ForwardPass": Kind.FORWARD, "BackwardPass": Kind.BACKWARD}
_OF_GRIDS = (
    "get_pipe_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_pipe_parallel_rank",
    "get_pipe_parallel_world_size",
    "get_slice_parallel_rank",
    "get_slice_parallel_world_size",
)


@never_raises
def attach(
    engine: Any,
    *,
    job_id: str,
    connect: Connect = Probe.connect,
    max_slowdown_percent: float = 0.0,
) -> Attachment:
    """Attach this rank's engine to the agent of its node. Called by all ranks of the job, before training.

    `max_slowdown_percent`: how much slower than stock plans may be. `connect` replaces `Probe.connect` in
    tests and demonstrations.

    Raises ValueError if `engine` is no `PipelineEngine`, or lacks attributes that the hook needs, as in other
    versions. Without an agent the hook logs one line, and training continues as before.
    """
    if not hasattr(engine, "_INSTRUCTION_MAP"):
        raise ValueError(f"engine: expected DeepSpeed's PipelineEngine, found {type(engine).__name__}")
    check_attributes(engine, "engine", "train_batch", "device", "grid")
    check_attributes(engine.grid, "engine.grid", *_OF_GRIDS)
    names = [instruction.__name__ for instruction in engine._INSTRUCTION_MAP]
    if not set(_KINDS) <= set(names):
        raise ValueError(
            f"engine._INSTRUCTION_MAP: expected {' and '.join(_KINDS)}, found {', '.join(names) or 'none'}"
        )
    import deepspeed
    import torch

    note_versions("deepspeed", str(deepspeed.__version__), str(torch.__version__))
    placement = _placement(engine)
    attachment = Attachment(
        placement,
        connect_marks(connect, job_id, placement, engine.device),
        StoreExchange(placement.pipeline, placement.tensor),
        table=table_if_any(lambda: _table(engine)),
        work=while_alive(work_of, engine),
        max_slowdown_percent=max_slowdown_percent,
    )

    def put_marks() -> None:
        mark_engine(attachment, engine)
        watch_steps(attachment, lambda: "train_batch() of the attached engine is not called", engine)

    return attachment.put_marks(put_marks)


def _placement(engine: Any) -> Placement:
    grid = engine.grid
    return Placement(
        pipeline=grid.get_data_parallel_rank(),
        pipeline_count=grid.get_data_parallel_world_size(),
        stage=grid.get_pipe_parallel_rank(),
        stage_count=grid.get_pipe_parallel_world_size(),
        tensor=grid.get_slice_parallel_rank(),
        tensor_count=grid.get_slice_parallel_world_size(),
        gpu_uuid=gpu_uuid(engine.device),
    )


def work_of(engine: Any) -> StageWork:
    """Return the work of the engine's stage (`probe.stage_work`), with the configured microbatch
    size."""
    import deepspeed
    import torch

    return stage_work(
        [engine.module],
        torch=str(torch.__version__),
        deepspeed=str(deepspeed.__version__),
        microbatch_size=engine.train_micro_batch_size_per_gpu(),
    )


def _table(engine: Any) -> list[Computation]:
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    return table_of(TrainSchedule(engine.micro_batches, engine.num_stages, engine.stage_id))


def table_of(schedule: Any) -> list[Computation]:
    """Return the stage's order in DeepSpeed's schedule; a step has at most one computation."""
    return [
        Computation(kind, schedule._step_to_micro_batch(step)[0])
        for step, instructions in enumerate(schedule.steps())
        for instruction in instructions
        if (kind := _KINDS.get(type(instruction).__name__)) is not None
    ]


def mark_engine(attachment: Attachment, engine: Any) -> None:
    """Put marks around an engine's training iterations and their computations."""
    # Computations of each kind in the iteration so far.
    counts = dict.fromkeys(_KINDS.values(), 0)

    def is_training() -> bool:
        counts.update(dict.fromkeys(counts, 0))
        return True

    def identify(kind: Kind) -> Identify:
        def identify_next(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Kind, int, int]:
            counts[kind] += 1
            if kind is Kind.FORWARD:  # sequences of other lengths have other inputs
                attachment.count_work(lambda: args[0].pipe_buffers["inputs"][kwargs["buffer_id"]])
            return kind, counts[kind] - 1, 0

        return identify_next

    # The engine binds the functions in the map to itself.
    instructions: Mapping[type, Any] = engine._INSTRUCTION_MAP
    marked_instructions = {
        instruction: attachment.marked(execute, identify(kind))
        if (kind := _KINDS.get(instruction.__name__))
        else execute
        for instruction, execute in instructions.items()
    }
    train_batch = partial(attachment.marked_iteration, is_training=is_training)
    attachment.replace_methods(
        engine, {"train_batch": train_batch}, {"_INSTRUCTION_MAP": marked_instructions}
    )
