"""The order in which a job's stages compute: registered as it is executed, and anew when it has changed.

No schedule needs to be known beforehand: the first iteration is recorded as it was really executed. At its
end every stage posts its order for the others of its pipeline (`probe.exchange`) and looks for theirs, then
and after each iteration that follows. Once all are there, every rank says that it belongs to a job that
computes so; the first one registers it. A rank without an agent takes part, as it can't know of the others'.
Where the framework has a table of its own, a difference from what was executed is logged; the executed order
wins. A rank that is not marked any more says why in its order's place, and none of its pipeline is marked
then; nor where an order does not come.

An order that changes later (a ramp of the batch size, say) is said at once. Once it has settled it is posted
in the same way, and when all stages have, it is registered in place of the first.

Nobody ever waits for another rank. Standard library only.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import zip_longest

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.probe.changing_order import ChangingOrder, describe_change
from perseus.agent.probe.exchange import Exchange, ExecutedOrder
from perseus.agent.probe.marks import Marks, UnmarkableError
from perseus.agent.probe.placement import Placement
from perseus.agent.probe.stage_work import work_if_known

_log = logging.getLogger("perseus.attachment")

# How long a stage that has posted an order looks for those of the others, which execute the same iterations.
_MEETING_ITERATIONS = 20

_FIRST = "first"


class JobOrder:
    """What one rank's stage executes, and what of it is registered.

    `exchange` is where the stages of this rank's pipeline post orders. `table` is the order that the
    framework itself says it will execute, if it says. `work` tells, after an iteration, what the stage
    computes (`probe.stage_work`).
    """

    def __init__(
        self,
        placement: Placement,
        exchange: Exchange,
        *,
        chunk_positions: Sequence[int],
        table: Sequence[Computation] | None,
        work: Callable[[], str],
        max_slowdown_percent: float,
    ) -> None:
        self._placement = placement
        self._exchange = exchange
        self._chunk_positions = tuple(chunk_positions)
        self._table = table
        self._work = work
        self._max_slowdown_percent = max_slowdown_percent
        # Iterations begun, those that failed included: the same for all stages.
        self._iteration = 0
        # The first iteration, until it has been executed whole.
        self._recorded: list[Computation] | None = []
        # From then on: what it executes against what is registered; an order that was posted and is not yet
        # registered, by its name and iteration; and whether other stages wait for this one's first.
        self._order: ChangingOrder | None = None
        self._posted: tuple[str, int] | None = None
        self._is_awaited = True

    def lose(self, why: str) -> None:
        """This rank is not marked any more: those of its pipeline that wait for its order learn why."""
        if self._is_awaited:
            self._is_awaited = False
            self._exchange.post(_FIRST, ExecutedOrder(self._placement.stage, (), lost=why))

    def begin_iteration(self) -> None:
        """An iteration begins."""
        self._iteration += 1
        if self._recorded is not None:
            self._recorded = []
        elif self._order is not None:
            self._order.begin_iteration()

    def begin(self, kind: Kind, microbatch: int, chunk: int) -> None:
        """A computation of it begins."""
        if self._recorded is not None:
            self._recorded.append(Computation(kind, microbatch, chunk))
        elif self._order is not None:
            self._order.begin(kind, microbatch, chunk)

    def end_iteration(self, marks: Marks) -> None:
        """It ends, and was executed whole. Registers by `marks` what all stages have posted.

        Raises:
            UnmarkableError: a stage can't be followed. Nor are other errors of the first registration caught.
        """
        if self._recorded is not None:
            executed, self._recorded = tuple(self._recorded), None
            self._compare_with_table(executed)
            self._order = ChangingOrder(executed)
            self._post(_FIRST, executed)
            self._register_first(marks)
        elif self._is_awaited:
            self._register_first(marks)
        elif self._order is not None:
            try:
                self._follow(self._order, marks)
            except Exception as error:  # of ours, whatever it is: training goes on
                self._order = self._posted = None
                _log.warning("orders that change are not followed any more: %s", error)

    def _compare_with_table(self, executed: tuple[Computation, ...]) -> None:
        if self._table is not None and (difference := _difference(self._table, executed)):
            _log.warning(
                "pipeline %d, stage %d: %s; what was executed counts",
                self._placement.pipeline,
                self._placement.stage,
                difference,
            )

    def _post(self, name: str, executed: tuple[Computation, ...]) -> None:
        stage, work = self._placement.stage, work_if_known(self._work)
        self._exchange.post(name, ExecutedOrder(stage, executed, self._chunk_positions, work))
        self._posted = name, self._iteration

    def _register_first(self, marks: Marks) -> None:
        """Register the job, once all stages have posted what they execute."""
        if (orders := self._poll()) is not None:
            self._is_awaited = False
            self._register(marks, orders, waits=True)

    def _poll(self) -> list[ExecutedOrder] | None:
        """What all stages have posted under the latest name; None as long as some have not.

        Raises:
            UnmarkableError: a stage can't be followed, or has not posted in time.
        """
        assert self._posted is not None
        name, since = self._posted
        found = self._exchange.poll(name, self._placement.stage_count)
        orders = [order for order in found if order is not None]
        for order in orders:
            if not order.computations:
                self._is_awaited = False  # the others see the same
                raise UnmarkableError(f"stage {order.stage}: {order.lost or 'it has computed nothing'}")
        if len(orders) == len(found):
            self._posted = None
            return orders
        if self._iteration - since >= _MEETING_ITERATIONS:
            self._posted = None
            missing = ", ".join(str(stage) for stage, order in enumerate(found) if order is None)
            raise UnmarkableError(f"stage {missing}: what it computes did not come")
        return None

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
        change = order.end_iteration()
        if change is not None and change.is_new:
            first = (self._placement.pipeline, self._placement.stage, self._placement.tensor) == (0, 0, 0)
            _log.log(
                logging.WARNING if first else logging.INFO,
                "stage %d executes %s: such iterations run at stock clocks until it has settled and is "
                "registered anew",
                self._placement.stage,
                describe_change(order.registered, change.executed),
            )
        if change is not None and change.is_stable:
            self._post(str(self._iteration), change.executed)
        if self._posted is None:
            return
        try:
            orders = self._poll()
        except UnmarkableError:
            _log.warning(
                "stage %d executes another order and other stages of its pipeline do not: not registered "
                "anew, it runs at stock clocks",
                self._placement.stage,
            )
            return
        if orders is not None:
            order.register(orders[self._placement.stage].computations)
            self._register(marks, orders, waits=False)


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
    for index, (expected, done) in enumerate(zip_longest(table, executed)):
        if expected != done:
            return f"computation {index}: the framework's table has {expected}, {done} was executed"
    return ""
