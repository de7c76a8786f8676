"""Attach to any schedule of `torch.distributed.pipelining`, or to a whole model, with one line.

    from perseus.agent.torch import attach

    with attach(schedule, job_id="gpt"):
        for inputs, targets in batches:
            schedule.step(inputs, target=targets)
            ...

The hook patches the stage objects: every schedule (GPipe, 1F1B, interleaved 1F1B, looped BFS, interleaved
zero-bubble, ZBV, DualPipeV) calls their `forward_one_chunk`, `backward_one_chunk` and
`backward_weight_one_chunk` for a computation. An iteration is one `schedule.step`; evaluations
(`schedule.eval`) are not marked. A process's pipeline rank is the stage, its stage objects by rising
`stage_index` are the chunks, and activations flow from one `stage_index` to the next.

If the backward is split, the model's first stage differs: it needs no gradient of its input, so its input
step does nothing and its weight step computes the whole backward. The hook marks it as one BACKWARD, when the
weight step runs.

Models that are trained in data parallel alone have no schedule: `attach_model(model, optimizer, job_id=…)`.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.probe import placement as places
from perseus.agent.probe.attachment import Attachment, Identify, never_raises
from perseus.agent.probe.client import Probe
from perseus.agent.probe.collective_waits import mark_waits, parameter_groups, refuse_unmarked_waits
from perseus.agent.probe.exchange import LocalExchange, StoreExchange
from perseus.agent.probe.framework import Argument, check_attributes, find_argument
from perseus.agent.probe.job_order import table_if_any
from perseus.agent.probe.marks import Connect
from perseus.agent.probe.stage_work import StageWork, shapes_of, stage_work, while_alive
from perseus.agent.probe.tested_versions import note_versions
from perseus.agent.probe.torch_marks import connect_marks
from perseus.agent.probe.unmarked_steps import watch_steps
from perseus.agent.probe.whole_model import MarkedModel, TorchParts, is_marked

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# Attributes of torch's objects that the hook needs; all exist since torch 2.6.
_OF_SCHEDULES = ("step", "_has_backward")
_OF_STAGES = (
    "forward_one_chunk",
    "backward_one_chunk",
    "backward_weight_one_chunk",
    "stage_index",
    "submod",
    "group",
    "group_rank",
    "group_size",
    "device",
    "is_first",
    "dw_builder",
)

# The values of torch's _ComputationType that are computations.
_KINDS = {
    "F": Kind.FORWARD,
    "B": Kind.BACKWARD,
    "I": Kind.BACKWARD_INPUT,
    "W": Kind.BACKWARD_WEIGHT,
}

_UNMARKED = "step() of the attached schedule is not called: attach the schedule that the training loop steps"


@never_raises
def attach(
    schedule: Any,
    *,
    job_id: str,
    device_mesh: "DeviceMesh | None" = None,
    connect: Connect = Probe.connect,
    max_slowdown_percent: float = 0.0,
) -> Attachment:
    """Attach this rank's schedule to the agent of its node. Called by all ranks of the job, before training.

    `device_mesh`: the mesh of the whole job, with dimensions named "pp", "cp" and "tp"; all others are data
    parallel. Without one, all parallelism is pipeline and data. `max_slowdown_percent`: how much slower than
    stock plans may be. `connect` replaces `Probe.connect` in tests and demonstrations.

    Raises ValueError if `schedule` is not one of `torch.distributed.pipelining`, lacks attributes that the
    hook needs (as in other versions of torch), or has another place in the mesh, and for data parallelism in
    whose computations ranks wait for each other, such as FSDP. Without an agent the hook logs one line, and
    training continues as before.
    """
    from torch import __version__

    with places.meeting() as meeting:
        note_versions("torch", str(__version__), str(__version__))
        first = stages_of(schedule)[0]
        if device_mesh is not None:
            placement = places.from_device_mesh(device_mesh, first.device)
        else:
            placement = places.from_pipeline_group(first.group, first.device, meeting)
    return attach_at(
        schedule, placement, job_id=job_id, connect=connect, max_slowdown_percent=max_slowdown_percent
    )


def attach_at(
    schedule: Any,
    placement: places.Placement,
    *,
    job_id: str,
    connect: Connect = Probe.connect,
    max_slowdown_percent: float = 0.0,
    **versions: str,
) -> Attachment:
    """Attach as `attach` does, at a known place; `versions`: of the trainer's libraries besides torch."""
    stages = stages_of(schedule)
    first = stages[0]
    identities = identities_of(stages)
    if (placement.stage, placement.stage_count) != (first.group_rank, first.group_size):
        raise ValueError(
            f"device mesh: expected pipeline rank {first.group_rank} of {first.group_size}, as in the "
            f"schedule's group, found {placement.stage} of {placement.stage_count}"
        )
    attachment = Attachment(
        placement,
        connect_marks(connect, job_id, placement, first.device),
        StoreExchange(placement.pipeline, placement.tensor),
        chunk_positions=[stage.stage_index for stage in stages],
        table=table_if_any(lambda: _table(schedule, stages)),
        work=while_alive(lambda *stages: work_of(stages, **versions), *stages),
        max_slowdown_percent=max_slowdown_percent,
    )

    def put_marks() -> None:
        mark_schedule(attachment, schedule, stages, identities)
        watch_steps(attachment, lambda: _UNMARKED, schedule)

    return attachment.put_marks(put_marks)


