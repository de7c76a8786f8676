"""torchtitan's debug model, trained by torchtitan itself on CPUs: `-m …torchtitan_trainer TASK…`.

The tokens are random: releases have neither tokenizer nor data set, which are only in the repository. Both of
torchtitan's ways of configuration are served, by command-line options and by this module.
"""

import importlib
import sys
from collections.abc import Iterator
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

from perseus.agent.probe.tested_versions import version_key
from tests.frameworks.trainers import Rank, TrainerTask, main

LENGTH = 32
VOCABULARY = 2048
NAME = "debugmodel_on_cpu"


def train(rank: Rank) -> None:
    """Train one rank, starting with torchtitan's command line."""
    task = rank.task
    from torchtitan import train as titan
    from torchtitan.components.metrics import MetricsProcessor

    from perseus.agent import torchtitan as hook

    iterations = rank.iterations(task.iteration_count)

    def log(_processor: Any, _step: int, loss: float, *_args: Any, **_kwargs: Any) -> None:
        if rank.number == task.rank_count - 1:
            rank.leave_losses(0, [loss])

    # The group is there: `trainers` makes it, for CPUs.
    distributed.init_process_group = lambda *_args, **_kwargs: None
    MetricsProcessor.log = log
    titan.Trainer.should_continue_training = lambda _trainer: next(iterations, None) is not None
    if task.is_attached:
        attached = rank.attach_arguments(0, rank.number)
        hook.main([f"--perseus.job-id={attached['job_id']}", *arguments(task)], attached["connect"])
    else:
        hook.run(titan)


def prepare(task: TrainerTask) -> None:
    """Import torchtitan, without CUDA.

    Register the model for its name on the command line, which torchtitan may read during its import.
    """
    do_without_cuda()
    sys.argv = ["train", *arguments(task)]
    if is_configured_in_python():
        _prepare_attention()
    else:
        _register_model()
    importlib.import_module("torchtitan.train")


def do_without_cuda() -> None:
    """Let torchtitan use the CPU as its device; call it before importing torchtitan."""
    import torch._utils as utils

    utils._get_available_device_type = lambda: "cpu"
    nothing: dict[str, Any] = {
        "device_count": lambda: 1,
        "empty_cache": lambda: None,
        "get_device_name": lambda *_: "CPU",
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=1, name="CPU"),
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": lambda *_: None,
    }
    for name, stand_in in nothing.items():
        setattr(torch.cpu, name, stand_in)
    barrier = torch.distributed.barrier
    torch.distributed.barrier = lambda *_args, **_kwargs: barrier()


class RandomTokens:
    """Batches of random tokens, the same for all stages of a replica."""

    def __init__(self, seed: int, batch_size: int, *, has_positions: bool) -> None:
        self._seed = seed
        self._size = (batch_size, LENGTH + 1)
        self._has_positions = has_positions

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        generator = torch.Generator().manual_seed(self._seed)
        while True:
            tokens = torch.randint(0, VOCABULARY, self._size, generator=generator)
            inputs = {"input": tokens[:, :-1].contiguous()}
            if self._has_positions:
                inputs["positions"] = torch.arange(LENGTH).expand(self._size[0], LENGTH)
            yield inputs, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state


def arguments(task: TrainerTask) -> list[str]:
    """Return the task as the command line of this version of torchtitan."""
    common = {
        "training.local_batch_size": task.microbatch_count,
        "training.seq_len": LENGTH,
        "training.steps": 100_000,  # the learning rate depends on it, and stays constant for a while
        "training.mixed_precision_param": "float32",
        "parallelism.pipeline_parallel_degree": task.stage_count,
        "parallelism.pipeline_parallel_schedule": task.schedule,
        "metrics.log_freq": 1,
        "debug.seed": 0,
    }
    if is_configured_in_python():
        own = {"module": "tests.frameworks.torchtitan_trainer", "config": NAME, "dump_folder": task.folder}
    else:
        own = {
            "model.name": NAME,
            "model.flavor": "debugmodel",
            "job.dump_folder": task.folder,
            "activation_checkpoint.mode": "none",
        }
    return [word for name, value in {**own, **common}.items() for word in (f"--{name}", str(value))]


def is_configured_in_python() -> bool:
    """Whether it is 0.3 or later; earlier versions only have command-line options."""
    return version_key(metadata.version("torchtitan")) >= (0, 3)


def debugmodel_on_cpu() -> Any:
    """Return a configuration for torchtitan 0.3."""
    from dataclasses import dataclass

    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    class Tokenizer(BaseTokenizer):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any, *, tokenizer_path: str) -> None:
            super().__init__()

        def encode(self, *_args: Any, **_kwargs: Any) -> list[int]:
            return []

        def decode(self, *_args: Any, **_kwargs: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return VOCABULARY

    class Loader(RandomTokens, BaseDataLoader):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any, *, dp_rank: int, local_batch_size: int, **_kwargs: Any) -> None:
            super().__init__(dp_rank, local_batch_size, has_positions=True)

    config = llama3_debugmodel()
    config.tokenizer = Tokenizer.Config()
    config.dataloader = Loader.Config()
    config.training.disable_cuda_graphs = True
    config.activation_checkpoint = None
    return config


def _prepare_attention() -> None:
    """Use causal attention: flexible attention has no backward on CPUs, and is the same for one document."""
    from torch.nn.attention import flex_attention
    from torch.nn.functional import scaled_dot_product_attention
    from torchtitan.models.common import attention

    def attend(q: Any, k: Any, v: Any, *, scale: Any, enable_gqa: bool, **_masked: Any) -> tuple[Any, None]:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa), None

    attention.FlexAttention._compiled_flex_attn = attend
    attention._compiled_create_block_mask = flex_attention.create_block_mask


def _register_model() -> None:
    """Register the debug model with our data for torchtitan 0.2."""
    from dataclasses import replace

    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.models.llama3 import get_train_spec
    from torchtitan.protocols.train_spec import register_train_spec

    class Loader(RandomTokens, BaseDataLoader):  # type: ignore[misc]
        pass

    def build(*, dp_rank: int, job_config: Any, **_kwargs: Any) -> Any:
        return Loader(dp_rank, job_config.training.local_batch_size, has_positions=False)

    spec = replace(get_train_spec(), build_dataloader_fn=build, build_tokenizer_fn=None)
    register_train_spec(NAME, spec)


if __name__ == "__main__":
    sys.exit(main(train, prepare))
