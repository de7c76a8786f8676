"""Marks around a whole model's forwards and backwards, without a pipeline: one stage per replica.

    forward       a call of the model, while it trains and gradients are recorded
    backward      from the moment at which a gradient reaches the forward's output until autograd is done
    iteration     from the first forward to the end of the optimizer's step

A call within a backward, by an activation checkpoint of the whole model, is part of that backward. With
torch's reentrant checkpoints no gradient reaches the forward's output, as the forward records none: their
backward begins with that call.

An iteration's work is the number of elements in its forwards' inputs: padded batches differ in it.

Waiting for other replicas is no computation. DistributedDataParallel waits for its all-reduces in a callback
that autograd calls at its end; our callback runs before it, as it was registered earlier. So the wait lies
between the backward and the optimizer's step, within the iteration.

Attributes of a module are scripted and compiled with it, too, and so are torch's hooks. So nothing is hung on
the model (`probe.own_class`), and a call that is being compiled is the original one.

Standard library only; functions of torch are passed in as `TorchParts`.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from perseus.agent.link.computation import Kind
from perseus.agent.probe.attachment import Attachment
from perseus.agent.probe.own_class import put_own_class

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments."""

_marked_classes: "weakref.WeakSet[type]" = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class TorchParts:
    """The functions of torch that marks need.

    Attributes:
        is_compiling: whether calls are being compiled or exported, not executed.
        is_grad_enabled: whether gradients are recorded.
        is_in_backward: whether this thread executes a backward.
        is_checkpointing: whether the call is within the forward of a reentrant activation checkpoint.
        leaves: all values in a model's result, including those in lists, dictionaries and similar.
        when_backward_is_done: calls a function at the end of the current backward; only called within it.
    """

    is_compiling: Callable[[], bool]
    is_grad_enabled: Callable[[], bool]
    is_in_backward: Callable[[], bool]
    is_checkpointing: Callable[[], bool]
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
        # The microbatches that have gone backward in this iteration.
        self._backward: set[int] = set()
        # Forwards of reentrant checkpoints, whose backward has not begun.
        self._checkpointed: list[int] = []
        self._unmarked_call = ""

    def mark(self, model: Any, optimizer: Any) -> None:
        """Mark the model's calls and observe the optimizer's steps, until the attachment is detached."""
        own, the_model, is_compiling = type(model), weakref.ref(model), self._parts.is_compiling

        def call(this: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or this is not the_model():
                return own.__call__(this, *args, **kwargs)
            return self._call(this, lambda: own.__call__(this, *args, **kwargs), (args, kwargs))

        marked, restore = put_own_class(model, {}, {"__call__": call})
        _marked_classes.add(marked)
        self._attachment.when_detached(restore)
        self._observe_steps(optimizer)

    def mark_function(self, owner: Any, name: str, optimizer: Any) -> None:
        """Mark the calls of a function that trains, in place of the model's; otherwise as `mark`."""

        def marked(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: self._call(None, lambda: function(*args, **kwargs), (args, kwargs))

        self._attachment.replace_methods(owner, {name: marked})
        self._observe_steps(optimizer)

    def _observe_steps(self, optimizer: Any) -> None:
        handle = optimizer.register_step_post_hook(lambda *_: self._end_iteration())
        self._attachment.when_detached(handle.remove)

    def why_unmarked(self) -> str:
        """Return why optimizers step and no iteration is marked."""
        if self._is_in_iteration:
            return "the attached optimizer does not step: attach the one whose step ends an iteration"
        return self._unmarked_call or (
            "the attached model is not called: attach the object that the training loop calls, such as a "
            "wrapper or the result of torch.compile; and call it, not its forward()"
        )

    def _call(self, model: Any, call: Callable[[], Any], inputs: Inputs) -> Any:
        if not self._attachment.ask(self._is_forward, model):
            return call()
        if not self._is_in_iteration:
            self._is_in_iteration, self._microbatch, self._unmarked_call = True, 0, ""
            self._checkpointed.clear()
            self._backward.clear()
            self._attachment.begin_iteration()
        microbatch = self._microbatch
        self._microbatch += 1
        self._attachment.begin(Kind.FORWARD, microbatch)
        result = call()
        self._attachment.end(Kind.FORWARD, microbatch)
        self._attachment.ask(self._await_gradient, result, microbatch)
        positional, named = inputs
        self._attachment.count_work(lambda: (*positional, *named.values()))
        return result

    def _is_forward(self, model: Any) -> bool:
        """Return whether a call is a forward of training; if it is called again, its backward has begun."""
        if self._parts.is_in_backward():
            if self._checkpointed:
                self._begin_backward(self._checkpointed.pop())
            return False
        is_recorded = self._parts.is_grad_enabled()
        is_training = model is None or model.training  # None: of a function that only trains
        if is_training and (is_recorded or self._parts.is_checkpointing()):
            return True
        if is_recorded:
            self._unmarked_call = (
                "the attached model is in eval(): call its train() before training, also of a wrapper"
            )
        elif is_training:
            self._unmarked_call = (
                "the attached model is called without gradients (no_grad, inference_mode, or an activation "
                "checkpoint other than torch's): attach it where they are recorded"
            )
        return False

    def _await_gradient(self, result: Any, microbatch: int) -> None:
        if not self._parts.is_grad_enabled():
            self._checkpointed.append(microbatch)
            return

        def begin_backward(_gradient: Any) -> None:
            self._attachment.ask(self._begin_backward, microbatch)

        for value in self._parts.leaves(result):
            if getattr(value, "requires_grad", False):
                value.register_hook(begin_backward)

    def _begin_backward(self, microbatch: int) -> None:
        """Begin the backward at the first gradient, of several outputs or of a loss over several forwards."""
        if self._is_in_backward or not self._is_in_iteration:
            return
        if microbatch in self._backward:  # a second backward of its forward counts as another microbatch's
            microbatch = self._microbatch
            self._microbatch += 1
        self._backward.add(microbatch)

        def end() -> None:
            self._is_in_backward = False
            self._attachment.end(Kind.BACKWARD, microbatch)

        self._parts.when_backward_is_done(end)
        self._is_in_backward = True
        self._attachment.begin(Kind.BACKWARD, microbatch)

    def _end_iteration(self) -> None:
        if self._is_in_iteration:
            self._is_in_iteration = self._is_in_backward = False
            self._attachment.end_iteration()


def is_marked(model: Any) -> bool:
    """Return whether a model's calls are marked, by an attachment that has not been detached."""
    return type(model) in _marked_classes