@never_raises
def attach_model(
    model: Any,
    optimizer: Any,
    *,
    job_id: str,
    process_group: "ProcessGroup | None" = None,
    forward: tuple[Any, str] | None = None,
    connect: Connect = Probe.connect,
    max_slowdown_percent: float = 0.0,
) -> Attachment:
    """Attach this rank's replica of a model that is trained without a pipeline, in data parallel.

    Called by all ranks of the job, before training, with the model that the training loop calls (such as the
    `DistributedDataParallel`, the model that `fully_shard` has sharded, or the result of `torch.compile`) and
    the optimizer whose step ends an iteration (the last one, of several): torch's, or accelerate's or
    Lightning's around it. `process_group`: the replicas; by default that of a `DistributedDataParallel`, or
    else all processes. `forward`: the owner and the name of a function that computes a microbatch's loss, if
    the loop calls that instead of the model. `max_slowdown_percent`, `connect`: as in `attach`.

    One process without `torch.distributed` is one replica.

    Raises ValueError if the model or the optimizer is not torch's, the model is attached, the sharding is of
    an unknown version or not by `fully_shard`, there is tensor parallelism, or there are more processes and
    no process group yet. Without an agent the hook logs one line, and training continues as before.
    """
    import torch
    from torch.utils import _pytree

    note_versions("torch", str(torch.__version__), str(torch.__version__))
    _note_accelerate(optimizer, str(torch.__version__))
    check_attributes(model, f"model {type(model).__name__}", "forward", "training", "parameters", "modules")
    optimizer = stepping(optimizer)
    check_attributes(optimizer, f"optimizer {type(optimizer).__name__}", "register_step_post_hook")
    if is_marked(model):
        raise ValueError(f"model {type(model).__name__}: expected one that is not attached; detach it first")
    refuse_unmarked_waits(model, f"model {type(model).__name__}")
    sharded = list(parameter_groups(model))
    group = process_group if process_group is not None else getattr(model, "process_group", None)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    placement = places.from_replicas(group, device)
    attachment = Attachment(
        placement,
        connect_marks(connect, job_id, placement, device),
        LocalExchange(),
        work=while_alive(lambda model: stage_work([model], torch=str(torch.__version__)), model),
        max_slowdown_percent=max_slowdown_percent,
    )

    def put_marks() -> None:
        engine = torch.autograd.Variable._execution_engine
        parts = TorchParts(
            is_compiling=torch.compiler.is_compiling,
            is_grad_enabled=torch.is_grad_enabled,
            is_in_backward=lambda: torch._C._current_graph_task_id() != -1,
            is_checkpointing=_is_checkpointing,
            # Most models return one tensor: the general way costs several microseconds.
            leaves=lambda result: (
                (result,) if isinstance(result, torch.Tensor) else _pytree.tree_leaves(result)
            ),
            when_backward_is_done=engine.queue_callback,
        )
        marked = MarkedModel(attachment, parts)
        if forward is None:
            marked.mark(model, optimizer)
        else:
            marked.mark_function(*forward, optimizer)
        mark_waits(attachment, sharded)
        # It copies the first rank's buffers to the others before forwards. Its class is marked, as it may be
        # copied and pickled with its own attributes.
        ddp = torch.nn.parallel.DistributedDataParallel
        sync_buffers = torch.compiler.disable(attachment.waiting(ddp._sync_buffers))
        attachment.replace(ddp, "_sync_buffers", sync_buffers)
        watch_steps(attachment, marked.why_unmarked, model)

    return attachment.put_marks(put_marks)


def _is_checkpointing() -> bool:
    """Return whether a caller is the forward of torch's reentrant activation checkpoint."""
    from torch.utils.checkpoint import CheckpointFunction

    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def stepping(optimizer: Any) -> Any:
    """Return the optimizer that steps: a wrapper's own `step` does not always, as in accumulation."""
    while hasattr(inner := getattr(optimizer, "optimizer", None), "step"):
        optimizer = inner
    return optimizer


def _note_accelerate(optimizer: Any, torch_version: str) -> None:
    if type(optimizer).__module__.partition(".")[0] == "accelerate":
        import accelerate

        note_versions("accelerate", str(accelerate.__version__), torch_version)


