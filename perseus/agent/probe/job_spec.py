"""A job's specification, as ranks register it, and its fingerprint.

Standard library only.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perseus.agent.link.computation import Computation
from perseus.job_id import JOB_ID_RULE, is_job_id
from perseus.schedule_name import ScheduleName


@dataclass(frozen=True, slots=True)
class NamedSchedule:
    """A schedule given by its name, such as "1f1b" (`perseus.schedule_name`), and its counts.

    `microbatch_count`: per iteration. `chunk_count`: model chunks on each stage, for "interleaved-1f1b".
    """

    name: str
    microbatch_count: int
    chunk_count: int = 0

    def __post_init__(self) -> None:
        if self.name not in list(ScheduleName):
            raise ValueError(f"schedule name: expected one of {', '.join(ScheduleName)}, found {self.name!r}")
        check_count("microbatch_count", self.microbatch_count, at_least=1)
        check_count("chunk_count", self.chunk_count, at_least=0)


# Each stage's computations in order, stage 0 first.
StageOrders = Sequence[Sequence[Computation]]
# The route of activations: (stage, chunk) after (stage, chunk).
Path = Sequence[tuple[int, int]]


def job_spec(
    job_id: str,
    *,
    pipeline_count: int,
    stage_count: int,
    tensor_count: int,
    schedule: NamedSchedule | StageOrders,
    paths: Sequence[Path] = (),
    max_slowdown_percent: float,
    stage_work: Sequence[str] = (),
    stage_layers: Sequence[Sequence[int]] = (),
) -> dict[str, Any]:
    """Return the job as proto3 JSON of `perseus.v1.JobSpec`; ValueError for invalid arguments."""
    check_count("pipeline_count", pipeline_count, at_least=1)
    check_count("stage_count", stage_count, at_least=1)
    check_count("tensor_count", tensor_count, at_least=1)
    check_job(job_id, max_slowdown_percent)
    if stage_work and len(stage_work) != stage_count:
        raise ValueError(f"stage_work: expected none or {stage_count} texts, found {len(stage_work)}")
    if stage_layers and len(stage_layers) != stage_count:
        raise ValueError(f"stage_layers: expected none or {stage_count}, found {len(stage_layers)}")
    for counts in stage_layers:
        for count in counts:
            check_count("stage_layers", count, at_least=1)
    works: list[dict[str, Any]] = [{"fingerprint": text} for text in stage_work or [""] * len(stage_layers)]
    for work, counts in zip(works, stage_layers, strict=False):
        work["layerCounts"] = [*counts]
    order: dict[str, Any]
    if isinstance(schedule, NamedSchedule):
        if paths:
            raise ValueError(f"paths: expected none for schedule {schedule.name!r}, found {len(paths)}")
        order = {
            "named": {
                "name": f"SCHEDULE_NAME_{ScheduleName(schedule.name).name}",
                "microbatchCount": schedule.microbatch_count,
                "chunkCount": schedule.chunk_count,
            }
        }
    else:
        if len(schedule) != stage_count:
            raise ValueError(f"schedule: expected the orders of {stage_count} stages, found {len(schedule)}")
        order = {
            "explicit": {
                "stages": [{"computations": [*map(_computation_json, stage)]} for stage in schedule],
                "paths": [
                    {"steps": [{"stage": stage, "chunk": chunk} for stage, chunk in path]} for path in paths
                ],
            }
        }
    policy: dict[str, Any] = (
        {"maxSlowdownPercent": max_slowdown_percent} if max_slowdown_percent else {"noSlowdown": {}}
    )
    return {
        "jobId": job_id,
        "parallelism": {
            "pipelineCount": pipeline_count,
            "stageCount": stage_count,
            "tensorCount": tensor_count,
        },
        "schedule": order,
        "policy": policy,
        "stageWork": works,
    }


def spec_fingerprint(spec: dict[str, Any]) -> str:
    """Return a specification's short fingerprint, which all ranks of a job declare."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:32]


def _computation_json(computation: Computation) -> dict[str, int]:
    return {
        "kind": int(computation.kind),
        "microbatch": computation.microbatch,
        "chunk": computation.chunk,
    }


def check_job(job_id: Any, max_slowdown_percent: Any = 0.0) -> None:
    """Raise ValueError for a job identifier or a slowdown that the coordinator would refuse."""
    if not isinstance(job_id, str) or not is_job_id(job_id):
        raise ValueError(f"job_id: expected {JOB_ID_RULE}, found {job_id!r}")
    is_number = isinstance(max_slowdown_percent, int | float) and not isinstance(max_slowdown_percent, bool)
    if not is_number or not 0 <= max_slowdown_percent <= 100:
        raise ValueError(f"max_slowdown_percent: expected 0 to 100, found {max_slowdown_percent!r}")


def check_count(name: str, value: int, *, at_least: int) -> None:
    """Raise ValueError for a non-integer, or one that is too small or too large for the wire."""
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value < 2**31:
        raise ValueError(f"{name}: expected an integer of at least {at_least}, found {value!r}")
