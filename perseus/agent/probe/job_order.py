"""The order in which a job's stages compute: registered as it is executed, and anew when it has changed.

No schedule needs to be known beforehand: the first iteration is recorded as it was really executed. At its
end the ranks of every pipeline gather their orders, one small collective each, and every rank says that it
belongs to a job that computes so; the first one registers it. A rank without an agent takes part, as it
can't know of the others'. Where the framework has a table of its own, a difference from what was executed is
logged; the executed order wins. A stage that could not be followed says so to the others of its pipeline when
orders are gathered: none of them is marked then.

An order that changes later (a ramp of the batch size, say) is said at once. Once it has settled the stages
post it for each other (`probe.exchange`), and when all of them have, it is registered in place of the first.

Standard library only.
"""

import logging
import uuid
from collections.abc import Callable, Sequence
from itertools import zip_longest

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.probe.changing_order import ChangingOrder, describe_change
from perseus.agent.probe.exchange import Exchange, ExecutedOrder
from perseus.agent.probe.marks import Marks, UnmarkableError
from perseus.agent.probe.placement import Placement
from perseus.agent.probe.stage_work import work_if_known

_log = logging.getLogger("perseus.attachment")

Gather = Callable[[ExecutedOrder], Sequence[ExecutedOrder]]
"""Gathers the orders of all stages of this rank's pipeline; called by all of them."""

# How long a stage that has posted an order waits for those of the others, which change in the same iteration.
_MEETING_ITERATIONS = 20