def stages_of(schedule: Any) -> list[Any]:
    """Return this process's stages, in the model's order; ValueError if they can't be hooked."""
    stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    if stages[0] is None:
        raise ValueError(
            f"schedule: expected one of torch.distributed.pipelining, found {type(schedule).__name__}"
        )
    check_attributes(schedule, f"schedule {type(schedule).__name__}", *_OF_SCHEDULES)
    for stage in stages:
        check_attributes(stage, f"stage {type(stage).__name__}", *_OF_STAGES)
        refuse_unmarked_waits(stage.submod, f"stage {stage.stage_index}", is_stage=True)
    return sorted(stages, key=lambda stage: stage.stage_index)


def work_of(stages: Sequence[Any], **versions: str) -> StageWork:
    """Return the work of these stages (`probe.stage_work`), once an iteration has shown a microbatch's
    shape.

    Shapes do not change from then on: torch's stages receive into buffers of these shapes.
    """
    from torch import __version__

    shapes = [shapes_of(_inputs_of(stage)) for stage in stages]
    return stage_work([stage.submod for stage in stages], torch=str(__version__), shapes=shapes, **versions)


def _inputs_of(stage: Any) -> Any:
    """Return the metadata of a microbatch's inputs: `inputs_meta` in older torch, `_stage_meta` in 2.13."""
    before = getattr(stage, "inputs_meta", None)
    return before if before is not None else getattr(getattr(stage, "_stage_meta", None), "inputs", None)


def mark_schedule(
    attachment: Attachment, schedule: Any, stages: Sequence[Any], identities: Sequence[dict[str, Identify]]
) -> None:
    """Put marks around a schedule's training iterations and its stages' computations."""
    for stage, identify_calls in zip(stages, identities, strict=True):
        marked = {name: partial(attachment.marked, identify=each) for name, each in identify_calls.items()}
        attachment.replace_methods(stage, marked)
    the_schedule: Callable[[], Any] = weakref.ref(schedule)

    def is_training() -> bool:
        return bool(the_schedule()._has_backward)  # evaluations are not marked

    step = partial(attachment.marked_iteration, is_training=is_training)
    attachment.replace_methods(schedule, {"step": step})


def identities_of(stages: Sequence[Any]) -> list[dict[str, Identify]]:
    """For each stage, map its computing functions to the computation that a call executes.

    Raises ValueError for a function with an unknown signature.
    """
    return [_identities(stage, chunk) for chunk, stage in enumerate(stages)]


def _identities(stage: Any, chunk: int) -> dict[str, Identify]:
    has_empty_input_step = _has_empty_input_step(stage)
    weight_kind = Kind.BACKWARD if has_empty_input_step else Kind.BACKWARD_WEIGHT

    def argument(function: str, name: str) -> Argument:
        return find_argument(getattr(stage, function), name, f"stage {type(stage).__name__}: {function}")

    forward_microbatch = argument("forward_one_chunk", "fwd_chunk_id")
    backward_microbatch = argument("backward_one_chunk", "bwd_chunk_id")
    is_full = argument("backward_one_chunk", "full_backward")
    weight_microbatch = argument("backward_weight_one_chunk", "bwd_chunk_id")

    def backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Kind, int, int] | None:
        if is_full(args, kwargs):
            return Kind.BACKWARD, backward_microbatch(args, kwargs), chunk
        if has_empty_input_step:
            return None
        return Kind.BACKWARD_INPUT, backward_microbatch(args, kwargs), chunk

    return {
        "forward_one_chunk": lambda args, kwargs: (Kind.FORWARD, forward_microbatch(args, kwargs), chunk),
        "backward_one_chunk": backward,
        "backward_weight_one_chunk": lambda args, kwargs: (
            weight_kind,
            weight_microbatch(args, kwargs),
            chunk,
        ),
    }


def _has_empty_input_step(stage: Any) -> bool:
    return bool(stage.is_first) and stage.dw_builder is None


def _table(schedule: Any, stages: Sequence[Any]) -> list[Computation] | None:
    """Return this rank's order in the schedule's own table; None if there is no valid one.

    The table of torch 2.13's `Schedule1F1B` numbers the last rank's forwards from 1.
    """
    actions = (schedule.pipeline_order or {}).get(stages[0].group_rank)
    if not actions:
        return None
    chunks = {stage.stage_index: (chunk, stage) for chunk, stage in enumerate(stages)}
    table = []
    for action in _single_actions(actions):
        kind = _KINDS.get(action.computation_type.value)
        if kind is None:
            continue
        chunk, stage = chunks[action.stage_index]
        if _has_empty_input_step(stage) and kind is Kind.BACKWARD_INPUT:
            continue
        if _has_empty_input_step(stage) and kind is Kind.BACKWARD_WEIGHT:
            kind = Kind.BACKWARD
        if not 0 <= action.microbatch_index < schedule._n_microbatches:
            return None
        table.append(Computation(kind, action.microbatch_index, chunk))
    return table


def _single_actions(actions: Sequence[Any]) -> Iterator[Any]:
    for action in actions:
        if action is not None:
            yield from action.sub_actions or [action]
