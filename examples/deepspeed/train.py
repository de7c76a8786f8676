"""A tiny transformer in a DeepSpeed pipeline of four stages; the line with `attach` puts it under Perseus.

    deepspeed --num_gpus 4 examples/deepspeed/train.py

trains on a node's GPUs, under the agent at $PERSEUS_AGENT_SOCKET; without an agent it trains normally.
Without a GPU,

    perseus demo --script examples/deepspeed/train.py

trains with this file on CPUs, where each computation takes as long as on an emulated A100, and prints the
plan's savings. Training leaves no files; the demo leaves its processes' logs in demo-out/ (or --output).
"""

from collections.abc import Iterator

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import distributed, nn
from torch.nn import functional

from perseus.agent.deepspeed import attach

STAGES, MICROBATCHES, ITERATIONS = 4, 8, 1000
VOCABULARY, WIDTH, LENGTH, MICROBATCH = 64, 32, 16, 2


def main() -> None:
    """Train one stage, as a rank of DeepSpeed's launcher or torchrun."""
    deepspeed.init_distributed()
    blocks = [
        nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(STAGES)
    ]
    model = PipelineModule(
        [nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY)],
        num_stages=STAGES,
        loss_fn=loss,
        partition_method="type:TransformerEncoderLayer",
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": MICROBATCH,
            "gradient_accumulation_steps": MICROBATCHES,
            "steps_per_print": 100,
        },
    )

    with attach(engine, job_id="tiny-deepspeed"):
        for microbatches in batches():
            engine.train_batch(iter(microbatches))

    distributed.destroy_process_group()


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next token."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches() -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Yield random tokens and the next of each, microbatch by microbatch, the same on all stages."""
    seeded = torch.Generator().manual_seed(0)
    for _ in range(ITERATIONS):
        tokens = torch.randint(0, VOCABULARY, (MICROBATCHES, MICROBATCH, LENGTH + 1), generator=seeded)
        yield [(some[:, :-1], some[:, 1:]) for some in tokens]


if __name__ == "__main__":
    main()