class JobOrder:
    """What one rank's stage executes, and what of it is registered.

    `table` is the order that the framework itself says it will execute, if it says. `work` tells, after an
    iteration, what the stage computes (`probe.stage_work`). `exchange`: where stages post orders that change;
    None: they are not followed.
    """

    def __init__(
        self,
        placement: Placement,
        gather: Gather,
        *,
        chunk_positions: Sequence[int],
        table: Sequence[Computation] | None,
        work: Callable[[], str],
        max_slowdown_percent: float,
        exchange: Exchange | None,
    ) -> None:
        self._placement = placement
        self._gather = gather
        self._chunk_positions = tuple(chunk_positions)
        self._table = table
        self._work = work
        self._max_slowdown_percent = max_slowdown_percent
        # The first iteration, until it has been executed whole; whether it was followed.
        self._executed: list[Computation] | None = []
        self._is_followed = True
        # From then on: what it executes against what is registered; where orders are posted, and under what
        # name the latest was, in which iteration.
        self._order: ChangingOrder | None = None
        self._exchange = exchange
        self._meeting = uuid.uuid4().hex
        self._iteration = 0
        self._posted: tuple[str, int] | None = None

    @property
    def is_recording(self) -> bool:
        """Whether no iteration has been executed whole yet."""
        return self._executed is not None

    def lose(self) -> None:
        """What the stage executes can't be followed."""
        self._is_followed = False

    def begin_iteration(self) -> None:
        """An iteration begins."""
        if self._executed is not None:
            self._executed = []
        if self._order is not None:
            self._order.begin_iteration()

    def begin(self, kind: Kind, microbatch: int, chunk: int) -> None:
        """A computation of it begins."""
        if self._executed is not None:
            self._executed.append(Computation(kind, microbatch, chunk))
        elif self._order is not None:
            self._order.begin(kind, microbatch, chunk)

    def end_iteration(self, marks: Marks | None) -> None:
        """It ends, and was executed whole. The end of the first one registers the job, by `marks` if any.

        Raises:
            UnmarkableError: a stage could not be followed. Nor are other errors of a registration caught.
        """
        if self._executed is not None:
            executed, self._executed = tuple(self._executed), None
            self._register_first(executed, marks)
        elif self._order is not None and marks is not None:
            try:
                self._follow(self._order, marks)
            except Exception as error:  # of ours, whatever it is: training goes on
                self._stop_following(error)

    def _register_first(self, executed: tuple[Computation, ...], marks: Marks | None) -> None:
        placement = self._placement
        if self._table is not None and (difference := _difference(self._table, executed)):
            _log.warning(
                "pipeline %d, stage %d: %s; what was executed counts",
                placement.pipeline,
                placement.stage,
                difference,
            )
        own = self._own_order(executed if self._is_followed else ())
        orders = sorted(self._gather(own), key=lambda order: order.stage)
        if marks is None:
            return
        if lost := [str(order.stage) for order in orders if not order.computations]:
            raise UnmarkableError(f"what stage {', '.join(lost)} computes could not be followed, see its log")
        self._meeting = orders[0].meeting
        self._register(marks, orders, waits=True)
        self._order = ChangingOrder(executed)

    def _own_order(self, executed: tuple[Computation, ...]) -> ExecutedOrder:
        work = work_if_known(self._work)
        return ExecutedOrder(self._placement.stage, executed, self._chunk_positions, work, self._meeting)

    def _register(self, marks: Marks, orders: Sequence[ExecutedOrder], *, waits: bool) -> None:
        """Register what the stages execute, stage 0 first."""
        placement = self._placement
        marks.register(
            pipeline_count=placement.pipeline_count,
            stage_count=placement.stage_count,
            tensor_count=placement.tensor_count,
            schedule=[order.computations for order in orders],
            paths=paths_through(orders),
            max_slowdown_percent=self._max_slowdown_percent,
            stage_work=[order.work for order in orders] if any(order.work for order in orders) else [],
            waits=waits,
        )

    def _follow(self, order: ChangingOrder, marks: Marks) -> None:
        """An iteration has ended: say that it differs, post what has settled, register what all posted."""
        self._iteration += 1
        change = order.end_iteration()
        if change is not None and change.is_news:
            first = (self._placement.pipeline, self._placement.stage, self._placement.tensor) == (0, 0, 0)
            _log.log(
                logging.WARNING if first else logging.INFO,
                "stage %d executes %s: such iterations run at stock clocks%s",
                self._placement.stage,
                describe_change(order.registered, change.executed),
                "" if self._exchange is None else " until it has settled and is registered anew",
            )
        if self._exchange is None:
            return
        if change is not None and change.has_settled:
            self._posted = f"{self._meeting}/{self._iteration}", self._iteration
            self._exchange.post(self._posted[0], self._own_order(change.executed))
        if self._posted is None:
            return
        name, since = self._posted
        if (orders := self._exchange.look(name, self._placement.stage_count)) is not None:
            self._posted = None
            order.register(orders[self._placement.stage].computations)
            self._register(marks, orders, waits=False)
        elif self._iteration - since >= _MEETING_ITERATIONS:
            self._posted = None
            _log.warning(
                "stage %d executes another order and other stages of its pipeline do not: not registered "
                "anew, it runs at stock clocks",
                self._placement.stage,
            )

    def _stop_following(self, error: Exception) -> None:
        """Orders can't be exchanged, or something of ours fails: what differs runs at stock, and no more."""
        self._order = self._posted = None
        _log.warning("orders that change are not followed any more: %s", error)


def paths_through(orders: Sequence[ExecutedOrder]) -> list[list[tuple[int, int]]]:
    """How activations flow through the chunks of all stages: by their positions in the model.

    Empty, chunk by chunk that is, where no stage says. ValueError if two chunks have the same position.
    """
    places: dict[int, tuple[int, int]] = {}
    for order in orders:
        for chunk, position in enumerate(order.chunk_positions):
            if position in places:
                raise ValueError(
                    f"chunk positions: expected each once, found {position} on stage {places[position][0]} "
                    f"and on stage {order.stage}"
                )
            places[position] = (order.stage, chunk)
    return [[places[position] for position in sorted(places)]] if places else []


def table_if_any(make: Callable[[], Sequence[Computation] | None]) -> Sequence[Computation] | None:
    """A framework's table, which is only compared with: None, and a word about it, if it can't be had."""
    try:
        return make()
    except Exception as error:  # of a framework that is not as known
        _log.info("the executed order is not checked against the framework's: %s", error)
        return None


def _difference(table: Sequence[Computation], executed: Sequence[Computation]) -> str:
    """Where a framework's table and what it executed differ first; empty if nowhere."""
    for index, (said, done) in enumerate(zip_longest(table, executed)):
        if said != done:
            return f"computation {index}: the framework's table has {said}, {done} was executed"
    return ""
