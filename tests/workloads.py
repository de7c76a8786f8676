"""Jobs that several tests run in real processes, like the demo."""

from dataclasses import replace

from perseus.demo.workload import Workload
from perseus.emulation.physics import A100_SXM, Work

QUICK_GPU = replace(A100_SXM.with_clocks(4), counter_period_s=0.02)
"""Few clocks and a fast counter: times and energies at a clock are known after a few iterations."""

SMALL = Workload(
    job_id="small",
    pipeline_count=2,
    stage_weights=(0.7, 1.0),
    microbatch_count=4,
    forward=Work(compute_s=0.018, memory_s=0.004, activity=0.85),
    backward=Work(compute_s=0.038, memory_s=0.008, activity=0.95),
    optimizer_s=0.01,
    gpu=QUICK_GPU,
)
"""Two pipelines of two stages: planned within some ten seconds."""
