"""Megatron-Core without a GPU, for tests and examples: it gets the CPU wherever it asks for CUDA."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any


def do_without_cuda() -> None:
    """Patch this process's torch and Megatron-Core; call it before building a model."""
    import torch

    cpu = torch.device("cpu")

    def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def made_on_cpu(*args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs:
                kwargs["device"] = cpu
            return make(*args, **kwargs)

        return made_on_cpu

    for name in ("arange", "empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.cuda.current_device = lambda: cpu
    torch.cuda.set_device = lambda _: None
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    CudaRNGStatesTracker.add = lambda *_: None
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    TransformerConfig.__init__ = functools.partialmethod(TransformerConfig.__init__, **_CPU_OPTIONS)


_CPU_OPTIONS = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}
"""Defaults that a `TransformerConfig` needs on a CPU."""
