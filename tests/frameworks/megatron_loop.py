"""Wrap Megatron-LM's own loop, of a release that has it, without training: `-m …megatron_loop`."""

import typing
from types import SimpleNamespace

import pytest
import typing_extensions

from perseus.agent.megatron import wrap_training


def check() -> None:
    """Wrap it: a call of `pretrain` first reaches `attach`, with its configuration."""
    # The release is for Python 3.12.
    typing.override = typing_extensions.override  # type: ignore[attr-defined,unused-ignore]
    from megatron.training import training

    original = training.train
    wrap_training(job_id="x")
    assert training.pretrain.__globals__["train"] is training.train is not original
    with pytest.raises(ValueError, match="expected its parallel state to be initialised"):
        training.train(None, [], None, None, None, None, None, SimpleNamespace(), {}, None)
    print("wrapped")


if __name__ == "__main__":
    check()
