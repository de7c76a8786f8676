"""The order of a job's computations: registered as executed, and again after it has changed.

No schedule needs to be known beforehand: the first iteration is recorded as executed. At its end every stage
posts its order for the others of its pipeline (`probe.exchange`), and polls for theirs then and after each
later iteration. Once all are there, every rank declares its membership of a job with these orders; the first
one registers it. A rank without an agent takes part, because it can't know whether the others have one. If
the framework has its own table, a difference from the executed order is a debug message; that order wins. A
rank that is no longer marked posts the reason in place of its order, and then its whole pipeline is unmarked;
so it is if an order is missing for too long.

A later change of the order (such as a batch-size ramp) is logged at once. Once the new order is stable it is
posted in the same way, and when all stages have posted theirs, it is registered in place of the first.

No rank ever waits for another. Standard library only.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import zip_longest

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.probe.changing_order import ChangingOrder, describe_change
from perseus.agent.probe.exchange import Exchange, ExecutedOrder
from perseus.agent.probe.marks import Marks, UnmarkableError
from perseus.agent.probe.placement import Placement
from perseus.agent.probe.stage_work import StageWork, work_if_known

_log = logging.getLogger("perseus.attachment")

# Iterations for which a stage polls for the others' orders after posting its own.
_MEETING_ITERATIONS = 20

_FIRST = "first"


class JobOrder:
    """One rank's executed order, and its registration.

    `exchange` is where the stages of this rank's pipeline post orders. `table` is the framework's own order,
    if it has one. `work` returns, after an iteration, the stage's work (`probe.stage_work`).
    """

    def __init__(
        self,
        placement: Placement,
        exchange: Exchange,
        *,
        chunk_positions: Sequence[int],
        table: Sequence[Computation] | None,
        work: Callable[[], StageWork],
        max_slowdown_percent: float,
    ) -> None:
        self._placement = placement
        self._exchange = exchange
        self._chunk_positions = tuple(chunk_positions)
        self._table = table
        self._work = work
        self._max_slowdown_percent = max_slowdown_percent
        # Iterations begun, including failed ones: equal on all stages.
        self._iteration = 0
        # The first iteration's computations, until it is complete.
        self._recorded: list[Computation] | None = []
        # After that: the comparison of executed and registered order; the name and iteration of an order that
        # is posted but not yet registered; and whether other stages still need this one's first order.
        self._order: ChangingOrder | None = None
        self._posted: tuple[str, int] | None = None
        self._is_awaited = True

    def lose(self, why: str) -> None:
        """Post why this rank is no longer marked, for ranks of its pipeline that need its order."""
        if self._is_awaited:
            self._is_awaited = False
            self._exchange.post(_FIRST, ExecutedOrder(self._placement.stage, (), lost=why))

    def begin_iteration(self) -> None:
        """Begin an iteration."""
        self._iteration += 1
        if self._recorded is not None:
            self._recorded = []
        elif self._order is not None:
            self._order.begin_iteration()

    def begin(self, kind: Kind, microbatch: int, chunk: int) -> None:
        """Record the begin of a computation."""
        if self._recorded is not None:
            self._recorded.append(Computation(kind, microbatch, chunk))
        elif self._order is not None:
            self._order.begin(kind, microbatch, chunk)

    def end_iteration(self, marks: Marks) -> None:
        """End a complete iteration; register the orders through `marks` once all stages have posted theirs.

        Raises:
            UnmarkableError: a stage can't be followed. Other errors of the first registration pass, too.
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
            except Exception as error:  # our own failures must not stop training
                self._order = self._posted = None
                _log.warning("other orders run at stock clocks until the training is restarted: %s", error)

    def _compare_with_table(self, executed: tuple[Computation, ...]) -> None:
        if self._table is not None and (difference := _difference(self._table, executed)):
            _log.debug(
                "pipeline %d, stage %d: %s; the executed order counts",
                self._placement.pipeline,
                self._placement.stage,
                difference,
            )

    def _post(self, name: str, executed: tuple[Computation, ...]) -> None:
        stage, work = self._placement.stage, work_if_known(self._work)
        order = ExecutedOrder(
            stage, executed, self._chunk_positions, work.text, layer_counts=work.layer_counts
        )
        self._exchange.post(name, order)
        self._posted = name, self._iteration

    def _register_first(self, marks: Marks) -> None:
        """Register the job, once all stages have posted their orders."""
        if (orders := self._poll()) is not None:
            self._is_awaited = False
            self._register(marks, orders)

    def _poll(self) -> list[ExecutedOrder] | None:
        """Return all stages' orders under the latest name; None if some are missing.

        Raises:
            UnmarkableError: a stage can't be followed, or has not posted in time.
        """
        assert self._posted is not None
        name, since = self._posted
        found = self._exchange.poll(name, self._placement.stage_count)
        orders = [order for order in found if order is not None]
        for order in orders:
            if not order.computations:
                self._is_awaited = False  # the other stages see the same
                raise UnmarkableError(
                    f"stage {order.stage}: {order.lost or 'it has executed no computation'}"
                )
        if len(orders) == len(found):
            self._posted = None
            return orders
        if self._iteration - since >= _MEETING_ITERATIONS:
            self._posted = None
            missing = ", ".join(str(stage) for stage, order in enumerate(found) if order is None)
            raise UnmarkableError(f"stage {missing}: its order is missing")
        return None

    def _register(self, marks: Marks, orders: Sequence[ExecutedOrder]) -> None:
        """Register the stages' orders, stage 0 first. The outcome is logged when it is known."""
        placement = self._placement
        marks.register(
            pipeline_count=placement.pipeline_count,
            stage_count=placement.stage_count,
            tensor_count=placement.tensor_count,
            schedule=[order.computations for order in orders],
            paths=paths_through(orders),
            max_slowdown_percent=self._max_slowdown_percent,
            stage_work=[order.work for order in orders] if any(order.work for order in orders) else [],
            stage_layers=_layers(orders),
            waits=False,
        )

    def _follow(self, order: ChangingOrder, marks: Marks) -> None:
        """End an iteration: log a new difference, post a stable order, register once all have posted."""
        change = order.end_iteration()
        if change is not None and change.is_new:
            first = (self._placement.pipeline, self._placement.stage, self._placement.tensor) == (0, 0, 0)
            _log.log(
                logging.WARNING if first else logging.DEBUG,
                "stage %d executes %s: these iterations run at stock clocks until "
                "the new order is stable and registered",
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
                "stage %d executes another order and other stages of its pipeline do not: it is not "
                "registered and runs at stock clocks",
                self._placement.stage,
            )
            return
        if orders is not None:
            order.register(orders[self._placement.stage].computations)
            self._register(marks, orders)


def _layers(orders: Sequence[ExecutedOrder]) -> list[tuple[int, ...]]:
    """Return the layers of each stage's chunks; none if those of a chunk are unknown."""
    chunk_counts = [1 + max(c.chunk for c in order.computations) for order in orders]
    layers = [order.layer_counts for order in orders]
    return layers if [*map(len, layers)] == chunk_counts else []


def paths_through(orders: Sequence[ExecutedOrder]) -> list[list[tuple[int, int]]]:
    """Return the paths of activations through the chunks of all stages, by their positions in the model.

    Empty (chunk by chunk) if no stage has positions. ValueError if two chunks have the same position.
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
    """Return a framework's table, which is only used for comparison; log a failure and return None."""
    try:
        return make()
    except Exception as error:  # due to an unknown version of the framework
        _log.debug("the executed order is not checked against the framework's: %s", error)
        return None


def _difference(table: Sequence[Computation], executed: Sequence[Computation]) -> str:
    """Describe the first difference between a framework's table and the executed order, if any."""
    for index, (expected, done) in enumerate(zip_longest(table, executed)):
        if expected != done:
            return f"computation {index}: the framework's table has {expected}, {done} was executed"
    return ""
