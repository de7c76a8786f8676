"""Train a tiny model by Transformers, Lightning or Accelerate on CPUs: `-m …everyday_trainer TASK…`.

The task's schedule names the framework and how its two ranks share the model: `transformers ddp`, `lightning
fsdp2` and so on. Every training accumulates gradients over two microbatches in bfloat16, evaluates, saves a
checkpoint and is resumed from it by another trainer; if a "failure" is planted, an exception ends it, and
Transformers' trainer trains once more.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from transformers import TrainingArguments

from perseus.agent.probe.marks import Connect
from perseus.agent.torch import attach_model, stepping
from perseus.agent.transformers import PerseusCallback
from tests.frameworks.trainers import Rank, main

VOCABULARY, WIDTH, LENGTH, BATCH, ACCUMULATED = 64, 16, 8, 2, 2
ITERATIONS, SAVED_AFTER = 4, 2


class PlantedError(Exception):
    """An exception of the training itself."""


class Model(nn.Module):  # type: ignore[misc]
    """Sorts sequences of tokens into two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embedding(tokens).mean(dim=1)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return {"loss": functional.cross_entropy(self.head(hidden).float(), labels)}


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def sequences(count: int) -> TensorDataset:
    tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    return TensorDataset(tokens, tokens.sum(dim=1) % 2)


def of_an_epoch() -> int:
    """How many sequences all ranks together train on."""
    return ITERATIONS * ACCUMULATED * BATCH * int(distributed.get_world_size())


