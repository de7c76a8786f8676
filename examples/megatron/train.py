"""A tiny GPT of Megatron-Core in a pipeline of four, under Perseus.

    python examples/megatron/train.py

needs no GPU: it starts a coordinator and an agent on this machine, trains on CPUs with every computation
taking as long as an emulated A100 says, and tells what the plan saved. On GPUs, with an agent on every node
($PERSEUS_AGENT_SOCKET), the same file is started as always:

    torchrun --nproc-per-node 4 examples/megatron/train.py

What Perseus needs of it is the one line with `attach`.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed

from perseus.agent.megatron import attach
from perseus.demo import example
from perseus.demo.megatron_on_cpu import CPU_OPTIONS, do_without_cuda

STAGES, MICROBATCHES, ITERATIONS = 4, 8, 1000
VOCABULARY, WIDTH, LENGTH, MICROBATCH = 64, 32, 16, 2
EMULATED = example.tiny_transformer("tiny-gpt", MICROBATCHES)


def train() -> None:
    """One rank, started by torchrun."""
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        do_without_cuda()
    device = torch.device("cuda" if has_gpu else "cpu")
    distributed.init_process_group("nccl" if has_gpu else "gloo")

    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=STAGES)
    if has_gpu:
        model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=STAGES,
        hidden_size=WIDTH,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_model_parallel_size=STAGES,
        pipeline_dtype=torch.float32,
        **CPU_OPTIONS,
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        LENGTH,
        pre_process=stage == 0,
        post_process=stage == STAGES - 1,
        share_embeddings_and_output_weights=False,
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seeded = torch.Generator().manual_seed(0)  # all stages draw the same tokens
    shape = (MICROBATCHES, MICROBATCH, LENGTH + 1)
    with attach(config, job_id=EMULATED.job_id, **example.attach_arguments(EMULATED, stage)):
        for _ in range(ITERATIONS):
            tokens = torch.randint(0, VOCABULARY, shape, generator=seeded).to(device)
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(tokens),
                model=model,
                num_microbatches=MICROBATCHES,
                seq_length=LENGTH,
                micro_batch_size=MICROBATCH,
            )
            optimizer.step()
            optimizer.zero_grad()
            if is_over(device):
                break
    distributed.destroy_process_group()


def forward_step(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Megatron's `forward_step_func`."""
    tokens = next(batches)
    positions = torch.arange(LENGTH).expand(MICROBATCH, LENGTH).to(tokens.device)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1).to(tokens.device)
    return model(tokens[..., :-1], positions, mask, labels=tokens[..., 1:]), loss


def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mean over all tokens."""
    mean = output.mean()
    return mean, {"loss": mean.detach()}


def is_over(device: torch.device) -> bool:
    """Whether all ranks stop here: they ask each other, which also keeps them together."""
    votes = torch.tensor(float(example.is_told_to_stop())).to(device)
    distributed.all_reduce(votes)
    return bool(votes.item() > 0)


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        example.show(EMULATED, __file__)
