"""The common part of all framework hooks: one rank's marks, and the registration of its job.

A framework's module finds the rank's place (`probe.placement`), makes an `Attachment`, and puts marks around
the framework's functions (`marked_iteration`, `marked`, `replace_methods`), or calls

    begin_iteration ( begin end )* end_iteration

itself, once for every training iteration. Computations outside of an iteration (such as an evaluation's) are
not marked. A marked function receives its arguments unchanged, and its result or exception is passed on.

The executed order is registered as the job's, and followed (`probe.job_order`).

In a call that the user writes before training, mistakes raise ValueError. Apart from that, nothing here
raises into training, and no rank waits for another: any failure is logged once, the rank leaves its agent,
the others of its pipeline learn the reason, and training continues at stock.

Standard library only.
"""

import inspect
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Self, TypeVar, cast

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.probe.exchange import Exchange, LocalExchange
from perseus.agent.probe.job_order import JobOrder
from perseus.agent.probe.job_spec import check_job
from perseus.agent.probe.marks import Marks, UnmarkableError
from perseus.agent.probe.own_class import Wrap, put_own_class
from perseus.agent.probe.placement import Placement
from perseus.agent.probe.stage_work import StageWork

_log = logging.getLogger("perseus.attachment")

MAX_UNMARKED_STEPS = 10
"""Steps of one optimizer without a marked iteration, after which that is reported.

A few are no training: torch's checkpoints step once to create an optimizer's state, and trainers try a step
before they begin. Ten are no accident, and take a few minutes of the longest iterations.
"""

Identify = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Kind, int, int] | None]
"""Maps a call's arguments to its computation: kind, microbatch and chunk; None if it is not marked."""

_T = TypeVar("_T")
_Hook = TypeVar("_Hook", bound=Callable[..., "Attachment"])


