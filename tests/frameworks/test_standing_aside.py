"""Callbacks of Transformers and Lightning that can't attach: the training goes on as without them."""

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("transformers") is None:
    pytest.skip("Transformers is not installed; `make test-frameworks` has it", allow_module_level=True)

import lightning.pytorch as lightning
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

from perseus.agent import lightning as lightning_hook
from perseus.agent import transformers as transformers_hook
from perseus.agent.torch import attach_model
from tests.agent.marks_stub import MarksStub

pytestmark = pytest.mark.slow("imports the frameworks")

STANDS_ASIDE = "not attached, training continues at stock clocks: "


class Manual(lightning.LightningModule):  # type: ignore[misc]
    """Optimizes by itself, which is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = nn.Linear(1, 1)
        self.step_count = 0

    def training_step(self, batch: torch.Tensor, _index: int) -> None:
        self.model(batch).sum().backward()
        self.optimizers().step()
        self.step_count += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_lightning_trains_on_what_the_callback_cannot_attach(caplog: pytest.LogCaptureFixture) -> None:
    module = Manual()
    lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[lightning_hook.PerseusCallback(job_id="gpt")],
    ).fit(module, DataLoader(torch.ones(3, 1)))  # fmt: skip
    assert module.step_count == 3
    (message,) = (message for message in caplog.messages if message.startswith(STANDS_ASIDE))
    assert "expected automatic optimization, found manual" in message


class Loss(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(1, 1)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.model(inputs).sum()}


def test_transformers_trains_on_what_the_callback_cannot_attach(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Here with a model that is attached already; the first attachment is left as it is."""
    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=3, report_to="none", save_strategy="no", disable_tqdm=True
    )
    data = [{"inputs": torch.ones(1)}] * 3
    trainer = transformers.Trainer(Loss(), arguments, train_dataset=data)
    trainer.add_callback(transformers_hook.PerseusCallback(trainer, job_id="gpt"))
    marks = MarksStub()
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    attached = attach_model(trainer.model, optimizer, job_id="other", connect=lambda **_: marks)
    trainer.train()
    assert trainer.state.global_step == 3
    assert ("close",) not in marks.calls
    attached.detach()
    (message,) = (message for message in caplog.messages if message.startswith(STANDS_ASIDE))
    assert "expected one that is not attached" in message


@pytest.mark.parametrize(
    ("job_id", "percent", "what"), [("G P T", 0.0, "job_id"), ("gpt", 101.0, "max_slowdown")]
)
def test_mistakes_in_the_callback_s_own_line_are_refused_there(
    job_id: str, percent: float, what: str
) -> None:
    with pytest.raises(ValueError, match=what):
        lightning_hook.PerseusCallback(job_id=job_id, max_slowdown_percent=percent)
    trainer = type("Trainer", (), {"train": None, "log": None, "model_wrapped": None})()
    with pytest.raises(ValueError, match=what):
        transformers_hook.PerseusCallback(trainer, job_id=job_id, max_slowdown_percent=percent)
