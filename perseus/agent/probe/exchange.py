"""How the stages of a pipeline tell each other of another order in the midst of training, and nobody waits.

A collective would hang the trainer if one stage came to it and another did not. So what a stage computes is
posted in the store that torch.distributed was set up with, and looked for after each iteration. Standard
library only; torch is imported when asked.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from perseus.agent.link.computation import Computation, Kind


@dataclass(frozen=True, slots=True)
class ExecutedOrder:
    """What one stage executed in an iteration; no computations: it could not be followed.

    `chunk_positions[c]`: where its chunk c stands in the model, counted over the chunks of all stages; empty
    where activations flow through all stages of chunk 0, then of chunk 1 and so on. `work`: what its
    computations are (`probe.stage_work`); empty if not known. `meeting`: where orders that follow are posted;
    that of the first stage counts.
    """

    stage: int
    computations: tuple[Computation, ...]
    chunk_positions: tuple[int, ...] = ()
    work: str = ""
    meeting: str = ""


class Exchange(Protocol):
    """Where the stages of a pipeline post orders. Neither method waits for another stage."""

    def post(self, name: str, order: ExecutedOrder) -> None:
        """Post an order under a name that all stages have for it."""

    def look(self, name: str, stage_count: int) -> Sequence[ExecutedOrder] | None:
        """The orders of all stages under that name; None as long as some are not there."""


class StoreExchange:
    """Posts orders in torch.distributed's default store (implements `Exchange`)."""

    def post(self, name: str, order: ExecutedOrder) -> None:
        """See `Exchange.post`."""
        _store().set(_key(name, order.stage), encode_order(order))

    def look(self, name: str, stage_count: int) -> Sequence[ExecutedOrder] | None:
        """See `Exchange.look`."""
        store = _store()
        keys = [_key(name, stage) for stage in range(stage_count)]
        return [decode_order(store.get(key)) for key in keys] if store.check(keys) else None


class OwnExchange:
    """Keeps the orders of a pipeline of one stage, which has nobody to tell (implements `Exchange`)."""

    def __init__(self) -> None:
        self._posted: tuple[str, ExecutedOrder] | None = None

    def post(self, name: str, order: ExecutedOrder) -> None:
        """See `Exchange.post`."""
        self._posted = name, order

    def look(self, name: str, stage_count: int) -> Sequence[ExecutedOrder] | None:
        """See `Exchange.look`."""
        is_there = self._posted is not None and self._posted[0] == name and stage_count == 1
        return [self._posted[1]] if is_there and self._posted is not None else None


def encode_order(order: ExecutedOrder) -> str:
    """An order as a text."""
    computations = [(int(c.kind), c.microbatch, c.chunk) for c in order.computations]
    return json.dumps([order.stage, computations, order.chunk_positions, order.work])


def decode_order(text: str | bytes) -> ExecutedOrder:
    """The order in a text."""
    stage, computations, chunk_positions, work = json.loads(text)
    return ExecutedOrder(
        stage,
        tuple(Computation(Kind(kind), microbatch, chunk) for kind, microbatch, chunk in computations),
        tuple(chunk_positions),
        work,
    )


def _key(name: str, stage: int) -> str:
    return f"perseus/{name}/{stage}"


def _store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
