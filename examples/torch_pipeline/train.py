"""A tiny transformer in a pipeline of four, under Perseus.

    python examples/torch_pipeline/train.py

needs no GPU: it starts a coordinator and an agent on this machine, trains on CPUs with every computation
taking as long as an emulated A100 says, and tells what the plan saved. On GPUs, with an agent on every node
($PERSEUS_AGENT_SOCKET), the same file is started as always:

    torchrun --nproc-per-node 4 examples/torch_pipeline/train.py

What Perseus needs of it is the one line with `attach`.
"""

import os

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from perseus.agent.torch import attach
from perseus.demo import example

STAGES, MICROBATCHES, ITERATIONS = 4, 8, 1000
VOCABULARY, WIDTH, LENGTH, BATCH = 64, 32, 16, 16
EMULATED = example.tiny_transformer("tiny-transformer", MICROBATCHES)


class Part(nn.Module):  # type: ignore[misc]
    """One stage's part of the model."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if stage == 0 else nn.Identity()
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY) if stage == STAGES - 1 else nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Tokens or activations in, activations or logits out."""
        return self.head(self.block(self.embedding(hidden)))


def train() -> None:
    """One rank, started by torchrun."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else "cpu"
    distributed.init_process_group()
    rank = distributed.get_rank()
    part = Part(rank).to(device)
    stage = PipelineStage(part, rank, STAGES, torch.device(device))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    seeded = torch.Generator().manual_seed(0)  # all stages draw the same tokens
    with attach(schedule, job_id=EMULATED.job_id, **example.attach_arguments(EMULATED, rank)):
        for _ in range(ITERATIONS):
            tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=seeded).to(device)
            inputs = [tokens[:, :-1]] if stage.is_first else []
            schedule.step(*inputs, **({"target": tokens[:, 1:]} if stage.is_last else {}))
            optimizer.step()
            optimizer.zero_grad()
            if is_over():
                break
    distributed.destroy_process_group()


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next token."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def is_over() -> bool:
    """Whether all ranks stop here: they ask each other, which also keeps them together."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    votes = torch.tensor(float(example.is_told_to_stop()), device=device)
    distributed.all_reduce(votes)
    return bool(votes.item() > 0)


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        example.show(EMULATED, __file__)
