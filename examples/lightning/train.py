"""A tiny transformer in data parallel, by Lightning; the callback puts it under Perseus.

    torchrun --nproc-per-node 2 examples/lightning/train.py

trains on a node's GPUs, under the agent at $PERSEUS_AGENT_SOCKET; without an agent it trains normally.
Without a GPU,

    perseus demo --script examples/lightning/train.py

trains with this file on CPUs, where each computation takes as long as on an emulated A100, and prints the
plan's savings. Training leaves no files; the demo leaves its processes' logs in demo-out/ (or --output).
"""

import os

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from perseus.agent.lightning import PerseusCallback

ITERATIONS, ACCUMULATED, BATCH = 1000, 2, 2
VOCABULARY, WIDTH, LENGTH = 64, 32, 16


class Module(LightningModule):
    """The model with its training step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH),
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True),
            nn.Linear(WIDTH, VOCABULARY),
        )

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        """Return the cross entropy of the next token."""
        (tokens,) = batch
        logits = self.model(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    """Train one replica, as a rank of torchrun."""
    trainer = Trainer(
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_steps=ITERATIONS,
        accumulate_grad_batches=ACCUMULATED,
        callbacks=[PerseusCallback(job_id="tiny-lightning", max_slowdown_percent=10)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    seeded = torch.Generator().manual_seed(0)
    tokens = TensorDataset(torch.randint(0, VOCABULARY, (1000, LENGTH + 1), generator=seeded))
    trainer.fit(Module(), DataLoader(tokens, batch_size=BATCH))


if __name__ == "__main__":
    main()
