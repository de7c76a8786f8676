"""A tiny transformer in a pipeline of four stages; the line with `attach` puts it under Perseus.

    torchrun --nproc-per-node 4 examples/torch_pipeline/train.py

trains on a node's GPUs, under the agent at $PERSEUS_AGENT_SOCKET; without an agent it trains normally.
Without a GPU,

    perseus demo --script examples/torch_pipeline/train.py

trains with this file on CPUs, where each computation takes as long as on an emulated A100, and prints the
plan's savings. Training leaves no files; the demo leaves its processes' logs in demo-out/ (or --output).
"""

import os
from collections.abc import Iterator

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from perseus.agent.torch import attach

STAGES, MICROBATCHES, ITERATIONS = 4, 8, 1000
VOCABULARY, WIDTH, LENGTH, BATCH = 64, 32, 16, 16


def main() -> None:
    """Train one stage, as a rank of torchrun."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    distributed.init_process_group()
    rank = distributed.get_rank()
    part = Part(rank).to(device)
    stage = PipelineStage(part, rank, STAGES, device)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)

    with attach(schedule, job_id="tiny-transformer"):
        for tokens in batches():
            inputs = [tokens[:, :-1].to(device)] if stage.is_first else []
            targets = {"target": tokens[:, 1:].to(device)} if stage.is_last else {}
            schedule.step(*inputs, **targets)
            optimizer.step()
            optimizer.zero_grad()

    distributed.destroy_process_group()


class Part(nn.Module):
    """One stage's part of the model."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if stage == 0 else nn.Identity()
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY) if stage == STAGES - 1 else nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map tokens or activations to activations or logits."""
        return self.head(self.block(self.embedding(hidden)))


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next token."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches() -> Iterator[torch.Tensor]:
    """Yield random tokens, the same on all stages."""
    seeded = torch.Generator().manual_seed(0)
    for _ in range(ITERATIONS):
        yield torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=seeded)


if __name__ == "__main__":
    main()
