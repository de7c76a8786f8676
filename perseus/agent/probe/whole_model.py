"""Marks around a whole model's forwards and backwards, without a pipeline: one stage per replica.

    forward       a call of the model, while it trains and gradients are recorded
    backward      from the moment at which a gradient reaches the forward's output until autograd is done
    iteration     from the first forward to the end of the optimizer's step

Waiting for other replicas is no computation. DistributedDataParallel waits for its all-reduces in a callback
that autograd calls at its end; our callback runs before it, as it was registered earlier. So the wait lies
between the backward and the optimizer's step, within the iteration.

Attributes of a module are copied, pickled, scripted and compiled with it, and so are torch's hooks. So
nothing is attached to the model: its class is replaced by a subclass that marks its calls. A copy or a pickle
of it has the original class, and a call that is being compiled is the original one.

Standard library only; functions of torch are passed in as `TorchParts`.
"""

import copyreg
import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from perseus.agent.link.computation import Kind
from perseus.agent.probe.attachment import Attachment

_log = logging.getLogger("perseus.attachment")


@dataclass(frozen=True, slots=True)
class TorchParts:
    """The functions of torch that marks need.

    Attributes:
        is_compiling: whether calls are being compiled or exported, not executed.
        is_grad_enabled: whether gradients are recorded.
        leaves: all values in a model's result, including those in lists, dictionaries and similar.
        when_backward_is_done: calls a function at the end of the current backward; only called within it.
    """

    is_compiling: Callable[[], bool]
    is_grad_enabled: Callable[[], bool]
    leaves: Callable[[Any], Iterable[Any]]
    when_backward_is_done: Callable[[Callable[[], None]], None]


class MarkedModel:
    """Marks around one model's iterations; a microbatch is one call of its forward."""

    def __init__(self, attachment: Attachment, parts: TorchParts) -> None:
        self._attachment = attachment
        self._parts = parts
        self._is_in_iteration = False
        self._microbatch = 0
        self._is_in_backward = False
        self._has_been_called = False

    def mark(self, model: Any, optimizer: Any) -> None:
        """Mark the model's calls and observe the optimizer's steps, until the attachment is detached."""
        own = type(model)
        marked = _marked_class(own, model, self._call, self._parts.is_compiling)
        # Not by plain assignment: wrapper modules forward attributes.
        object.__setattr__(model, "__class__", marked)

        def restore() -> None:
            if type(model) is marked:  # otherwise other code has subclassed it since, and it no longer marks
                object.__setattr__(model, "__class__", own)

        self._attachment.when_detached(restore)
        name = own.__name__
        handle = optimizer.register_step_post_hook(lambda *_: self._end_iteration(name))
        self._attachment.when_detached(handle.remove)

    def _call(self, model: Any, call: Callable[[], Any]) -> Any:
        if not self._attachment.ask(self._is_training, model):
            return call()
        if not self._is_in_iteration:
            self._is_in_iteration, self._microbatch, self._has_been_called = True, 0, True
            self._attachment.begin_iteration()
        microbatch = self._microbatch
        self._microbatch += 1
        self._attachment.begin(Kind.FORWARD, microbatch)
        result = call()
        self._attachment.end(Kind.FORWARD, microbatch)
        self._attachment.ask(self._await_gradient, result, microbatch)
        return result

    def _is_training(self, model: Any) -> bool:
        return bool(model.training) and self._parts.is_grad_enabled()

    def _await_gradient(self, result: Any, microbatch: int) -> None:
        def begin_backward(_gradient: Any) -> None:
            self._attachment.ask(self._begin_backward, microbatch)

        for value in self._parts.leaves(result):
            if getattr(value, "requires_grad", False):
                value.register_hook(begin_backward)

    def _begin_backward(self, microbatch: int) -> None:
        """Begin the backward at the first gradient, of several outputs or of a loss over several forwards."""
        if self._is_in_backward or not self._is_in_iteration:
            return

        def end() -> None:
            self._is_in_backward = False
            self._attachment.end(Kind.BACKWARD, microbatch)

        self._parts.when_backward_is_done(end)
        self._is_in_backward = True
        self._attachment.begin(Kind.BACKWARD, microbatch)

    def _end_iteration(self, name: str) -> None:
        if self._is_in_iteration:
            self._is_in_iteration = self._is_in_backward = False
            self._attachment.end_iteration()
        elif not self._has_been_called:
            self._has_been_called = True  # log only once
            _log.warning(
                "not marked: the optimizer steps, but the attached %s was not called; attach the object that "
                "the training loop calls, such as the result of torch.compile or a wrapper",
                name,
            )


def _marked_class(
    own: Any, model: Any, marked: Callable[[Any, Callable[[], Any]], Any], is_compiling: Callable[[], bool]
) -> type:
    """Return a subclass of a model's class that marks only this model's calls.

    It holds no reference to the model: a class lives until garbage collection, and a model holds process
    groups.
    """
    the_model = weakref.ref(model)

    class OfItsOwn(type(own)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs)  # as modules do with their class: such as a slice of a Sequential

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or self is not the_model():
            return own.__call__(self, *args, **kwargs)
        return marked(self, lambda: own.__call__(self, *args, **kwargs))

    def reduce(self: Any, protocol: Any) -> Any:
        reduced = own.__reduce_ex__(self, protocol)
        if isinstance(reduced, str):
            return reduced
        function, arguments, *rest = reduced
        arguments = tuple(own if each is derived else each for each in arguments)
        if function is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle refuses another class
            function, arguments = copyreg._reconstructor, (own, object, None)  # type: ignore[attr-defined]
        return (own if function is derived else function, arguments, *rest)

    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    derived: type = OfItsOwn(own.__name__, (own,), {**names, "__call__": call, "__reduce_ex__": reduce})
    return derived
