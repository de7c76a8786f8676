"""A tiny Llama in data parallel, by Transformers' `Trainer`; the callback puts it under Perseus.

    torchrun --nproc-per-node 2 examples/transformers/train.py

trains on a node's GPUs, under the agent at $PERSEUS_AGENT_SOCKET; without an agent it trains normally.
Without a GPU,

    perseus demo --script examples/transformers/train.py

trains with this file on CPUs, where each computation takes as long as on an emulated A100, and prints the
plan's savings. Training leaves no files; the demo leaves its processes' logs in demo-out/ (or --output).
"""

from collections.abc import Sequence
from tempfile import TemporaryDirectory

import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from perseus.agent.transformers import PerseusCallback

ITERATIONS, ACCUMULATED, BATCH = 1000, 2, 2
VOCABULARY, WIDTH, LENGTH = 64, 32, 16


def main() -> None:
    """Train one replica, as a rank of torchrun."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    )
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=ACCUMULATED,
            max_steps=ITERATIONS,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=tokens(1000))
        trainer.add_callback(PerseusCallback(trainer, job_id="tiny-llama", max_slowdown_percent=10))
        trainer.train()

    distributed.destroy_process_group()


def tokens(count: int) -> Sequence[dict[str, torch.Tensor]]:
    """Return random sequences, each its own target; the trainer distributes them to the replicas."""
    seeded = torch.Generator().manual_seed(0)
    sequences = torch.randint(0, VOCABULARY, (count, LENGTH), generator=seeded)
    return [{"input_ids": sequence, "labels": sequence} for sequence in sequences]


if __name__ == "__main__":
    main()