class Attachment:
    """One attached rank of a framework. Its methods are for the training thread.

    `marks`: where marks are sent; None to send none. The other arguments are those of `JobOrder`.
    """

    def __init__(
        self,
        placement: Placement,
        marks: Marks | None,
        exchange: Exchange,
        *,
        chunk_positions: Sequence[int] = (),
        table: Sequence[Computation] | None = None,
        work: Callable[[], StageWork] = lambda: StageWork(""),
        max_slowdown_percent: float = 0.0,
    ) -> None:
        self._marks = marks
        self._order = JobOrder(
            placement,
            exchange,
            chunk_positions=chunk_positions,
            table=table,
            work=work,
            max_slowdown_percent=max_slowdown_percent,
        )
        self._has_given_up = False
        self._given_up: Marks | None = None
        self._restores: list[Callable[[], object]] = []
        self._is_in_iteration = False
        self._is_computing = False
        self._counts_work = True
        # Steps of each optimizer since an iteration began.
        self._step_counts: Counter[int] = Counter()
        self._has_reported_steps = False

    def replace(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute of an object or a module until `detach`. Keeps neither object nor value alive."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        find_owner, find_value = weak_reference(owner), weak_reference(value)

        def restore() -> None:
            owner, value = find_owner(), find_value()
            if owner is None or vars(owner).get(name) is not value:
                return  # wrapped again by other code, which still calls it: it no longer marks
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._restores.append(restore)

    def replace_methods(
        self, owner: Any, methods: Mapping[str, Wrap], attributes: Mapping[str, Any] | None = None
    ) -> None:
        """Replace methods and attributes of one object until `detach`, and not those of its copies."""
        own = {name: wrap for name, wrap in methods.items() if name not in vars(owner)}
        self._restores.append(put_own_class(owner, own, attributes)[1])
        for name in methods.keys() - own.keys():  # replaced by other code, on the object itself
            self.replace(owner, name, methods[name](getattr(owner, name)))

    def put_marks(self, put: Callable[[], None]) -> Self:
        """Call `put`, which installs all marks; undo them all if it fails."""
        try:
            put()
        except Exception as error:  # due to an unknown version of the framework
            self._restore()
            self._give_up(error)
        return self

    def when_detached(self, undo: Callable[[], object]) -> None:
        """Also call `undo` in `detach`."""
        self._restores.append(undo)

    def end_with(self, owner: Any, may_end: Callable[[], bool] = lambda: True) -> None:
        """End marking once `owner` is garbage: as the trainer's failure, since the job has not ended.

        `may_end`: whether replacements can be undone at the moment of the garbage collection.
        """

        def end() -> None:
            if not may_end():
                return
            if (marks := self._leave("what was attached is gone")) is not None:
                self._close(marks)

        finalizer = weakref.finalize(owner, self.ask, end)
        finalizer.atexit = False
        self.when_detached(finalizer.detach)

    def note_step(self, optimizer: int, cause: Callable[[], str]) -> None:
        """Note a step of an optimizer, given its `id`; report too many without an iteration once.

        `cause` returns why none is marked, as a part of a sentence.
        """
        self._step_counts[optimizer] += 1
        if (
            self._step_counts[optimizer] < MAX_UNMARKED_STEPS
            or self._has_reported_steps
            or self._has_given_up
        ):
            return
        self._has_reported_steps = True
        message = f"{MAX_UNMARKED_STEPS} optimizer steps without a marked iteration: {cause()}"
        _log.warning("not marked, training continues at stock clocks: %s", message)
        if self._marks is not None:
            self._marks.report_unmarked(message)

    def marked(
        self,
        function: Callable[..., Any],
        identify: Identify,
        note: Callable[[tuple[Kind, int, int], Any], None] | None = None,
    ) -> Callable[..., Any]:
        """Return the function with marks around its computations. `note` receives a computation's result."""

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
        """Return a waiting function with marks, which exclude its time from the computation around it."""

        @wraps(function)
        def waiting(*args: Any, **kwargs: Any) -> Any:
            if not self._is_computing:
                return function(*args, **kwargs)
            self._begin_wait()
            try:
                return function(*args, **kwargs)
            finally:  # training may catch the exception and continue the computation
                self._end_wait()

        return waiting

    def marked_iteration(
        self, function: Callable[..., Any], is_training: Callable[[], bool]
    ) -> Callable[..., Any]:
        """Return the function, which executes an iteration, with marks if it trains."""

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
        """Return a hook's answer about the training; on failure stop marking, and return None."""
        try:
            return question(*args)
        except Exception as error:  # ours, or due to an unknown version of the framework
            self._give_up(error)
            return None

    def begin_iteration(self) -> None:
        """Mark the begin of a training iteration."""
        self._is_in_iteration = True
        self._step_counts.clear()
        try:
            self._order.begin_iteration()
            if self._marks is not None:
                self._marks.begin_iteration()
        except Exception as error:  # our own failures must not stop training
            self._give_up(error)

    def end_iteration(self) -> None:
        """Mark the end of a complete iteration. The end of the first one registers the job."""
        if not self._is_in_iteration:
            return
        self._is_in_iteration = False
        if self._marks is not None:
            try:
                self._marks.end_iteration()
                self._order.end_iteration(self._marks)
            except Exception as error:  # as above
                self._give_up(error)

    def begin(self, kind: Kind, microbatch: int, chunk: int = 0) -> None:
        """Mark the begin of a computation."""
        if not self._is_in_iteration:
            return
        self._is_computing = True
        if self._marks is not None:
            try:
                self._order.begin(kind, microbatch, chunk)
                self._marks.begin_computation(kind, microbatch, chunk)
            except Exception as error:  # as above
                self._give_up(error)

    def end(self, kind: Kind, microbatch: int, chunk: int = 0) -> None:
        """Mark the computation's end."""
        self._is_computing = False
        if self._is_in_iteration and self._marks is not None:
            try:
                self._marks.end_computation(kind, microbatch, chunk)
            except Exception as error:  # as above
                self._give_up(error)

    def count_work(self, tensors: Callable[[], Any]) -> None:
        """Add to the iteration's work the elements of these tensors; on failure, count no more."""
        if self._counts_work and self._is_in_iteration and self._marks is not None:
            try:
                self._marks.count_work(_element_count(tensors()))
            except Exception as error:  # as above
                self._counts_work = False
                _log.debug("the work of iterations is not counted any more: %s", error)

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

    def figures(self) -> dict[str, float]:
        """Return what the plan in force saves, for a training's logger, in percent of stock.

        Empty while that is unknown, and on all ranks but the job's first.
        """
        saving = getattr(self._marks, "saving", None)
        return saving.figures() if saving is not None else {}

    def detach(self) -> None:
        """End marking: undo every replacement and close the connection; the GPU returns to stock."""
        marks = self._leave("it is detached")
        if marks is not None:
            try:
                marks.finish()
                marks.close()
            except Exception as error:  # as above
                _log.debug("leaving the agent: %s", error)

    def __enter__(self) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes a copy of it, as of a callback that holds it: that one is attached to nothing."""
        return _unattached, ()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.detach()
            return
        # The trainer failed: the rank is gone, but its job has not ended.
        marks = self._leave("it is detached")
        if marks is not None:
            self._close(marks)

    def _leave(self, why: str) -> Marks | None:
        self._restore()
        self._report_lost(why)
        marks, self._marks = self._marks, None
        return marks

    def _restore(self) -> None:
        for restore in reversed(self._restores):
            restore()
        self._restores.clear()
        self._is_in_iteration = self._is_computing = False

    def _give_up(self, error: Exception) -> None:
        """Stop marking: the agent sees the connection closed, and the GPU returns to stock."""
        if self._has_given_up:
            _log.debug("again: %s", error)
            return
        self._has_given_up = True
        _log_cause("no longer marked", error)
        self._report_lost(str(error))
        marks, self._marks = self._marks, None
        if marks is not None:
            # Kept, because destroying events during a capture might spoil it.
            self._given_up = marks
            self._close(marks)

    def _report_lost(self, why: str) -> None:
        try:
            self._order.lose(why)
        except Exception as error:  # as above
            _log.debug("notifying the other stages: %s", error)

    def _close(self, marks: Marks) -> None:
        try:
            marks.close()
        except Exception as error:  # as above
            _log.debug("leaving the agent: %s", error)


_ABSENT = object()


def _element_count(value: Any) -> int:
    """Return how many elements a tensor has, or those in a list, tuple or dictionary have."""
    if hasattr(value, "numel"):
        return int(value.numel())
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return 0
    return sum(map(_element_count, value))


def weak_reference(value: Any) -> Callable[[], Any]:
    """Return a weak reference to a value, or a strong one to a value without weak references."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _log_cause(what: str, error: Exception) -> None:
    """Log in one line why the training stays at stock."""
    is_ours = not isinstance(error, ValueError | UnmarkableError)
    cause = str(error) or type(error).__name__
    level = logging.ERROR if is_ours else logging.WARNING
    _log.log(level, "%s, training continues at stock clocks: %s", what, cause)
    _log.debug("the cause", exc_info=error)


def never_raises(attach: _Hook) -> _Hook:
    """Wrap a hook's `attach`: a failure leaves training unmarked, mistakes pass.

    Mistakes are its ValueErrors, an invalid `job_id` or `max_slowdown_percent`, and arguments that it lacks.
    """
    signature = inspect.signature(attach)

    @wraps(attach)
    def attached(*args: Any, **kwargs: Any) -> Attachment:
        given = signature.bind(*args, **kwargs).arguments
        check_job(given["job_id"], given.get("max_slowdown_percent", 0.0))
        try:
            return attach(*args, **kwargs)
        except ValueError:
            raise
        except Exception as error:  # ours, or due to an unknown version of the framework
            return _unmarked(error)

    return cast(_Hook, attached)


def stands_aside(attach: _Hook) -> _Hook:
    """Wrap an `attach` that a framework calls as it begins to train: mistakes, too, leave training unmarked.

    It would have trained, and who trains may not have written the callback.
    """

    @wraps(attach)
    def attached(*args: Any, **kwargs: Any) -> Attachment:
        try:
            return attach(*args, **kwargs)
        except Exception as error:
            return _unmarked(error)

    return cast(_Hook, attached)


def _unmarked(error: Exception) -> Attachment:
    """Log why a rank is not attached, and return an attachment that marks nothing."""
    _log_cause("not attached", error)
    return _unattached()


def _unattached() -> Attachment:
    return Attachment(Placement(0, 1, 0, 1), None, LocalExchange())
