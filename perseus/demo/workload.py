"""The training job of the demo: its layout, its stages' work and the GPUs that it runs on."""

from collections.abc import Sequence
from dataclasses import dataclass

from perseus.emulation.physics import A100_SXM, GpuModel, Work


@dataclass(frozen=True, slots=True)
class Workload:
    """A pipeline-parallel training job on emulated GPUs, one GPU a stage.

    `stage_weights`: weight of each stage relative to the heaviest; one for each stage.
    `forward` and `backward`: the heaviest stage's work on one microbatch.
    `optimizer_s`: optimizer step and the rest of an iteration outside of the pipeline. Every
    `evaluation_interval` iterations each rank evaluates for `evaluation_s`, at the highest clock.
    """

    job_id: str
    pipeline_count: int
    stage_weights: Sequence[float]
    microbatch_count: int
    forward: Work
    backward: Work
    optimizer_s: float
    gpu: GpuModel
    evaluation_s: float = 0.0
    evaluation_interval: int = 0

    @property
    def stage_count(self) -> int:
        """Number of stages in each pipeline."""
        return len(self.stage_weights)

    @property
    def ranks(self) -> list[tuple[int, int]]:
        """(pipeline, stage) of every rank."""
        return [
            (pipeline, stage) for pipeline in range(self.pipeline_count) for stage in range(self.stage_count)
        ]

    def stage_work(self, stage: int) -> tuple[Work, Work]:
        """A stage's forward and backward work on one microbatch."""
        weight = self.stage_weights[stage]
        forward, backward = (
            Work(work.compute_s * weight, work.memory_s * weight, work.activity)
            for work in (self.forward, self.backward)
        )
        return forward, backward


# The last stage holds the language-model head and is the heaviest, the first holds the embedding; the others
# can't be split evenly either. An iteration takes about 0.8 s at the highest clock.
DEMO = Workload(
    job_id="demo",
    pipeline_count=2,
    stage_weights=(0.84, 0.90, 0.87, 1.0),
    microbatch_count=8,
    forward=Work(compute_s=0.018, memory_s=0.004, activity=0.85),
    backward=Work(compute_s=0.038, memory_s=0.008, activity=0.95),
    optimizer_s=0.015,
    gpu=A100_SXM.with_clocks(12),
    evaluation_s=5.0,
    evaluation_interval=8,
)
