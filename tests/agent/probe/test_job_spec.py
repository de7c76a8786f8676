"""Job specifications, as in the contract."""

from typing import Any

import pytest
from google.protobuf import json_format

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.probe.job_spec import NamedSchedule, job_spec, spec_fingerprint
from perseus.schedule_name import ScheduleName
from perseus.v1 import computation_pb2, job_pb2


def spec(schedule: Any = None, **more: Any) -> dict[str, object]:
    counts = {"pipeline_count": 1, "stage_count": 2, "tensor_count": 1, "max_slowdown_percent": 0}
    return job_spec("job", schedule=schedule or NamedSchedule("1f1b", 4), **{**counts, **more})


def test_other_work_has_another_fingerprint() -> None:
    specs = [
        spec(),
        spec(NamedSchedule("1f1b", 6)),
        spec(stage_work=["12 layers", "10 layers"]),
        spec(stage_work=["11 layers", "11 layers"]),
    ]
    assert len({spec_fingerprint(some) for some in specs}) == 4
    assert spec_fingerprint(spec()) == spec_fingerprint(specs[0])
    message = json_format.ParseDict(specs[2], job_pb2.JobSpec())
    assert [work.fingerprint for work in message.stage_work] == ["12 layers", "10 layers"]


@pytest.mark.parametrize("works", [(), ("one", "another")])
def test_layers_stand_beside_the_work(works: tuple[str, ...]) -> None:
    declared = spec(stage_work=works, stage_layers=[(12,), [11]])
    message = json_format.ParseDict(declared, job_pb2.JobSpec())
    assert [work.fingerprint for work in message.stage_work] == [*(works or ("", ""))]
    assert [[*work.layer_counts] for work in message.stage_work] == [[12], [11]]


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"stage_layers": [(12,)]}, "stage_layers: expected"),
        ({"stage_layers": [(12,), (0,)]}, "stage_layers: expected"),
        ({"schedule": [[Computation(Kind.FORWARD, 0)]]}, "expected the orders of 2 stages, found 1"),
        ({"paths": [[(0, 0), (1, 0)]]}, "paths: expected none for schedule '1f1b', found 1"),
        ({"max_slowdown_percent": 200}, "max_slowdown_percent: expected 0 to 100, found 200"),
    ],
)
def test_mistakes_are_refused(mistake: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec(**mistake)
    with pytest.raises(ValueError, match=r"expected one of gpipe, 1f1b, .*found 'zb'"):
        NamedSchedule("zb", 8)


@pytest.mark.parametrize("name", ScheduleName)
def test_a_named_schedule_is_one_of_the_contract(name: ScheduleName) -> None:
    declared = spec(NamedSchedule(str(name), 8, chunk_count=2))
    message = json_format.ParseDict(declared, job_pb2.JobSpec())
    named = message.schedule.named
    assert computation_pb2.ScheduleName.Name(named.name) == f"SCHEDULE_NAME_{name.name}"
    assert (named.microbatch_count, named.chunk_count) == (8, 2)
    assert message.policy.WhichOneof("rule") == "no_slowdown"
