"""Exchange the executed orders between the stages of a pipeline, without waiting.

A collective would hang the trainer if one stage entered it and another did not, because it is no longer
marked or its iteration failed. So each stage posts its order in the default store of torch.distributed, and
polls for the others after each iteration. Standard library only; torch is imported on demand.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from perseus.agent.link.computation import Computation, Kind

_attachments = count()


@dataclass(frozen=True, slots=True)
class ExecutedOrder:
    """One stage's executed order of an iteration, or the reason why it is not followed (`lost`).

    `chunk_positions[c]`: the place of its chunk c in the model, counted over the chunks of all stages; empty
    if activations flow through all stages of chunk 0, then of chunk 1 and so on. `work`: its work text
    (`probe.stage_work`); empty if unknown. `layer_counts`: of its chunks, likewise.
    """

    stage: int
    computations: tuple[Computation, ...]
    chunk_positions: tuple[int, ...] = ()
    work: str = ""
    lost: str = ""
    layer_counts: tuple[int, ...] = ()


class Exchange(Protocol):
    """The board on which the stages of a pipeline post orders. No method waits for another stage."""

    def post(self, name: str, order: ExecutedOrder) -> None:
        """Post an order under a name that is common to all stages."""

    def poll(self, name: str, stage_count: int) -> Sequence[ExecutedOrder | None]:
        """Return the orders of all stages under that name; None for missing ones."""


class StoreExchange:
    """Posts orders in torch.distributed's default store (implements `Exchange`).

    For the ranks of one pipeline and tensor index, which all attach the same number of times.
    """

    def __init__(self, pipeline: int, tensor: int) -> None:
        self._prefix = f"perseus/attached-{next(_attachments)}/{pipeline}.{tensor}"

    def post(self, name: str, order: ExecutedOrder) -> None:
        """Post an order."""
        default_store().set(self._key(name, order.stage), encode_order(order))

    def poll(self, name: str, stage_count: int) -> Sequence[ExecutedOrder | None]:
        """Return the orders posted so far."""
        store = default_store()
        keys = [self._key(name, stage) for stage in range(stage_count)]
        return [decode_order(store.get(key)) if store.check([key]) else None for key in keys]

    def _key(self, name: str, stage: int) -> str:
        return f"{self._prefix}/{name}/{stage}"


class LocalExchange:
    """Keeps the orders of stages that are all in this process (implements `Exchange`)."""

    def __init__(self) -> None:
        self._posted: dict[tuple[str, int], ExecutedOrder] = {}

    def post(self, name: str, order: ExecutedOrder) -> None:
        """Post an order."""
        self._posted[name, order.stage] = order

    def poll(self, name: str, stage_count: int) -> Sequence[ExecutedOrder | None]:
        """Return the orders posted so far."""
        return [self._posted.get((name, stage)) for stage in range(stage_count)]


def encode_order(order: ExecutedOrder) -> str:
    """Serialise an order."""
    computations = [(int(c.kind), c.microbatch, c.chunk) for c in order.computations]
    rest = order.chunk_positions, order.work, order.lost, order.layer_counts
    return json.dumps([order.stage, computations, *rest])


def decode_order(text: str | bytes) -> ExecutedOrder:
    """Deserialise an order."""
    stage, computations, chunk_positions, work, lost, layer_counts = json.loads(text)
    return ExecutedOrder(
        stage,
        tuple(Computation(Kind(kind), microbatch, chunk) for kind, microbatch, chunk in computations),
        tuple(chunk_positions),
        work,
        lost,
        tuple(layer_counts),
    )


def default_store() -> Any:
    """Return the default store of torch.distributed."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
