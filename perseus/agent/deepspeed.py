"""Attach to DeepSpeed's `PipelineEngine`: one line.

    from perseus.agent.deepspeed import attach

    engine, *_ = deepspeed.initialize(model=PipelineModule(...), ...)
    with attach(engine, job_id="gpt"):
        for _ in range(iterations):
            engine.train_batch(batches)

The seam is the engine's instruction map, which says what executes each instruction of its schedule; it is
replaced on the instance. An iteration is one `train_batch`, the optimizer's step included; `eval_batch` is
not marked. An instruction names its buffer and not its microbatch, and buffers are used again: microbatches
are counted, as each stage executes its forwards and its backwards in their order. `TrainSchedule`, which
knows the microbatch of each of its steps, is the table that this is checked against.
"""

from collections.abc import Callable, Mapping
from typing import Any

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.probe.attachment import Attachment, Connect
from perseus.agent.probe.client import Probe
from perseus.agent.probe.placement import Placement, gather_over, gpu_uuid
from perseus.agent.probe.torch_marks import capture_check, connect_marks

# DeepSpeed's instructions that are computations, by the names of their classes.
_KINDS = {"ForwardPass": Kind.FORWARD, "BackwardPass": Kind.BACKWARD}


def attach(
    engine: Any,
    *,
    job_id: str,
    connect: Connect = Probe.connect,
    max_slowdown_percent: float = 0.0,
) -> Attachment:
    """Attach this rank's engine to the agent of its node. Called by all ranks of the job, before training.

    `max_slowdown_percent`: how much slower than T_min plans may be. `connect` stands for `Probe.connect` in
    tests and demonstrations.

    ValueError if `engine` is no `PipelineEngine`. Without an agent that is said once, and training goes on as
    before.
    """
    if not hasattr(engine, "_INSTRUCTION_MAP"):
        raise ValueError(f"engine: expected DeepSpeed's PipelineEngine, found {type(engine).__name__}")
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    placement = _placement(engine)
    schedule = TrainSchedule(engine.micro_batches, engine.num_stages, engine.stage_id)
    attachment = Attachment(
        placement,
        connect_marks(connect, job_id, placement, engine.device),
        gather_over(engine.grid.get_pipe_parallel_group()),
        table=table_of(schedule),
        max_slowdown_percent=max_slowdown_percent,
        is_capturing=capture_check(engine.device),
    )
    mark_engine(attachment, engine)
    return attachment


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


def table_of(schedule: Any) -> list[Computation]:
    """The order that DeepSpeed's schedule gives its stage: a step has one computation at most."""
    return [
        Computation(kind, schedule._step_to_micro_batch(step)[0])
        for step, instructions in enumerate(schedule.steps())
        for instruction in instructions
        if (kind := _KINDS.get(type(instruction).__name__)) is not None
    ]


def mark_engine(attachment: Attachment, engine: Any) -> None:
    """Put marks around an engine's training iterations and their computations."""
    # How many computations of each kind the iteration has executed.
    counts = dict.fromkeys(_KINDS.values(), 0)
    train_batch = engine.train_batch

    def train_batch_marked(*args: Any, **kwargs: Any) -> Any:
        counts.update(dict.fromkeys(counts, 0))
        attachment.begin_iteration()
        loss = train_batch(*args, **kwargs)
        attachment.end_iteration()
        return loss

    def marked(execute: Callable[..., None], kind: Kind) -> Callable[..., None]:
        # The engine binds what it finds in the map to itself.
        def execute_marked(engine: Any, *args: Any, **kwargs: Any) -> None:
            microbatch = counts[kind]
            counts[kind] += 1
            attachment.begin(kind, microbatch)
            execute(engine, *args, **kwargs)
            attachment.end(kind, microbatch)

        return execute_marked

    instructions: Mapping[type, Callable[..., None]] = engine._INSTRUCTION_MAP
    marked_instructions = {
        instruction: marked(execute, kind) if (kind := _KINDS.get(instruction.__name__)) else execute
        for instruction, execute in instructions.items()
    }
    attachment.replace(engine, "_INSTRUCTION_MAP", marked_instructions)
    attachment.replace(engine, "train_batch", train_batch_marked)
