"""What the hooks into all frameworks share: one rank's marks, and the registration of its job.

A framework's module finds the rank's place (`probe.placement`), makes an `Attachment`, and puts marks around
the framework's functions (`marked_iteration`, `marked`, `replace`), or calls

    begin_iteration ( begin end )* end_iteration

itself, once for every iteration that trains. Computations outside of an iteration, of an evaluation say, are
not marked. What is marked is called with what it was called with, and what it returns or raises is returned
or raised.

No schedule needs to be known beforehand: the first iteration is recorded as it was really executed. At its
end the ranks of every pipeline gather their orders, one small collective each, and every rank says that it
belongs to a job that computes so; the first one registers it. A rank without an agent takes part, as it
can't know of the others'. Where the framework has a table of its own, a difference from what was executed is
logged; the executed order wins.

An order that changes later (a ramp of the batch size, say) is said at once. Once it has settled the stages
post it for each other (`probe.exchange`), and when all of them have, it is registered in place of the first.

Before training, mistakes are refused (ValueError). After that nothing here raises into training: whatever
goes wrong is logged once, the rank leaves its agent, and training goes on at stock. A stage that could not be
followed says so to the others of its pipeline when orders are gathered: none of them is marked then.

Standard library only.
"""

import logging
import uuid
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import zip_longest
from typing import Any, Protocol, Self, TypeVar

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.probe.changing_order import ChangingOrder, describe_change
from perseus.agent.probe.client import Path
from perseus.agent.probe.exchange import Exchange, ExecutedOrder
from perseus.agent.probe.placement import Placement
from perseus.agent.probe.stage_work import work_if_known

_log = logging.getLogger("perseus.attachment")


class UnmarkableError(Exception):
    """What is trained can't be followed by marks, and why."""


class Marks(Protocol):
    """What an attachment needs of its probe, or of what stands before one."""

    def register(
        self,
        *,
        pipeline_count: int,
        stage_count: int,
        tensor_count: int,
        schedule: Sequence[Sequence[Computation]],
        paths: Sequence[Path],
        max_slowdown_percent: float,
        stage_work: Sequence[str],
        waits: bool = True,
    ) -> bool:
        """See `Probe.register`."""

    def begin_iteration(self) -> None:
        """See `Probe.begin_iteration`. UnmarkableError ends all marking."""

    def end_iteration(self) -> None:
        """See `Probe.end_iteration`."""

    def begin_computation(self, kind: Kind, microbatch: int, chunk: int) -> None:
        """See `Probe.begin_computation`."""

    def end_computation(self, kind: Kind, microbatch: int, chunk: int) -> None:
        """See `Probe.end_computation`."""

    def begin_wait(self) -> None:
        """See `Probe.begin_wait`."""

    def end_wait(self) -> None:
        """See `Probe.end_wait`."""

    def finish(self) -> None:
        """See `Probe.finish`."""

    def close(self) -> None:
        """See `Probe.close`."""


Connect = Callable[..., Marks]
"""How marks are sent: `Probe.connect`, or what takes its keyword arguments."""


Gather = Callable[[ExecutedOrder], Sequence[ExecutedOrder]]
"""Gathers the orders of all stages of this rank's pipeline; called by all of them."""


Identify = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Kind, int, int] | None]
"""Which computation a call with such arguments is: kind, microbatch and chunk; None: none that is marked."""

# How long a stage that has posted an order waits for those of the others, which change in the same iteration.
_MEETING_ITERATIONS = 20

_T = TypeVar("_T")


