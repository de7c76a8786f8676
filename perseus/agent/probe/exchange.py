"""How the stages of a pipeline tell each other what they execute, and nobody waits.

A collective would hang the trainer if one stage came to it and another did not: one that is not marked any
more, or whose iteration has failed. So what a stage executes is posted in the store that torch.distributed
was set up with, and looked for after each iteration. Standard library only; torch is imported when asked.
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
    """What one stage executed in an iteration; without computations: why it is not followed (`lost`).

    `chunk_positions[c]`: where its chunk c stands in the model, counted over the chunks of all stages; empty
    where activations flow through all stages of chunk 0, then of chunk 1 and so on. `work`: what its
    computations are (`probe.stage_work`); empty if not known.
    """

    stage: int
    computations: tuple[Computation, ...]
    chunk_positions: tuple[int, ...] = ()
    work: str = ""
    lost: str = ""


class Exchange(Protocol):
    """Where the stages of a pipeline post orders. Neither method waits for another stage."""

    def post(self, name: str, order: ExecutedOrder) -> None:
        """Post an order under a name that all stages have for it."""

    def poll(self, name: str, stage_count: int) -> Sequence[ExecutedOrder | None]:
        """The orders of all stages under that name; None for those that are not there yet."""


class StoreExchange:
    """Posts orders in torch.distributed's default store (implements `Exchange`).

    For ranks of one pipeline and tensor index, which all attach equally often.
    """

    def __init__(self, pipeline: int, tensor: int) -> None:
        self._prefix = f"perseus/attached-{next(_attachments)}/{pipeline}.{tensor}"

    def post(self, name: str, order: ExecutedOrder) -> None:
        """See `Exchange.post`."""
        default_store().set(self._key(name, order.stage), encode_order(order))

    def poll(self, name: str, stage_count: int) -> Sequence[ExecutedOrder | None]:
        """See `Exchange.look`."""
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
        """See `Exchange.post`."""
        self._posted[name, order.stage] = order

    def poll(self, name: str, stage_count: int) -> Sequence[ExecutedOrder | None]:
        """See `Exchange.look`."""
        return [self._posted.get((name, stage)) for stage in range(stage_count)]


def encode_order(order: ExecutedOrder) -> str:
    """An order as a text."""
    computations = [(int(c.kind), c.microbatch, c.chunk) for c in order.computations]
    return json.dumps([order.stage, computations, order.chunk_positions, order.work, order.lost])


def decode_order(text: str | bytes) -> ExecutedOrder:
    """The order in a text."""
    stage, computations, chunk_positions, work, lost = json.loads(text)
    return ExecutedOrder(
        stage,
        tuple(Computation(Kind(kind), microbatch, chunk) for kind, microbatch, chunk in computations),
        tuple(chunk_positions),
        work,
        lost,
    )


def default_store() -> Any:
    """The store that torch.distributed was set up with."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
