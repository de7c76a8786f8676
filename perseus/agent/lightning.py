"""Attach to Lightning's `Trainer`, with one line; `lightning` and `pytorch_lightning` alike.

    from perseus.agent.lightning import PerseusCallback

    trainer = Trainer(…, callbacks=[PerseusCallback(job_id="resnet")])
    trainer.fit(module, data)

The rank is attached while `fit` trains, as `attach_model` of `perseus.agent.torch` does. A forward is one
call of the strategy's `training_step`, whatever that calls: the module, or a wrapper such as
`DistributedDataParallel`, which Lightning leaves in `eval()`.
"""

import sys
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

from perseus.agent.probe.attachment import Attachment, never_raises, stands_aside
from perseus.agent.probe.client import Probe
from perseus.agent.probe.job_spec import check_job
from perseus.agent.probe.marks import Connect
from perseus.agent.probe.tested_versions import note_versions
from perseus.agent.torch import attach_model

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _of_this_program() -> str:
    """Return the package that the program has imported, or else one that is installed."""
    imported = [name for name in _PACKAGES if name in sys.modules]
    return imported[0] if imported else _PACKAGES[0] if find_spec("lightning") else _PACKAGES[1]


_lightning: Any = import_module(_of_this_program())


@never_raises
def attach(
    trainer: Any, *, job_id: str, connect: Connect = Probe.connect, max_slowdown_percent: float = 0.0
) -> Attachment:
    """Attach a trainer whose strategy has set up the model and the optimizer.

    Arguments and errors as those of `attach_model`. Raises ValueError also for a module that optimizes by
    itself, and for tensor parallelism.
    """
    strategy, module = trainer.strategy, trainer.lightning_module
    name = f"module {type(module).__name__}"
    if not module.automatic_optimization:
        raise ValueError(
            f"{name}: expected automatic optimization, found manual: call attach_model of "
            "perseus.agent.torch in on_train_start, with the network that training_step calls"
        )
    mesh = getattr(strategy, "device_mesh", None)
    if mesh is not None and (count := mesh["tensor_parallel"].size()) > 1:
        raise ValueError(f"{name}: expected no tensor parallelism, found {count} tensor-parallel ranks")
    note_versions("lightning", version(_lightning.__name__.partition(".")[0]), str(torch.__version__))
    return attach_model(
        strategy.model,
        trainer.optimizers[0],
        forward=(strategy, "training_step"),
        job_id=job_id,
        connect=connect,
        max_slowdown_percent=max_slowdown_percent,
    )


class PerseusCallback(_lightning.Callback):  # type: ignore[misc]
    """Attaches the trainer while it fits; the rank that knows the job's saving passes it to the loggers."""

    def __init__(
        self, *, job_id: str, connect: Connect = Probe.connect, max_slowdown_percent: float = 0.0
    ) -> None:
        """All arguments: as in `attach_model`. Raises ValueError for an invalid job or slowdown.

        Where `attach` raises it later, within `fit`, that is logged, and the training continues as before.
        """
        super().__init__()
        check_job(job_id, max_slowdown_percent)
        self._attach = partial(
            stands_aside(attach), job_id=job_id, connect=connect, max_slowdown_percent=max_slowdown_percent
        )
        self._attachment: Attachment | None = None
        self._logged: dict[str, float] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach: the strategy has set up the model and the optimizer."""
        self._attachment = self._attach(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the job's saving when it has changed."""
        figures = self._attachment.figures() if self._attachment is not None else {}
        if figures and figures != self._logged:
            self._logged = figures
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach."""
        self._leave(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach: the rank has failed."""
        self._leave(exception)

    def _leave(self, error: BaseException | None) -> None:
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.__exit__(type(error) if error is not None else None, error, None)
