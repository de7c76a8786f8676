"""A tiny transformer in a DeepSpeed pipeline of four, under Perseus.

    python examples/deepspeed/train.py

needs no GPU: it starts a coordinator and an agent on this machine, trains on CPUs with every computation
taking as long as an emulated A100 says, and tells what the plan saved. On GPUs, with an agent on every node
($PERSEUS_AGENT_SOCKET), the same file is started as always:

    deepspeed --num_gpus 4 examples/deepspeed/train.py

What Perseus needs of it is the one line with `attach`.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
from deepspeed.pipe import PipelineModule
from torch import distributed, nn
from torch.nn import functional

from perseus.agent.deepspeed import attach
from perseus.demo import example

STAGES, MICROBATCHES, ITERATIONS = 4, 8, 1000
VOCABULARY, WIDTH, LENGTH, MICROBATCH = 64, 32, 16, 2
EMULATED = example.tiny_transformer("tiny-deepspeed", MICROBATCHES)


def train() -> None:
    """One rank, started by torchrun or by DeepSpeed's launcher."""
    if not torch.cuda.is_available():
        # Else DeepSpeed would compile its collectives for shared memory now.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
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
    seeded = torch.Generator().manual_seed(0)  # all stages draw the same tokens
    shape = (MICROBATCHES, MICROBATCH, LENGTH + 1)
    with attach(engine, job_id=EMULATED.job_id, **example.attach_arguments(EMULATED, engine.stage_id)):
        for _ in range(ITERATIONS):
            tokens = torch.randint(0, VOCABULARY, shape, generator=seeded)
            engine.train_batch(iter([(batch[:, :-1], batch[:, 1:]) for batch in tokens]))
            if is_over(engine.device):
                break
    distributed.destroy_process_group()


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next token."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def is_over(device: torch.device) -> bool:
    """Whether all ranks stop here: they ask each other."""
    votes = torch.tensor(float(example.is_told_to_stop()), device=device)
    distributed.all_reduce(votes)
    return bool(votes.item() > 0)


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        example.show(EMULATED, __file__)