class Attachment:
    """One rank of a framework, attached. Its methods are for the thread that trains.

    `table` is the order that the framework itself says it will execute, if it says. `work` tells, after an
    iteration, what the stage computes (`probe.stage_work`). `is_capturing` says whether launches go into a
    graph now instead of running: an iteration that begins so is captured whole, and registers nothing, as
    that takes a collective. `exchange`: where stages post orders that change; None: they are not followed.
    """

    def __init__(
        self,
        placement: Placement,
        marks: Marks,
        gather: Gather,
        *,
        chunk_positions: Sequence[int] = (),
        table: Sequence[Computation] | None = None,
        work: Callable[[], str] = lambda: "",
        max_slowdown_percent: float = 0.0,
        is_capturing: Callable[[], bool] = lambda: False,
        exchange: Exchange | None = None,
    ) -> None:
        self._placement = placement
        self._marks: Marks | None = marks
        self._gather = gather
        self._chunk_positions = tuple(chunk_positions)
        self._table = table
        self._work = work
        self._max_slowdown_percent = max_slowdown_percent
        self._is_capturing = is_capturing
        self._has_given_up = False
        self._given_up: Marks | None = None
        self._restores: list[Callable[[], None]] = []
        self._is_in_iteration = False
        self._is_computing = False
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

    def replace(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute of an object or a module until `detach`."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)

        def restore() -> None:
            if vars(owner).get(name) is not value:
                return  # somebody wrapped it again since, and still calls it: it marks nothing any more
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._restores.append(restore)

    def when_detached(self, undo: Callable[[], None]) -> None:
        """Call this in `detach`, too."""
        self._restores.append(undo)

    def marked(
        self,
        function: Callable[..., Any],
        identify: Identify,
        note: Callable[[tuple[Kind, int, int], Any], None] | None = None,
    ) -> Callable[..., Any]:
        """A function that computes, with marks around it. `note` is told what a computation returned."""

        @wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            computation = self.ask(identify, args, kwargs)
            if computation is None:
                return function(*args, **kwargs)
            self.begin(*computation)
            result = function(*args, **kwargs)
            self.end(*computation)
            if note is not None:
                self.ask(note, computation, result)
            return result

        return marked

    def waiting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that waits for other ranks. Within a computation, its time is left out of that."""

        @wraps(function)
        def waiting(*args: Any, **kwargs: Any) -> Any:
            if not self._is_computing:
                return function(*args, **kwargs)
            self._begin_wait()
            try:
                return function(*args, **kwargs)
            finally:  # training may catch what it raises, and compute on
                self._end_wait()

        return waiting

    def marked_iteration(
        self, function: Callable[..., Any], is_training: Callable[[], bool]
    ) -> Callable[..., Any]:
        """A function that executes an iteration, marked as one where it trains."""

        @wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if not self.ask(is_training):
                return function(*args, **kwargs)
            self.begin_iteration()
            result = function(*args, **kwargs)
            self.end_iteration()
            return result

        return marked

    def ask(self, question: Callable[..., _T], *args: Any) -> _T | None:
        """The answer to a hook's question about what is trained. None, and no marks any more, if it fails."""
        try:
            return question(*args)
        except Exception as error:  # of ours, or of a framework that is not as known: training goes on
            self._is_followed = False
            self._give_up(error)
            return None

    def begin_iteration(self) -> None:
        """An iteration that trains begins."""
        self._is_in_iteration = True
        try:
            if self._executed is not None:
                self._executed = []
                self._is_in_iteration = not self._is_capturing()
            if self._order is not None:
                self._order.begin_iteration()
            if self._marks is not None:
                self._marks.begin_iteration()
        except Exception as error:  # of ours, whatever it is: training goes on
            self._give_up(error)

    def end_iteration(self) -> None:
        """It ends, and was executed whole. The end of the first one registers the job."""
        if not self._is_in_iteration:
            return
        self._is_in_iteration = False
        if self._marks is not None:
            try:
                self._marks.end_iteration()
            except Exception as error:  # as above
                self._give_up(error)
        if self._executed is not None:
            executed, self._executed = tuple(self._executed), None
            try:
                self._register_first(executed)
            except Exception as error:  # as above
                self._give_up(error)
        elif self._order is not None and self._marks is not None:
            try:
                self._follow_order(self._order)
            except Exception as error:  # as above
                self._stop_following(error)

    def begin(self, kind: Kind, microbatch: int, chunk: int = 0) -> None:
        """A computation begins."""
        if not self._is_in_iteration:
            return
        self._is_computing = True
        if self._executed is not None:
            self._executed.append(Computation(kind, microbatch, chunk))
        elif self._order is not None:
            self._order.begin(kind, microbatch, chunk)
        if self._marks is not None:
            try:
                self._marks.begin_computation(kind, microbatch, chunk)
            except Exception as error:  # as above
                self._give_up(error)

    def end(self, kind: Kind, microbatch: int, chunk: int = 0) -> None:
        """The computation ends."""
        self._is_computing = False
        if self._is_in_iteration and self._marks is not None:
            try:
                self._marks.end_computation(kind, microbatch, chunk)
            except Exception as error:  # as above
                self._give_up(error)

    def _begin_wait(self) -> None:
        self._is_computing = False
        if self._marks is not None:
            try:
                self._marks.begin_wait()
            except Exception as error:  # as above
                self._give_up(error)

    def _end_wait(self) -> None:
        self._is_computing = self._is_in_iteration
        if self._marks is not None:
            try:
                self._marks.end_wait()
            except Exception as error:  # as above
                self._give_up(error)

    def detach(self) -> None:
        """Training is done: undo every replacement and end the connection; the GPU goes back to stock."""
        self._restore()
        marks, self._marks = self._marks, None
        if marks is not None:
            try:
                marks.finish()
                marks.close()
            except Exception as error:  # as above
                _log.warning("leaving the agent: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.detach()
            return
        # A failure of the trainer: the rank is gone, but its job has not ended.
        self._restore()
        marks, self._marks = self._marks, None
        if marks is not None:
            self._close(marks)

    def _restore(self) -> None:
        for restore in reversed(self._restores):
            restore()
        self._restores.clear()
        self._is_in_iteration = self._is_computing = False

    def _register_first(self, executed: tuple[Computation, ...]) -> None:
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
        if self._marks is None:
            return
        if lost := [str(order.stage) for order in orders if not order.computations]:
            raise UnmarkableError(f"what stage {', '.join(lost)} computes could not be followed, see its log")
        self._meeting = orders[0].meeting
        self._register(self._marks, orders, waits=True)
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

    def _follow_order(self, order: ChangingOrder) -> None:
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
        if self._exchange is None or self._marks is None:
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
            self._register(self._marks, orders, waits=False)
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

    def _give_up(self, error: Exception) -> None:
        """Nothing is marked any more: the agent finds the line closed, and the GPU goes back to stock."""
        if self._has_given_up:
            _log.debug("again: %s", error)
            return
        self._has_given_up = True
        trace = None if isinstance(error, UnmarkableError) else error
        _log.error("not marked any more, training goes on at stock clocks: %s", error, exc_info=trace)
        marks, self._marks = self._marks, None
        if marks is not None:
            # Kept, as events that are destroyed in the midst of a capture might spoil it.
            self._given_up = marks
            self._close(marks)

    def _close(self, marks: Marks) -> None:
        try:
            marks.close()
        except Exception as error:  # as above
            _log.warning("leaving the agent: %s", error)


_ABSENT = object()


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
