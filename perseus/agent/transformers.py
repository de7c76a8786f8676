"""Attach to Hugging Face Transformers' `Trainer`, with one line.

    from perseus.agent.transformers import PerseusCallback

    trainer = Trainer(model, arguments, train_dataset=…)
    trainer.add_callback(PerseusCallback(trainer, job_id="bert"))
    trainer.train()

The rank is attached from the begin of training to its end, as `attach_model` of `perseus.agent.torch` does
with the model that the trainer has prepared. If training raises an exception, the rank has failed.
Transformers calls no callback then, nor does it pass callbacks the model as prepared: so this one takes the
trainer, as TRL's callbacks do, and wraps its `train`. Copies of the trainer train unattached.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers

from perseus.agent.probe.attachment import Attachment, never_raises, stands_aside
from perseus.agent.probe.client import Probe
from perseus.agent.probe.framework import check_attributes
from perseus.agent.probe.job_spec import check_job
from perseus.agent.probe.marks import Connect
from perseus.agent.probe.own_class import put_own_class
from perseus.agent.probe.tested_versions import note_versions
from perseus.agent.torch import attach_model

_OF_TRAINING = ("loss", "train_loss")
"""Each of a trainer's logs about training has one of these; those about evaluations have none."""


@never_raises
def attach(
    trainer: Any, *, job_id: str, connect: Connect = Probe.connect, max_slowdown_percent: float = 0.0
) -> Attachment:
    """Attach a trainer that has prepared its model; its logs of training then contain the job's saving.

    Arguments and errors as those of `attach_model`. Raises ValueError also for several GPUs per process.
    """
    if (count := trainer.args.n_gpu) > 1:
        raise ValueError(
            f"trainer: expected one GPU per process, as torchrun gives it, found {count} (DataParallel)"
        )
    note_versions("transformers", str(transformers.__version__), str(torch.__version__))
    attachment = attach_model(
        trainer.model_wrapped,
        trainer.optimizer,
        job_id=job_id,
        connect=connect,
        max_slowdown_percent=max_slowdown_percent,
    )

    def with_saving(log: Callable[..., Any]) -> Callable[..., Any]:
        def log_with_saving(logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
            if any(name in logs for name in _OF_TRAINING):
                logs.update(attachment.figures())
            return log(logs, *args, **kwargs)

        return log_with_saving

    return attachment.put_marks(lambda: attachment.replace_methods(trainer, {"log": with_saving}))


class PerseusCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Attaches `trainer` while it trains; on the rank that knows the job's saving, its logs contain it."""

    def __init__(
        self,
        trainer: Any,
        *,
        job_id: str,
        connect: Connect = Probe.connect,
        max_slowdown_percent: float = 0.0,
    ) -> None:
        """`trainer`: a `Trainer`, to which the callback is then added. The others: as in `attach_model`.

        Raises ValueError for another trainer, job or slowdown. Where `attach_model` raises it later, within
        `train`, that is logged, and the training continues as before.
        """
        check_job(job_id, max_slowdown_percent)
        check_attributes(trainer, f"trainer {type(trainer).__name__}", "train", "log", "model_wrapped")
        self._attach = partial(
            stands_aside(attach), job_id=job_id, connect=connect, max_slowdown_percent=max_slowdown_percent
        )
        self._attachment: Attachment | None = None
        self._trainer: Callable[[], Any] = weakref.ref(trainer)

        def attached(train: Callable[..., Any]) -> Callable[..., Any]:
            def attached_train(*args: Any, **kwargs: Any) -> Any:
                trainer = self._trainer()
                if self not in trainer.callback_handler.callbacks:
                    trainer.add_callback(self)
                try:
                    return train(*args, **kwargs)
                except BaseException as error:
                    self._leave(error)
                    raise

            return attached_train

        if "train" in vars(trainer):  # replaced by other code, on the object itself
            trainer.train = attached(trainer.train)
        else:
            put_own_class(trainer, {"train": attached})

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes a copy of it: a callback that does nothing, as copies of the trainer have it."""
        return transformers.TrainerCallback, ()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Attach: the model and the optimizer are prepared."""
        self._leave(RuntimeError("training begins again"))  # with another batch size, after lack of memory
        self._attachment = self._attach(self._trainer())

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Detach."""
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.__exit__(type(error) if error is not None else None, error, None)
