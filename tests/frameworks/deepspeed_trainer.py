"""A tiny transformer, really trained with DeepSpeed's pipeline on CPUs: `-m …deepspeed_trainer TASK…`."""

import os
import sys
from functools import partial

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import nn
from torch.nn import functional

from perseus.agent.deepspeed import attach
from tests.frameworks.trainers import Rank, main

VOCABULARY, WIDTH, LENGTH, MICROBATCH_SIZE = 64, 32, 16, 2


def train(rank: Rank) -> None:
    """Train one rank."""
    task = rank.task
    # Otherwise DeepSpeed would compile its shared-memory collectives now.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    losses: list[float] = []

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(output.reshape(-1, VOCABULARY), target.reshape(-1))
        losses.append(loss.item())
        return loss

    torch.manual_seed(0)
    blocks = [
        nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        for _ in range(task.stage_count)
    ]
    model = PipelineModule(
        [nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY)],
        num_stages=task.stage_count,
        loss_fn=loss_of,
        partition_method="type:TransformerEncoderLayer",
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": MICROBATCH_SIZE,
            "gradient_accumulation_steps": task.microbatch_count,
            "steps_per_print": sys.maxsize,
        },
    )
    pipeline, stage = engine.grid.get_data_parallel_rank(), engine.grid.get_pipe_parallel_rank()
    with rank.attached(partial(attach, engine), pipeline, stage):
        for iteration in rank.iterations(task.iteration_count):
            generator = torch.Generator().manual_seed(1000 * pipeline + iteration)
            size = (task.microbatch_count, MICROBATCH_SIZE, LENGTH + 1)
            microbatches = torch.randint(0, VOCABULARY, size, generator=generator)
            engine.train_batch(iter([(tokens[:, :-1], tokens[:, 1:]) for tokens in microbatches]))
            if losses:
                rank.leave_losses(pipeline, losses)
                losses.clear()
    assert not {"_INSTRUCTION_MAP", "train_batch"} & vars(engine).keys(), "detached"


if __name__ == "__main__":
    sys.exit(main(train))
