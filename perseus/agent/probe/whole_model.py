"""Marks around a whole model's forwards and backwards, where there is no pipeline: one stage a replica.

    forward       the model's `forward`, while it trains and gradients are recorded
    backward      from the moment at which a gradient reaches the forward's output until autograd is done
    iteration     from the first forward to the end of the optimizer's step

What waits for other replicas is no computation. DistributedDataParallel waits for its all-reduces in a
callback that autograd calls when it is done; so are we called, and before, as we asked to be earlier. The
wait so lies between the backward and the optimizer's step, within the iteration.

Standard library only; what it needs of torch comes in as `TorchParts`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from perseus.agent.link.computation import Kind
from perseus.agent.probe.attachment import Attachment


@dataclass(frozen=True, slots=True)
class TorchParts:
    """What is asked of torch.

    Attributes:
        is_grad_enabled: whether gradients are recorded.
        leaves: all values in whatever a model returns, also within lists, dictionaries and the like.
        when_backward_is_done: calls a function when the backward under way is done; to be asked within it.
    """

    is_grad_enabled: Callable[[], bool]
    leaves: Callable[[Any], Iterable[Any]]
    when_backward_is_done: Callable[[Callable[[], None]], None]


class MarkedModel:
    """Marks around one model's iterations; a microbatch is one call of its forward."""

    def __init__(self, attachment: Attachment, model: Any, parts: TorchParts) -> None:
        self._attachment = attachment
        self._model = model
        self._parts = parts
        self._is_in_iteration = False
        self._microbatch = 0
        self._is_in_backward = False

    def mark(self, optimizer: Any) -> None:
        """Replace the model's forward until the attachment is detached; hear of the optimizer's steps."""
        self._attachment.replace(self._model, "forward", self._marked_forward(self._model.forward))
        handle = optimizer.register_step_post_hook(lambda *_: self._end_iteration())
        self._attachment.when_detached(handle.remove)

    def _marked_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if not self._attachment.ask(self._is_training):
                return forward(*args, **kwargs)
            if not self._is_in_iteration:
                self._is_in_iteration, self._microbatch = True, 0
                self._attachment.begin_iteration()
            microbatch = self._microbatch
            self._microbatch += 1
            self._attachment.begin(Kind.FORWARD, microbatch)
            result = forward(*args, **kwargs)
            self._attachment.end(Kind.FORWARD, microbatch)
            self._attachment.ask(self._await_gradient, result, microbatch)
            return result

        return marked

    def _is_training(self) -> bool:
        return bool(self._model.training) and self._parts.is_grad_enabled()

    def _await_gradient(self, result: Any, microbatch: int) -> None:
        def begin_backward(_gradient: Any) -> None:
            self._attachment.ask(self._begin_backward, microbatch)

        for value in self._parts.leaves(result):
            if getattr(value, "requires_grad", False):
                value.register_hook(begin_backward)

    def _begin_backward(self, microbatch: int) -> None:
        """A gradient has come: of several outputs, or of a loss of several forwards, the first."""
        if self._is_in_backward or not self._is_in_iteration:
            return

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
