"""Waits within the computations of a model that `torch.distributed.fsdp.fully_shard` has sharded (FSDP2).

Its parameters are gathered from all ranks as each layer is reached, forward and backward, and its gradients
are scattered as each layer is left: collectives, in the midst of a forward and a backward, for which a fast
rank waits for a slow one. Their time is marked as waiting (`Attachment.waiting`), so that it is in no
computation. Under CUDA these functions enqueue what the stream waits for, and the marks lie around that; on a
CPU they wait themselves.

    pre_forward     gathers the parameters of a group of layers, and waits for them
    pre_backward    gathers them again, where they were let go of after the forward
    post_backward   scatters the gradients
    unshard         gathers ahead, where the user asked for that

The wait for the last gradients is in a callback of autograd's, after the end of the backward's mark.

Standard library only: groups are known by what they have.
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
    """The groups of a model's parameters that are gathered together, each once; none if nothing is sharded.

    ValueError for a version of torch in which they are not what they were.
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
    """Several since torch has meshes for each parameter, before that one or none."""
    if (groups := getattr(state, "_fsdp_param_groups", None)) is not None:
        return list(groups)
    check_attributes(state, f"sharded state {type(state).__name__}", "_fsdp_param_group")
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
