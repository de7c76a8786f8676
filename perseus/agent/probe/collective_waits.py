"""Waits for other ranks within the computations of data parallelism: marked for FSDP2, otherwise refused.

Where `torch.distributed.fsdp.fully_shard` (FSDP2) has sharded a model, each layer gathers its parameters from
all ranks before it runs, forward and backward, and scatters its gradients afterwards. These are collectives
within a forward or backward, in which a fast rank waits for a slow one. Their time is marked as waiting
(`Attachment.waiting`), so that it counts for no computation. Under CUDA these functions enqueue the stream's
waits, and the marks surround them; on a CPU they wait themselves.

    pre_forward     gathers the parameters of a group of layers, and waits for them
    pre_backward    gathers them again, if they were freed after the forward
    post_backward   scatters the gradients
    unshard         gathers ahead, if the user requested it

The wait for the last gradients is in an autograd callback, after the backward's end mark.

Waits that are not marked would make a slow neighbour look like the rank's own work; `refuse_unmarked_waits`
refuses them. A `DistributedDataParallel` around a whole stage waits too, but in its last backward only, which
the coordinator does not judge, and the median over three or more microbatches leaves out.

Standard library only: groups and wrappers are recognised by their attributes and names.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from perseus.agent.probe.attachment import Attachment
from perseus.agent.probe.framework import check_attributes

_WAITING = ("pre_forward", "pre_backward", "post_backward", "unshard")
# Parts of the names of classes that gather parameters in their own way: torch's older FSDP, and Megatron's.
_WRAPPERS = ("FullyShardedDataParallel", "MegatronFSDP")
_OLD_FSDP = "torch.distributed.fsdp"
_INSTEAD = (
    " (use fully_shard: fsdp_version 2 of Accelerate and Transformers, ModelParallelStrategy of Lightning)"
)
_DDP = "torch.nn.parallel.distributed"


def mark_waits(attachment: Attachment, groups: Iterable[Any]) -> None:
    """Mark the waits for these groups of parameters until `detach`."""
    for group in groups:
        attachment.replace_methods(group, dict.fromkeys(_WAITING, attachment.waiting))


def parameter_groups(model: Any) -> Iterator[Any]:
    """Yield the groups of parameters that are gathered together, each once; none if nothing is sharded.

    Raises ValueError for an unknown version of torch.
    """
    seen: set[int] = set()
    for module in model.modules():
        if not hasattr(module, "_get_fsdp_state"):
            continue
        for group in _groups_of(module._get_fsdp_state()):
            if id(group) not in seen:
                seen.add(id(group))
                check_attributes(group, f"sharded parameters {type(group).__name__}", *_WAITING)
                yield group


def refuse_unmarked_waits(
    model: Any, where: str, *, is_stage: bool = False, refusal: type[Exception] = ValueError
) -> None:
    """Raise `refusal` for a model, or a pipeline's stage, within whose computations ranks wait unmarked."""
    expected, waits = "DistributedDataParallel, or fully_shard alone", _waits_in_replica(model)
    if is_stage:
        expected, waits = "at most a DistributedDataParallel that is the stage itself", _waits_in_stage(model)
    for wait in (*_waits_of_modules(model, "" if is_stage else _INSTEAD), *waits):
        raise refusal(f"{where}: expected {expected}, found {wait}, where waiting counts as computing")


def _waits_of_modules(model: Any, instead: str) -> Iterator[str]:
    for module in model.modules():
        names = [base.__name__ for base in type(module).__mro__]
        if any(wrapper in name for wrapper in _WRAPPERS for name in names):
            home = type(module).__module__
            yield f"{type(module).__name__} of {home}{instead if home.startswith(_OLD_FSDP) else ''}"
        if "SyncBatchNorm" in names and _rank_count(module.process_group) > 1:
            yield "SyncBatchNorm"
        # Of DeepSpeed's engine: from stage 2 on, ranks wait for each other within backwards.
        if (zero_stage := getattr(module, "zero_optimization_stage", int)()) >= 2:
            yield f"DeepSpeed's ZeRO stage {int(zero_stage)}"
        if (count := getattr(module, "autotp_size", int)()) > 1:
            yield f"tensor parallelism (DeepSpeed's, over {count} ranks)"


def _rank_count(process_group: Any) -> int:
    """Return the number of ranks of a group, or of all without one."""
    from torch import distributed  # which a module with a process group has imported

    return distributed.get_world_size(process_group) if distributed.is_initialized() else 1


def _waits_in_stage(stage: Any) -> Iterator[str]:
    # Only of a stage that is itself sharded, or a DistributedDataParallel, torch delays the reduction of
    # gradients to the last backward. torchtitan also shards over one rank, and `replicate` over none.
    is_delayed = hasattr(stage, "_get_fsdp_state")
    for group in parameter_groups(stage):
        if (count := getattr(group.mesh_info, "shard_mesh_size", 1)) > 1:
            yield f"FSDP over {count} ranks (fully_shard) within a stage of a pipeline"
        elif not is_delayed and (count := group.mesh_info.mesh.size()) > 1:
            yield f"replicas on {count} ranks (replicate or fully_shard) of a part of a stage of a pipeline"
    for module in stage.modules():
        homes = {base.__module__ for base in type(module).__mro__}
        if "torch.distributed._composable.replicate" in homes:
            yield "replicate (torch.distributed._composable) within a stage of a pipeline"
        elif _DDP in homes and module is not stage:
            yield "DistributedDataParallel within a stage of a pipeline"


def _waits_in_replica(model: Any) -> Iterator[str]:
    sharded_counts = {
        id(sharded.sharded_param): group.mesh_info.mesh.size()
        for group in parameter_groups(model)
        for sharded in group.fsdp_params
    }
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and mesh.size() > sharded_counts.get(id(parameter), 1):
            yield f"tensor or expert parallelism (a parameter over {mesh.size()} ranks)"
        if hasattr(parameter, "_st_info"):  # DistributedDataParallel keeps a DTensor's part between forwards
            yield "tensor parallelism (parameters that are DTensors in forwards)"


def _groups_of(state: Any) -> list[Any]:
    """Return a state's groups: several since torch has meshes per parameter, before that one or none."""
    if (groups := getattr(state, "_fsdp_param_groups", None)) is not None:
        return list(groups)
    check_attributes(state, f"sharded state {type(state).__name__}", "_fsdp_param_group")
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
