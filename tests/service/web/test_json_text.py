"""Messages as JSON and back: protobuf's mapping, in pieces or at once, and other texts are refused."""

import json
from contextlib import suppress

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.errors import MalformedMessageError
from perseus.service.web import json_text
from perseus.service.web.json_text import from_json, large_to_json, to_json
from perseus.v1 import frontier_service_pb2, job_service_pb2

Plan = frontier_service_pb2.GetPlanResponse
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)


async def test_a_large_message_is_written_like_a_small_one() -> None:
    plan = Plan()
    for stage in range(8):
        computations = plan.plan.stages.add().computations
        for number in range(200):
            computations.add(microbatch=number, clock_mhz=1000 + stage, start_s=0.1 * number)
    assert plan.ByteSize() > json_text._LARGE_BYTES
    text = await large_to_json(plan)
    assert text == to_json(plan)
    assert "\n" not in text
    assert json_format.Parse(text, Plan()) == plan
    assert json.loads(text)["plan"]["stages"][0]["computations"][0] == {
        "kind": "COMPUTATION_KIND_UNSPECIFIED",
        "microbatch": 0,
        "chunk": 0,
        "clock_mhz": 1000,
        "start_s": 0.0,
        "duration_s": 0.0,
    }


# Names from the contract reach deeper into a message than others; half a surrogate pair is not a text.
texts = st.text(max_size=3) | st.sampled_from(["\ud800", "\udfff", "1", "1.5", "SCHEDULE_NAME_1F1B"])
near = st.dictionaries(
    st.sampled_from(["spec", "job_id", "request_id", "page_size"]) | texts,
    st.recursive(
        plain | texts,
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(
                st.sampled_from(["job_id", "parallelism", "pipeline_count", "schedule", "named", "name"])
                | texts,
                inner,
                max_size=3,
            )
        ),
        max_leaves=6,
    ),
    max_size=2,
)


@given(
    st.binary(max_size=200)
    | st.text(max_size=50).map(str.encode)
    | (plain | near).map(lambda value: json.dumps(value).encode())
)
def test_any_body_is_a_message_or_refused(body: bytes) -> None:
    for kind in (job_service_pb2.RegisterJobRequest, job_service_pb2.ListJobEventsRequest):
        with suppress(MalformedMessageError):
            message = from_json(body, kind)
            assert from_json(to_json(message).encode(), kind) == message


@pytest.mark.parametrize(
    "body", [rb'{"\ud800": 1}', rb'{"spec": "\ud800"}', rb'{"spec": {"\udfff": 1}}', b'{"\xed\xa0\x80": 1}']
)
def test_half_a_surrogate_pair_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedMessageError, match="surrogates not allowed"):
        from_json(body, job_service_pb2.RegisterJobRequest)


@pytest.mark.parametrize("depth", [1_000, 100_000])
def test_depth_is_limited(depth: int) -> None:
    for opening in (b"[", b'{"spec":', b'{"spec":{"schedule":[', b'{"x":'):
        with pytest.raises(MalformedMessageError):
            from_json(opening * depth, job_service_pb2.RegisterJobRequest)
        with pytest.raises(MalformedMessageError):
            from_json(b'{"a":' * depth + b"1" + b"}" * depth, job_service_pb2.RegisterJobRequest)
