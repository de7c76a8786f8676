"""A tiny GPT of Megatron-Core in a pipeline of four stages; the line with `attach` puts it under Perseus.

    torchrun --nproc-per-node 4 examples/megatron/train.py

trains on a node's GPUs, under the agent at $PERSEUS_AGENT_SOCKET; without an agent it trains normally.
Without a GPU,

    perseus demo --script examples/megatron/train.py

trains with this file on CPUs, where each computation takes as long as on an emulated A100, and prints the
plan's savings. Training leaves no files; the demo leaves its processes' logs in demo-out/ (or --output).
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed

from perseus.agent.megatron import attach

STAGES, MICROBATCHES, ITERATIONS = 4, 8, 1000
VOCABULARY, WIDTH, LENGTH, MICROBATCH = 64, 32, 16, 2


def main() -> None:
    """Train one stage, as a rank of torchrun."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=STAGES)
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=STAGES,
        hidden_size=WIDTH,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_model_parallel_size=STAGES,
        pipeline_dtype=torch.float32,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with attach(config, job_id="tiny-gpt"):
        run_forward_backward = get_forward_backward_func()
        for tokens in batches():
            run_forward_backward(
                forward_step_func=forward_step,
                data_iterator=iter(tokens.cuda()),
                model=model,
                num_microbatches=MICROBATCHES,
                seq_length=LENGTH,
                micro_batch_size=MICROBATCH,
            )
            optimizer.step()
            optimizer.zero_grad()

    distributed.destroy_process_group()


def forward_step(microbatches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Megatron's `forward_step_func`."""
    tokens = next(microbatches)
    positions = torch.arange(LENGTH, device="cuda").expand(MICROBATCH, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device="cuda").triu(1)
    return model(tokens[..., :-1], positions, mask, labels=tokens[..., 1:]), loss


def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the mean loss over all tokens."""
    mean = output.mean()
    return mean, {"loss": mean.detach()}


def batches() -> Iterator[torch.Tensor]:
    """Yield random tokens, microbatch by microbatch, the same on all stages."""
    seeded = torch.Generator().manual_seed(0)
    for _ in range(ITERATIONS):
        yield torch.randint(0, VOCABULARY, (MICROBATCHES, MICROBATCH, LENGTH + 1), generator=seeded)


if __name__ == "__main__":
    main()
