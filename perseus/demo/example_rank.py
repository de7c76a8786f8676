"""One rank of a training script on an emulated GPU: `-m perseus.demo.example_rank TASK`, under torchrun.

The script runs as if started by torchrun itself. Unseen by it, the hook that it imports connects to its
rank's emulated GPU, and its framework trains on the CPU, whatever this machine has.
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

from perseus.agent.link.computation import Kind
from perseus.agent.probe.marks import Marks
from perseus.demo.emulated_probe import Works, emulated_connect
from perseus.emulation.physics import Work

HOOKS_OF_PIPELINES = (
    "perseus.agent.torch.attach",
    "perseus.agent.megatron.attach",
    "perseus.agent.deepspeed.attach",
)
HOOKS_OF_REPLICAS = (
    "perseus.agent.torch.attach_model",
    "perseus.agent.transformers.PerseusCallback",
    "perseus.agent.lightning.PerseusCallback",
)
"""What a script may import: hooks into the schedule of a pipeline, and into the training of a whole model."""

WorkFigures = tuple[float, float, float]
"""Compute-bound seconds, memory-bound seconds, activity."""


@dataclass(frozen=True, slots=True)
class RankOfScript:
    """The task given to every rank; its place is known when it attaches."""

    script: str
    hook: str
    agent_sockets: Sequence[str]
    """Of every pipeline."""
    gpu_files: Sequence[Sequence[str]]
    """The emulated GPU of every pipeline's stages."""
    works: Sequence[Sequence[WorkFigures]]
    """Work of the forward and the backward of each stage."""

    def to_json(self) -> str:
        """Return the task as text for the command line."""
        return json.dumps(asdict(self))

    def connect(self, *, pipeline: int, stage: int, **arguments: object) -> Marks:
        """Replace `Probe.connect`. ValueError for a place without an emulated GPU."""
        if pipeline >= len(self.gpu_files) or stage >= len(self.gpu_files[pipeline]):
            raise ValueError(
                f"emulated GPUs: expected up to {len(self.gpu_files)} pipelines of up to "
                f"{len(self.gpu_files[0])} stages, found pipeline {pipeline}, stage {stage}"
            )
        forward, backward = (Work(*figures) for figures in self.works[stage])
        works: Works = {(Kind.FORWARD, 0): forward, (Kind.BACKWARD, 0): backward}
        connect = emulated_connect(Path(self.gpu_files[pipeline][stage]), works)
        return connect(socket_path=self.agent_sockets[pipeline], pipeline=pipeline, stage=stage, **arguments)


def run(task: RankOfScript) -> None:
    """Run the script."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    module_name, _, name = task.hook.rpartition(".")
    if module_name == "perseus.agent.megatron":
        from perseus.demo import megatron_on_cpu

        megatron_on_cpu.do_without_cuda()
    elif module_name == "perseus.agent.deepspeed":
        from perseus.demo import deepspeed_on_cpu

        deepspeed_on_cpu.do_without_cuda()
    module = importlib.import_module(module_name)
    setattr(module, name, partial(getattr(module, name), connect=task.connect))
    sys.argv = [task.script]
    runpy.run_path(task.script, run_name="__main__")


if __name__ == "__main__":
    run(RankOfScript(**json.loads(sys.argv[1])))
