"""Waits within the computations of a model that `torch.distributed.fsdp.fully_shard` has sharded (FSDP2).

Each layer gathers its parameters from all ranks before it runs, forward and backward, and scatters its
gradients afterwards. These are collectives within a forward or backward, in which a fast rank waits for a
slow one. Their time is marked as waiting (`Attachment.waiting`), so that it counts for no computation. Under
CUDA these functions enqueue the stream's waits, and the marks surround them; on a CPU they wait themselves.

    pre_forward     gathers the parameters of a group of layers, and waits for them
    pre_backward    gathers them again, if they were freed after the forward
    post_backward   scatters the gradients
    unshard         gathers ahead, if the user requested it

The wait for the last gradients is in an autograd callback, after the backward's end mark.

Standard library only: groups are recognised by their attributes.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from perseus.agent.probe.attachment import Attachment
from perseus.agent.probe.framework import check_attributes

_WAITING = ("pre_forward", "pre_backward", "post_backward", "unshard")


def mark_waits(attachment: Attachment, groups: Iterable[Any]) -> None:
    """Mark the waits for these groups of parameters until `detach`."""
    for group in groups:
        for name in _WAITING:
            attachment.replace(group, name, attachment.waiting(getattr(group, name)))


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


def _groups_of(state: Any) -> list[Any]:
    """Return a state's groups: several since torch has meshes per parameter, before that one or none."""
    if (groups := getattr(state, "_fsdp_param_groups", None)) is not None:
        return list(groups)
    check_attributes(state, f"sharded state {type(state).__name__}", "_fsdp_param_group")
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
