"""Invalid specifications and labels: each is refused with a stable reason and the values."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from perseus.service.api.statuses import error_info
from perseus.service.api.translate_jobs import labels_from_proto, spec_from_proto
from perseus.service.domain.errors import CoordinatorError, InvalidFieldError
from perseus.service.domain.specification import Registration
from perseus.solver import SolverError
from perseus.v1 import computation_pb2, job_pb2
from perseus.v1.job_pb2 import Label
from tests.service.grpc_fakes import connected, make_settings, refusal, spec_message

FORWARD, BACKWARD = computation_pb2.COMPUTATION_KIND_FORWARD, computation_pb2.COMPUTATION_KIND_BACKWARD
FIXED, NO_KIND = computation_pb2.COMPUTATION_KIND_FIXED, computation_pb2.COMPUTATION_KIND_UNSPECIFIED
INTERLEAVED = computation_pb2.SCHEDULE_NAME_INTERLEAVED_ONE_FORWARD_ONE_BACKWARD
FINE = [(FORWARD, 0), (BACKWARD, 0)]
Counts = Sequence[Sequence[int]]


def with_rule(**rule: Any) -> job_pb2.JobSpec:
    spec = spec_message()
    spec.policy.CopyFrom(job_pb2.OperatingPolicy(**rule))
    return spec


def scheduled(**schedule: Any) -> job_pb2.JobSpec:
    spec = spec_message()
    spec.schedule.CopyFrom(computation_pb2.Schedule(**schedule))
    return spec


def explicit(*stages: Counts, paths: Sequence[Counts] = ()) -> job_pb2.JobSpec:
    """Return a specification with these kinds and microbatches, and stages and chunks."""
    orders = [{"computations": [{"kind": kind, "microbatch": n} for kind, n in stage]} for stage in stages]
    flows = [{"steps": [{"stage": stage, "chunk": chunk} for stage, chunk in path]} for path in paths]
    return scheduled(explicit={"stages": orders, "paths": flows})


def check(spec: job_pb2.JobSpec, reason: str, metadata: dict[str, str]) -> None:
    with pytest.raises((CoordinatorError, SolverError)) as refused:
        spec_from_proto(spec).check()
    assert isinstance(refused.value, CoordinatorError | SolverError)
    info = error_info(refused.value)
    assert info.reason == reason
    assert metadata.items() <= dict(info.metadata).items()


@pytest.mark.parametrize("job_id", ["GPT 3", ".GPT3", "", "x" * 64])
def test_invalid_names_of_jobs_are_refused(job_id: str) -> None:
    check(spec_message(job_id), "INVALID_JOB_ID", {"job_id": job_id})


@pytest.mark.parametrize(
    ("spec", "field", "found"),
    [
        (spec_message(pipelines=0), "parallelism.pipeline_count", "0"),
        (spec_message(stages=-2), "parallelism.stage_count", "-2"),
        (spec_message(pipelines=10**6), "parallelism.pipeline_count", None),
        (spec_message(pipelines=4096, stages=256), "parallelism", None),
        (spec_message(microbatches=0), "schedule.named.microbatch_count", None),
        (job_pb2.JobSpec(job_id="job"), "parallelism", None),
        (job_pb2.JobSpec(job_id="job", parallelism=spec_message().parallelism), "schedule", None),
        (scheduled(named={"microbatch_count": 4}), "schedule.named.name", "0"),
        (
            scheduled(named={"name": INTERLEAVED, "microbatch_count": 4, "chunk_count": 257}),
            "schedule.named.chunk_count",
            "257",
        ),
        (with_rule(max_slowdown_percent=math.nan), "policy.max_slowdown_percent", "nan"),
        (with_rule(max_slowdown_percent=101), "policy.max_slowdown_percent", "101.0"),
        (with_rule(max_average_power_w=1e308), "policy.max_average_power_w", None),
        (with_rule(max_average_power_w=5e-324), "policy.max_average_power_w", None),
        (
            with_rule(deadline={"iteration_count": 2**63 - 1, "time_s": 1}),
            "policy.deadline.iteration_count",
            None,
        ),
        (with_rule(deadline={"iteration_count": 1, "time_s": 1e308}), "policy.deadline.time_s", None),
        (spec_message(stage_work=["12 layers"]), "stage_work", "1"),
        (spec_message(stage_work=["12 layers", "x" * 129]), "stage_work[1].fingerprint", None),
        (spec_message(layers=[[4], [6], [1]]), "stage_work", "3"),
        (spec_message(layers=[[4], [3, 3]]), "stage_work[1].layer_counts", "2"),
        (spec_message(layers=[[4], [0]]), "stage_work[1].layer_counts", "0"),
        (spec_message(layers=[[4], [10_001]]), "stage_work[1].layer_counts", "10001"),
        (explicit(FINE), "schedule.explicit.stages", "1"),
        (explicit(FINE, [(FORWARD, 0), (NO_KIND, 0)]), None, "0"),
    ],
)
def test_errors_name_the_invalid_field_of_a_specification(
    spec: job_pb2.JobSpec, field: str | None, found: str | None
) -> None:
    expected = {"field": field, "found": found}
    check(spec, "INVALID_FIELD", {name: value for name, value in expected.items() if value is not None})


def test_inconsistent_orders_are_refused() -> None:
    check(explicit(FINE, [(FORWARD, 0)]), "INVALID_SCHEDULE", {"stage": "1"})
    check(explicit(FINE, [(BACKWARD, 0), (FORWARD, 0)]), "INVALID_SCHEDULE", {})
    check(explicit(FINE, FINE, paths=[[(0, 0), (2, 0)]]), "INVALID_SCHEDULE", {"stage": "2", "chunk": "0"})
    check(explicit(FINE, FINE, paths=[[(0, 0)]]), "INVALID_SCHEDULE", {"stage": "1"})
    check(explicit(FINE, [*FINE, (FIXED, 2**31 - 1)]), "INVALID_FIELD", {"found": str(2**31 - 1)})


@pytest.mark.slow("a path of hundreds of thousands of steps")
def test_a_path_of_too_many_steps_is_refused() -> None:
    spec = explicit(FINE, FINE, paths=[[(0, 0), (1, 0)] * 300_000])
    check(spec, "INVALID_FIELD", {"field": "schedule.explicit.paths", "found": "600000"})


async def test_another_label_begins_no_new_run_and_survives_a_restart(tmp_path: Path) -> None:
    settings, spec = make_settings(tmp_path), spec_message()
    for number in ("17", "18"):  # for example, requeued under another number
        async with connected(settings) as client:
            labels = [Label(key="slurm-account", value="physics"), Label(key="slurm-job", value=number)]
            job = (await client.ask("RegisterJob", spec=spec, request_id=number, labels=labels)).job
            assert (job.run_number, list(job.labels)) == (1, labels)
    async with connected(settings) as client:
        assert list((await client.job()).labels) == labels
        twice = client.ask("RegisterJob", spec=spec, request_id="19", labels=labels[:1] * 2)
        assert (await refusal(twice))[1] == "INVALID_FIELD"


@pytest.mark.parametrize(
    ("labels", "expected", "found"),
    [
        ([("Account", "x")], "keys of 1 to 63", "'Account'"),
        ([("", "x")], "keys of 1 to 63", "''"),
        ([("a", "x\x1b[31m")], "printable characters", r"'x\x1b[31m'"),
        ([("a", "x" * 257)], "0 to 256 characters", "257"),
        ([("a", "x"), ("a", "y")], "each key once", "['a', 'a']"),
        ([(f"key-{number}", "") for number in range(17)], "at most 16", "17"),
    ],
)
def test_errors_name_invalid_labels(labels: list[tuple[str, str]], expected: str, found: str) -> None:
    messages = [Label(key=key, value=value) for key, value in labels]
    with pytest.raises(InvalidFieldError) as refused:
        Registration("r", labels=labels_from_proto(messages)).check()
    values = refused.value.metadata
    assert values["field"].startswith("labels")
    assert expected in values["expected"]
    assert values["found"] == found
