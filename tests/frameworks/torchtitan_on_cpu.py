"""torchtitan's debug model on CPUs with random tokens, for both of torchtitan's ways of configuration.

Its releases have neither tokenizer nor data set, which are only in its repository.
"""

from collections.abc import Iterator
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch

from perseus.agent.probe.tested_versions import version_key

LENGTH = 32
VOCABULARY = 2048
NAME = "debugmodel_on_cpu"


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


def arguments(schedule: str, stage_count: int, microbatch_count: int, dump_folder: str) -> list[str]:
    """Return the command line for this version of torchtitan."""
    common = {
        "training.local_batch_size": microbatch_count,
        "training.seq_len": LENGTH,
        "training.steps": 100_000,  # the learning rate depends on it, and stays constant for a while
        "training.mixed_precision_param": "float32",
        "parallelism.pipeline_parallel_degree": stage_count,
        "parallelism.pipeline_parallel_schedule": schedule,
        "metrics.log_freq": 1,
        "debug.seed": 0,
    }
    if is_configured_in_python():
        own = {"module": "tests.frameworks.torchtitan_on_cpu", "config": NAME, "dump_folder": dump_folder}
    else:
        own = {
            "model.name": NAME,
            "model.flavor": "debugmodel",
            "job.dump_folder": dump_folder,
            "activation_checkpoint.mode": "none",
        }
    return [word for name, value in {**own, **common}.items() for word in (f"--{name}", str(value))]


def is_configured_in_python() -> bool:
    """Whether it is 0.3 or later; earlier versions only have command-line options."""
    return version_key(metadata.version("torchtitan")) >= (0, 3)


def prepare() -> None:
    """Register the model for its name on the command line, which torchtitan may read during its import."""
    if is_configured_in_python():
        _prepare_attention()
    else:
        _register_model()


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
