"""Keys of stage profiles: two stages with the same key take the same time and energy. Pure.

A fingerprint identifies the work, wherever it runs in whatever schedule. Without one, the same order of
computations at the same position among as many stages counts as the same work; an adopted profile is compared
with the first measurements anyway. The key also contains the GPUs' models, power limits and workload power
profiles, and how many of them share the stage.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence

from perseus.service.domain.model import Gpu
from perseus.service.domain.specification import JobSpec
from perseus.solver import Schedule


def work_keys(spec: JobSpec, schedule: Schedule, gpus: Sequence[Iterable[Gpu]]) -> tuple[str, ...]:
    """Return each stage's key; `gpus[s]` has the GPUs of stage `s` in all pipelines."""
    return tuple(_work_key(spec, schedule, stage, own) for stage, own in enumerate(gpus))


def _work_key(spec: JobSpec, schedule: Schedule, stage: int, gpus: Iterable[Gpu]) -> str:
    work: object = spec.stage_work[stage] if spec.stage_work else ""
    if not work:
        order = [(c.kind.name, c.microbatch, c.chunk) for c in schedule.orders[stage]]
        work = [spec.parallelism.stage_count, stage, order]
    kinds = sorted({(gpu.model, gpu.power_limit_w, *gpu.power_profiles) for gpu in gpus})
    text = json.dumps([work, spec.parallelism.tensor_count, kinds])
    return hashlib.sha256(text.encode()).hexdigest()
