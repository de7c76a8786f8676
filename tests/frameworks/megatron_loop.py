"""Wrap Megatron-LM's own loop, of a release that has it, without training: `-m …megatron_loop`."""

import io
import logging
import typing
from contextlib import suppress
from types import SimpleNamespace

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
    log = io.StringIO()
    logging.getLogger("perseus.attachment").addHandler(logging.StreamHandler(log))
    with suppress(Exception):  # Megatron-LM's: it goes on to train, which it can't without a GPU
        training.train(None, [], None, None, None, None, None, SimpleNamespace(), {}, None)
    assert "at stock clocks: Megatron-Core: expected its parallel state to be initialised" in log.getvalue()
    print("wrapped")


if __name__ == "__main__":
    check()
