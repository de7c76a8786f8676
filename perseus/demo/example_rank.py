"""One rank of a training script on an emulated GPU: `-m perseus.demo.example_rank TASK`, under torchrun.

The script runs as if started by torchrun itself. Unseen by it, the `attach` that it imports connects to its
stage's emulated GPU, and its framework trains on the CPU, whatever this machine has.
"""

import importlib
import json
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from perseus.agent.link.computation import Kind
from perseus.agent.probe.marks import Marks
from perseus.demo.emulated_probe import Works, emulated_connect
from perseus.emulation.physics import Work

HOOKS = ("perseus.agent.torch", "perseus.agent.megatron", "perseus.agent.deepspeed")
"""The modules whose `attach` a script may import."""

WorkFigures = tuple[float, float, float]
"""Compute-bound seconds, memory-bound seconds, activity."""


@dataclass(frozen=True, slots=True)
class RankOfScript:
    """The task given to every rank; its stage is known when it attaches."""

    script: str
    hook: str
    agent_socket: str
    gpu_files: Sequence[str]
    """The emulated GPU of every stage."""
    works: Sequence[Sequence[WorkFigures]]
    """Work of the forward and the backward of each stage."""

    def to_json(self) -> str:
        """Return the task as text for the command line."""
        return json.dumps(asdict(self))

    def connect(self, *, pipeline: int, stage: int, **arguments: object) -> Marks:
        """Replace `Probe.connect`. ValueError for a place without an emulated GPU."""
        if pipeline > 0 or stage >= len(self.gpu_files):
            raise ValueError(
                f"emulated GPUs: expected one pipeline of up to {len(self.gpu_files)} stages, "
                f"found pipeline {pipeline}, stage {stage}"
            )
        forward, backward = (Work(*figures) for figures in self.works[stage])
        works: Works = {(Kind.FORWARD, 0): forward, (Kind.BACKWARD, 0): backward}
        connect = emulated_connect(Path(self.gpu_files[stage]), works)
        return connect(socket_path=self.agent_socket, pipeline=pipeline, stage=stage, **arguments)


def run(task: RankOfScript) -> None:
    """Run the script."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if task.hook == "perseus.agent.megatron":
        from perseus.demo import megatron_on_cpu

        megatron_on_cpu.do_without_cuda()
    elif task.hook == "perseus.agent.deepspeed":
        from perseus.demo import deepspeed_on_cpu

        deepspeed_on_cpu.do_without_cuda()
    hook: Any = importlib.import_module(task.hook)
    hook.attach = partial(hook.attach, connect=task.connect)
    sys.argv = [task.script]
    runpy.run_path(task.script, run_name="__main__")


if __name__ == "__main__":
    run(RankOfScript(**json.loads(sys.argv[1])))
