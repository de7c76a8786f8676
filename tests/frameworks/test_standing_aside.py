"""Callbacks of Transformers and Lightning that can't attach: the training goes on as without them."""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("transformers") is None:
    pytest.skip("Transformers is not installed; `make test-frameworks` has it", allow_module_level=True)

from perseus.agent import lightning as lightning_hook
from perseus.agent import transformers as transformers_hook

pytestmark = pytest.mark.slow("imports the frameworks")

STANDS_ASIDE = "not attached, training continues at stock clocks: "


def test_lightning_trains_on_what_the_callback_cannot_attach(caplog: pytest.LogCaptureFixture) -> None:
    module = SimpleNamespace(automatic_optimization=False)
    trainer = SimpleNamespace(strategy=None, lightning_module=module)
    callback = lightning_hook.PerseusCallback(job_id="gpt")
    callback.on_train_start(trainer, module)
    callback.on_train_batch_end(trainer, module)
    callback.on_train_end(trainer, module)
    (message,) = caplog.messages
    assert message.startswith(STANDS_ASIDE)
    assert "expected automatic optimization, found manual" in message


class Trainer:
    """A stand-in for Transformers' trainer, on so many GPUs, which trains nothing."""

    log = model_wrapped = None

    def __init__(self, n_gpu: int) -> None:
        self.args = SimpleNamespace(n_gpu=n_gpu)
        self.callback_handler = SimpleNamespace(callbacks=list[Any]())

    def add_callback(self, callback: Any) -> None:
        self.callback_handler.callbacks.append(callback)

    def train(self) -> str:
        for callback in self.callback_handler.callbacks:
            callback.on_train_begin(None, None, None)
            callback.on_train_end(None, None, None)
        return "trained"


@pytest.mark.parametrize("is_replaced", [False, True])
def test_transformers_trains_on_what_the_callback_cannot_attach(
    caplog: pytest.LogCaptureFixture, *, is_replaced: bool
) -> None:
    """Also without `add_callback`, which the callback then calls, and where others have replaced `train`."""
    trainer: Any = Trainer(n_gpu=2)
    if is_replaced:
        trainer.train = trainer.train
    transformers_hook.PerseusCallback(trainer, job_id="gpt")
    assert trainer.train() == "trained"
    (message,) = caplog.messages
    assert message.startswith(STANDS_ASIDE)
    assert "expected one GPU per process, as torchrun gives it, found 2" in message


@pytest.mark.parametrize(
    ("job_id", "percent", "what"), [("G P T", 0.0, "job_id"), ("gpt", 101.0, "max_slowdown")]
)
def test_mistakes_in_the_callback_s_own_line_are_refused_there(
    job_id: str, percent: float, what: str
) -> None:
    with pytest.raises(ValueError, match=what):
        lightning_hook.PerseusCallback(job_id=job_id, max_slowdown_percent=percent)
    with pytest.raises(ValueError, match=what):
        transformers_hook.PerseusCallback(Trainer(1), job_id=job_id, max_slowdown_percent=percent)