def sharding() -> FullyShardedDataParallelPlugin:
    """FSDP2 as Accelerate applies it, which on CPUs it otherwise refuses: see `shard_on_cpus`."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )
    plugin.set_mixed_precision("bf16")
    return plugin


def shard_on_cpus(accelerator: Accelerator) -> None:
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = sharding()


def check_untouched(model: nn.Module, optimizer: Any) -> None:
    """Check that no hook has stayed."""
    assert type(model).__call__ is nn.Module.__call__
    assert not stepping(optimizer)._optimizer_step_post_hooks


# --- Transformers -------------------------------------------------------------------------------------------


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """Raises an exception at a microbatch."""

    def __init__(self, *args: Any, fails_at: int = -1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fails_at = fails_at
        self.losses: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(self.losses) == self.fails_at:
            raise PlantedError
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def transformers_trainer(wrapping: str, folder: Path, connect: Connect | None, **more: Any) -> Trainer:
    saves = wrapping == "ddp"  # sharded by Accelerate, a model on a CPU can't be saved
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        bf16=True,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATED,
        num_train_epochs=1,
        ddp_find_unused_parameters=False,
        logging_steps=1,
        eval_strategy="steps",
        save_strategy="steps" if saves else "no",
        eval_steps=SAVED_AFTER,
        save_steps=SAVED_AFTER,
        report_to="none",
        disable_tqdm=True,
    )
    data = [{"tokens": tokens, "labels": label} for tokens, label in sequences(of_an_epoch())]
    trainer = Trainer(make_model(), arguments, train_dataset=data, eval_dataset=data[:4], **more)
    if not saves:
        shard_on_cpus(trainer.accelerator)
        trainer.is_fsdp_enabled = True
    if connect is not None:
        trainer.add_callback(PerseusCallback(trainer, job_id="job", connect=connect))
    return trainer


def train_transformers(wrapping: str, folder: Path, connect: Connect | None, *, fails: bool) -> list[float]:
    trainer = transformers_trainer(wrapping, folder, connect, fails_at=ACCUMULATED + 1 if fails else -1)
    with suppress(PlantedError):
        trainer.train()
    if fails:
        check_untouched(trainer.model_wrapped, trainer.optimizer)
        trainer.fails_at = -1
        trainer.train()
        assert any("perseus_energy_saved_percent" in entry for entry in trainer.state.log_history)
    trainers = [trainer]
    if not fails and wrapping == "ddp":
        trainers.append(transformers_trainer(wrapping, folder, connect))
        trainers[1].train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED_AFTER}"))
    for each in trainers:
        check_untouched(each.model_wrapped, each.optimizer)
        assert "log" not in vars(each)
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return [*(loss for each in trainers for loss in each.losses), *evaluated]


# --- Accelerate ---------------------------------------------------------------------------------------------


def train_accelerate(wrapping: str, folder: Path, connect: Connect | None, *, fails: bool) -> list[float]:
    losses: list[float] = []
    saves = wrapping == "ddp"  # see `transformers_trainer`
    for is_resumed in (False, True) if saves and not fails else (False,):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATED)
        if wrapping == "fsdp2":
            shard_on_cpus(accelerator)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = DataLoader(sequences(of_an_epoch()), BATCH)
        model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        if is_resumed:
            accelerator.load_state(str(folder))
            batches = accelerator.skip_first_batches(batches, SAVED_AFTER * ACCUMULATED)
        attachment = attach_model(model, optimizer, job_id="job", connect=connect) if connect else None
        with suppress(PlantedError), attachment or nullcontext():
            for tokens, labels in batches:
                with accelerator.accumulate(model):
                    loss = model(tokens, labels)["loss"]
                    losses.append(loss.item())
                    if fails and len(losses) > ACCUMULATED:
                        raise PlantedError
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                if len(losses) == SAVED_AFTER * ACCUMULATED:
                    if saves:
                        accelerator.save_state(str(folder))
                    model.eval()
                    with torch.no_grad():
                        losses.append(model(tokens, labels)["loss"].item())
                    model.train()
        check_untouched(model, optimizer)
    return losses


# --- Lightning ----------------------------------------------------------------------------------------------


def lightning_training(package: str) -> Callable[..., list[float]]:
    if package == "lightning":
        import lightning.pytorch as lightning
    else:
        import pytorch_lightning as lightning
    from perseus.agent.lightning import PerseusCallback as LightningCallback

    assert issubclass(LightningCallback, lightning.Callback)
    strategies: Any = lightning.strategies

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, wrapping: str, fails_at: int) -> None:
            super().__init__()
            self.wrapping, self.fails_at = wrapping, fails_at
            self.model = make_model()
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if self.wrapping == "fsdp2" and not isinstance(self.model, FSDPModule):
                mesh = self.device_mesh["data_parallel"]
                for layer in self.model.layers:
                    fully_shard(layer, mesh=mesh)
                fully_shard(self.model, mesh=mesh)

        def training_step(self, batch: Sequence[torch.Tensor], _index: int) -> dict[str, torch.Tensor]:
            if len(self.losses) == self.fails_at:
                raise PlantedError
            found: dict[str, torch.Tensor] = self.model(*batch)
            self.losses.append(found["loss"].item())
            return found

        def validation_step(self, batch: Sequence[torch.Tensor], _index: int) -> None:
            self.losses.append(self.model(*batch)["loss"].item())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def train(wrapping: str, folder: Path, connect: Connect | None, *, fails: bool) -> list[float]:
        losses: list[float] = []
        path = folder / "last"
        for is_resumed in (False, True) if not fails else (False,):
            module = Module(wrapping, ACCUMULATED + 2 if fails else -1)  # one of them is the sanity check's
            trainer = lightning.Trainer(
                accelerator="cpu",
                devices=distributed.get_world_size(),
                strategy=strategies.DDPStrategy()
                if wrapping == "ddp"
                else strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
                precision="bf16-mixed",
                accumulate_grad_batches=ACCUMULATED,
                max_steps=ITERATIONS if is_resumed else SAVED_AFTER,
                num_sanity_val_steps=1,
                val_check_interval=ACCUMULATED * SAVED_AFTER,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[LightningCallback(job_id="job", connect=connect)] if connect else [],
            )
            data = DataLoader(sequences(of_an_epoch()), BATCH)
            with suppress(PlantedError):
                trainer.fit(module, data, DataLoader(sequences(2), 1), ckpt_path=path if is_resumed else None)
                trainer.save_checkpoint(path)
            assert "training_step" not in vars(trainer.strategy)
            for optimizer in trainer.optimizers:
                check_untouched(module, optimizer)
            losses += module.losses
        return losses

    return train


# --- ranks --------------------------------------------------------------------------------------------------

Training = Callable[..., list[float]]
TRAININGS: Mapping[str, Callable[[], Training]] = {
    "transformers": lambda: train_transformers,
    "accelerate": lambda: train_accelerate,
    "lightning": lambda: lightning_training("lightning"),
    "pytorch_lightning": lambda: lightning_training("pytorch_lightning"),
}


def train(rank: Rank) -> None:
    """Train one rank."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    task = rank.task
    framework, wrapping = task.schedule.split()
    connect = rank.attach_arguments(rank.number, 0)["connect"] if task.is_attached else None
    fails = task.planted == "failure"
    losses = TRAININGS[framework]()(wrapping, Path(task.folder, "model"), connect, fails=fails)
    for loss in losses:
        rank.leave_losses(rank.number, [loss])


if __name__ == "__main__":
    assert accelerate  # imported once, before the ranks are forked
    sys.exit(main(train))
