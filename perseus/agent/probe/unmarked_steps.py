"""Optimizer steps without a marked iteration, as training that nobody marks looks; and when hooks may go.

torch calls one hook after every step of any optimizer, whatever the training loop does with its model.
"""

import sys
from collections.abc import Callable
from typing import Any

from perseus.agent.probe.attachment import Attachment


def watch_steps(attachment: Attachment, cause: Callable[[], str], owner: Any = None) -> None:
    """Report training that the attachment does not mark, with its likely cause.

    `owner`: the object whose calls are marked; once it is garbage, the attachment ends.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    handle = register_optimizer_step_post_hook(
        lambda optimizer, *_: attachment.ask(attachment.note_step, id(optimizer), cause)
    )
    attachment.when_detached(handle.remove)
    if owner is not None:
        attachment.end_with(owner, may_end=_is_no_step_running)


def _is_no_step_running() -> bool:
    """Return whether no thread is within an optimizer's step: then hooks can be removed.

    Garbage collection may run at any time, also while torch iterates over hooks, which would raise then.
    """
    from torch.optim.optimizer import Optimizer

    file = sys.modules[Optimizer.__module__].__file__
    for frame in sys._current_frames().values():
        each = frame
        while each is not None:
            if each.f_code.co_filename == file:
                return False
            each = each.f_back  # type: ignore[assignment]
    return True
