"""A tiny transformer in data parallel, by Accelerate; the line with `attach_model` puts it under Perseus.

    torchrun --nproc-per-node 2 examples/accelerate/train.py

trains on a node's GPUs, under the agent at $PERSEUS_AGENT_SOCKET; without an agent it trains normally.
Without a GPU,

    perseus demo --script examples/accelerate/train.py

trains with this file on CPUs, where each computation takes as long as on an emulated A100, and prints the
plan's savings. Training leaves no files; the demo leaves its processes' logs in demo-out/ (or --output).
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from perseus.agent.torch import attach_model

EPOCHS, ACCUMULATED, BATCH = 8, 2, 2
VOCABULARY, WIDTH, LENGTH = 64, 32, 16


def main() -> None:
    """Train one replica, as a rank of torchrun."""
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATED)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True),
        nn.Linear(WIDTH, VOCABULARY),
    )
    seeded = torch.Generator().manual_seed(0)
    tokens = TensorDataset(torch.randint(0, VOCABULARY, (1000, LENGTH + 1), generator=seeded))
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(tokens, batch_size=BATCH)
    )

    with attach_model(model, optimizer, job_id="tiny-accelerate", max_slowdown_percent=10):
        for _ in range(EPOCHS):
            for (sequences,) in batches:
                with accelerator.accumulate(model):
                    logits = model(sequences[:, :-1])
                    loss = functional.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()

    accelerator.end_training()


if __name__ == "__main__":
    main()
