"""An attached rank without a framework: its exchange, and its training loop."""

from collections.abc import Sequence

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.probe.attachment import Attachment
from perseus.agent.probe.exchange import ExecutedOrder, LocalExchange
from perseus.agent.probe.placement import Placement

ALONE = Placement(pipeline=0, pipeline_count=3, stage=0, stage_count=2, tensor=0, tensor_count=4)
ORDER = (Computation(Kind.FORWARD, 0), Computation(Kind.BACKWARD, 0))
OTHER = ExecutedOrder(1, (Computation(Kind.FORWARD, 0), Computation(Kind.BACKWARD, 0)))


def beside(*others: ExecutedOrder) -> LocalExchange:
    """An exchange with other stages, which have posted their orders."""
    exchange = LocalExchange()
    for other in others:
        exchange.post("first", other)
    return exchange


def train(attachment: Attachment, order: Sequence[Computation] = ORDER) -> None:
    attachment.begin_iteration()
    for each in order:
        attachment.begin(each.kind, each.microbatch, each.chunk)
        attachment.end(each.kind, each.microbatch, each.chunk)
    attachment.end_iteration()
