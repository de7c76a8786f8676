"""Attach to `torch.distributed.pipelining`: one line, for every schedule that it has.

    from perseus.agent.torch import attach

    with attach(schedule, job_id="gpt"):
        for inputs, targets in batches:
            schedule.step(inputs, target=targets)
            ...

The seam is the stage objects: their `forward_one_chunk`, `backward_one_chunk` and `backward_weight_one_chunk`
are what every schedule calls for a computation (GPipe, 1F1B, interleaved 1F1B, looped BFS, interleaved
zero-bubble, ZBV, DualPipeV). An iteration is one `schedule.step`; evaluations (`schedule.eval`) are not
marked. A process's pipeline rank is the stage, its stage objects by rising `stage_index` are the chunks, and
activations flow from one `stage_index` to the next.

Where the backward is split, the model's first stage is different: no gradient of its input is needed, so
its input step does nothing and its weight step computes the whole backward. It is marked as what it is: one
BACKWARD, when the weight step runs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.probe import placement as places
from perseus.agent.probe.attachment import Attachment, Connect
from perseus.agent.probe.client import Probe
from perseus.agent.probe.torch_marks import capture_check, connect_marks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The values of torch's _ComputationType that stand for computations.
_KINDS = {
    "F": Kind.FORWARD,
    "B": Kind.BACKWARD,
    "I": Kind.BACKWARD_INPUT,
    "W": Kind.BACKWARD_WEIGHT,
}


def attach(
    schedule: Any,
    *,
    job_id: str,
    device_mesh: "DeviceMesh | None" = None,
    connect: Connect = Probe.connect,
    max_slowdown_percent: float = 0.0,
) -> Attachment:
    """Attach this rank's schedule to the agent of its node. Called by all ranks of the job, before training.

    `device_mesh`: the mesh of the whole job, its dimensions named "pp", "cp" and "tp", all others being data
    parallel. Without one, all parallelism is pipeline and data. `max_slowdown_percent`: how much slower than
    T_min plans may be. `connect` stands for `Probe.connect` in tests and demonstrations.

    ValueError if `schedule` is none of `torch.distributed.pipelining`, or stands elsewhere in the mesh.
    Without an agent that is said once, and training goes on as before.
    """
    stages = _stages_of(schedule)
    first = stages[0]
    if device_mesh is not None:
        placement = places.from_device_mesh(device_mesh, first.device)
    else:
        placement = places.from_pipeline_group(first.group, first.device)
    if (placement.stage, placement.stage_count) != (first.group_rank, first.group_size):
        raise ValueError(
            f"device mesh: expected pipeline rank {first.group_rank} of {first.group_size}, as in the "
            f"schedule's group, found {placement.stage} of {placement.stage_count}"
        )
    marks = connect_marks(connect, job_id, placement, first.device)
    attachment = Attachment(
        placement,
        marks,
        places.gather_over(first.group),
        chunk_positions=[stage.stage_index for stage in stages],
        table=_table(schedule, stages),
        max_slowdown_percent=max_slowdown_percent,
        is_capturing=capture_check(first.device),
    )
    for chunk, stage in enumerate(stages):
        _mark_computations(attachment, stage, chunk)
    attachment.replace(schedule, "step", _step_marked(attachment, schedule))
    return attachment


def _stages_of(schedule: Any) -> list[Any]:
    """The schedule's stage objects in this process, in the model's order."""
    stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    if stages[0] is None:
        raise ValueError(
            f"schedule: expected one of torch.distributed.pipelining, found {type(schedule).__name__}"
        )
    return sorted(stages, key=lambda stage: stage.stage_index)


def _step_marked(attachment: Attachment, schedule: Any) -> Callable[..., Any]:
    step = schedule.step

    def marked(*args: Any, **kwargs: Any) -> Any:
        if not schedule._has_backward:  # an evaluation
            return step(*args, **kwargs)
        attachment.begin_iteration()
        result = step(*args, **kwargs)
        attachment.end_iteration()
        return result

    return marked


def _mark_computations(attachment: Attachment, stage: Any, chunk: int) -> None:
    begin, end = attachment.begin, attachment.end
    forward, backward = stage.forward_one_chunk, stage.backward_one_chunk
    backward_weight = stage.backward_weight_one_chunk
    has_empty_input_step = _has_empty_input_step(stage)
    weight_kind = Kind.BACKWARD if has_empty_input_step else Kind.BACKWARD_WEIGHT

    # Parameters are named as torch names them: a schedule may pass them by name.
    def marked_forward(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        begin(Kind.FORWARD, fwd_chunk_id, chunk)
        output = forward(fwd_chunk_id, *args, **kwargs)
        end(Kind.FORWARD, fwd_chunk_id, chunk)
        return output

    def marked_backward(
        bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if has_empty_input_step and not full_backward:
            backward(bwd_chunk_id, loss, full_backward, last_backward)
            return
        kind = Kind.BACKWARD if full_backward else Kind.BACKWARD_INPUT
        begin(kind, bwd_chunk_id, chunk)
        backward(bwd_chunk_id, loss, full_backward, last_backward)
        end(kind, bwd_chunk_id, chunk)

    def marked_backward_weight(bwd_chunk_id: int, last_backward: bool = False) -> None:
        begin(weight_kind, bwd_chunk_id, chunk)
        backward_weight(bwd_chunk_id, last_backward)
        end(weight_kind, bwd_chunk_id, chunk)

    attachment.replace(stage, "forward_one_chunk", marked_forward)
    attachment.replace(stage, "backward_one_chunk", marked_backward)
    attachment.replace(stage, "backward_weight_one_chunk", marked_backward_weight)


def _has_empty_input_step(stage: Any) -> bool:
    return bool(stage.is_first) and stage.dw_builder is None


def _table(schedule: Any, stages: Sequence[Any]) -> list[Computation] | None:
    """The order that the schedule's own table gives this rank; None if it has none that can be.

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
