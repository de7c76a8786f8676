"""A stage's work: its layers, and a short text that means the same work in any place of any schedule.

All ranks of a stage, in all pipelines, must produce the same text, or they would not belong to one job. So it
contains only what replicas share: their parameters, not a rank's shard; a microbatch's shape only if it never
changes; versions. GPUs may differ between replicas: the agents report them to the coordinator.

Standard library only: models and tensors are inspected without importing torch.
"""

import hashlib
import json
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

_log = logging.getLogger("perseus.attachment")


class StageWork(NamedTuple):
    """A stage's work.

    `text` is empty if it is unknown, and so is `layer_counts`, the number of layers of each chunk.
    """

    text: str
    layer_counts: tuple[int, ...] = ()


def stage_work(modules: Sequence[Any], **more: Any) -> StageWork:
    """Return the work of a stage of these modules, one for each chunk; `more` as for `work_text`."""
    counts = tuple(map(layer_count, modules))
    return StageWork(work_text(modules, **more), counts if all(counts) else ())


def layer_count(module: Any) -> int:
    """Return the number of a module's layers: modules of one class that have a number as their name.

    Of those nearest to the root, the most frequent class counts: a layer's own parts, such as experts, don't.
    0 if there are none.
    """
    level = [module]
    while level:
        children = [each for one in level if hasattr(one, "named_children") for each in one.named_children()]
        numbered = Counter(type(child).__name__ for name, child in children if name.isdecimal())
        if numbered:
            return max(numbered.values())
        level = [child for _, child in children]
    return 0


def model_of(modules: Iterable[Any]) -> list[list[Any]]:
    """Describe each chunk's module: its parameters' shapes, types and whether they are trained, and its
    layers.

    Layers are the classes of modules without submodules. A sharded tensor (DTensor) has its whole shape.
    """
    return [
        [
            [(list(p.shape), str(p.dtype), bool(p.requires_grad)) for p in module.parameters()],
            [type(some).__name__ for some in module.modules() if not any(True for _ in some.children())],
        ]
        for module in modules
    ]


def parameter_count(modules: Iterable[Any]) -> int:
    """Return the total number of parameters of the modules."""
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def shapes_of(values: Any) -> list[list[int]]:
    """Return the shapes of the tensors among the values, in order."""
    return [[*map(int, value.shape)] for value in values or () if hasattr(value, "shape")]


def work_text(modules: Sequence[Any], **more: Any) -> str:
    """Return the text for a stage of these modules; `more`: JSON values on which its time also depends.

    At most 128 printable ASCII characters.
    """
    text = json.dumps([model_of(modules), more], sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    count = parameter_count(modules)
    return f"{count} parameters, {digest}" if modules else digest


def while_alive(describe: Callable[..., StageWork], *owners: Any) -> Callable[[], StageWork]:
    """Return `describe` of these objects, without a reference that keeps them alive."""
    references = [weakref.ref(owner) for owner in owners]
    return lambda: describe(*(reference() for reference in references))


def work_if_known(describe: Callable[[], StageWork]) -> StageWork:
    """Return the work; after a failure an unknown one, so that the place identifies the work."""
    try:
        return describe()
    except Exception as error:  # due to an unknown model or framework
        _log.debug("the stage's work is unknown: %s", error)
        return StageWork("")
