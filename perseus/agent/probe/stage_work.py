"""What a stage computes, as a short text: the same text is the same work, wherever in whatever schedule.

All ranks of a stage, in all pipelines, must come to the same text, or they would not belong to one job. So it
has what replicas share: their parameters, not whose shard a rank holds; a microbatch's shape only where it
never changes; versions. GPUs may differ between replicas: the coordinator hears of them from the agents.

Standard library only: models and tensors are looked at, and torch is not imported.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_log = logging.getLogger("perseus.attachment")


def model_of(modules: Iterable[Any]) -> list[list[Any]]:
    """Of each chunk's module: its parameters' shapes, types and whether they are trained, and its layers.

    Layers are the classes of modules that have no modules within. A sharded tensor (DTensor) tells its whole
    shape.
    """
    return [
        [
            [(list(p.shape), str(p.dtype), bool(p.requires_grad)) for p in module.parameters()],
            [type(some).__name__ for some in module.modules() if not any(True for _ in some.children())],
        ]
        for module in modules
    ]


def parameter_count(modules: Iterable[Any]) -> int:
    """How many parameters modules have together."""
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def shapes_of(values: Any) -> list[list[int]]:
    """The shapes of the tensors among some values, in their order."""
    return [[*map(int, value.shape)] for value in values or () if hasattr(value, "shape")]


def work_text(modules: Sequence[Any], **more: Any) -> str:
    """The text for a stage of these modules; `more`: whatever else its time depends on, as JSON can tell it.

    At most 128 printable ASCII characters.
    """
    text = json.dumps([model_of(modules), more], sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    count = parameter_count(modules)
    return f"{count} parameters, {digest}" if modules else digest


def work_if_known(describe: Callable[[], str]) -> str:
    """What `tell` says; empty, and a word about it, if it fails: the work then passes for its place."""
    try:
        return describe()
    except Exception as error:  # of a model or a framework that is not as known
        _log.info("what the stage computes is not told: %s", error)
        return ""
