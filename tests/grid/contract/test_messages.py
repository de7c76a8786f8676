"""Exactly the messages of the contract are accepted, judged by its own schemas."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.grid.contract.messages import (
    LOAD_TARGET_SET,
    MAX_MESSAGE_BYTES,
    MalformedError,
    moment,
    read_enforcement,
    read_envelope,
    read_load_targets,
)
from perseus.grid.dsx_flex.values import Constraint, Target, TargetSet
from tests.grid.contract.contract_schemas import needs_contract, problems
from tests.grid.isv import Sender, target_of

SENT_S = 1_800_000_000.25


@pytest.fixture(scope="module")
def sender(tmp_path_factory: pytest.TempPathFactory) -> Sender:
    return Sender(tmp_path_factory.mktemp("keys"))


def read(sender: Sender, data: object, /, **changed: Any) -> TargetSet:
    payload = json.dumps(sender.envelope(SENT_S, data, **changed)).encode()
    return read_load_targets(read_envelope(payload, LOAD_TARGET_SET), json.dumps(data).encode())


def test_a_message_is_read_with_defaults_for_omitted_fields(sender: Sender) -> None:
    interval = {"start_time": "2027-01-15T18:00:00+01:00", "end_time": "2027-01-15T18:00:00.5Z"}
    reported = read(
        sender,
        {
            "targets": [
                target_of(None),
                target_of(640, interval=interval, feed_tags=["hall-a"], strategy={"best_effort": True}),
            ]
        },
        correlationid=None,
        id="0A0A0A0A-0b0b-4c0c-8d0d-0e0e0e0e0e0e",
        newer="extensions are let through",
    )
    assert reported.correlation_id == reported.event_id == "0a0a0a0a-0b0b-4c0c-8d0d-0e0e0e0e0e0e"
    assert (reported.sender, reported.time_s) == ("acme-energy", SENT_S)
    assert reported.targets == (
        Target((), SENT_S, math.inf, None, best_effort=False),
        Target(("hall-a",), 1_800_032_400.0, 1_800_036_000.5, Constraint(640, "watt"), best_effort=True),
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"specversion": "1.0"}, "specversion: Input should be '1.0.2', found '1.0'"),
        ({"id": "1"}, "id: String should match pattern"),
        ({"id": "00000000-0000-1000-8000-000000000000"}, "id: String should match pattern"),
        ({"source": "//grid/v1/utility/acme"}, "source: String should match pattern"),
        ({"type": "grid.powerstate.status.v1"}, "type: expected grid.loadtarget.set.v1, found"),
        ({"time": 1_800_000_000}, "time: expected a time as in RFC 3339"),
        ({"time": "2027-02-30T00:00:00Z"}, "time: expected a time as in RFC 3339"),
        ({"time": "2027-02-03T00:00:00"}, "time: expected a time as in RFC 3339"),
        ({"datacontenttype": "text/plain"}, "datacontenttype: Input should be 'application/json'"),
        ({"subject": None}, "subject: Field required"),
        ({"traceparent": None}, "traceparent: Field required"),
        ({"traceparent": "00-0-0-0"}, "traceparent: String should match pattern"),
        ({"data": {"targets": []}}, "data: Input should be a valid string"),
        ({"data": "a.b"}, "data: String should match pattern"),
        ({"correlationid": "evt-7"}, "correlationid: String should match pattern"),
    ],
)
def test_the_error_for_an_invalid_envelope_names_the_field(
    sender: Sender, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(MalformedError) as caught:
        read(sender, {"targets": [target_of(1)]}, **changed)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "message: Input should be a valid dictionary"),
        ({"targets": []}, "targets: List should have at least 1 item"),
        ({"targets": [target_of(1)] * 65}, "targets: List should have at most 64 items"),
        ({"targets": [{"interval": {}}]}, "targets.0.load_constraint: Field required"),
        ({"targets": [{"load_constraint": None}]}, "targets.0.interval: Field required"),
        ({"targets": [target_of(-1)]}, "targets.0.load_constraint.value: Input should be greater than or"),
        (
            {"targets": [target_of(1, load_constraint={"value": 1, "unit": "horsepower"})]},
            "targets.0.load_constraint.unit: Input should be 'watt', 'kilowatt' or 'megawatt'",
        ),
        (
            {"targets": [target_of(1, load_constraint={"value": 1e9, "unit": "megawatt"})]},
            "targets.0.load_constraint: expected 1e+12 W at most",
        ),
        ({"targets": [target_of(1, feed_tags=[1])]}, "targets.0.feed_tags.0: Input should be a valid string"),
        (
            {"targets": [target_of(1, interval={"end_time": "2020-01-01T00:00:00Z"})]},
            "targets.0.interval.end_time: expected a time after 2027-01-15T08:00:00.250000Z",
        ),
        *(
            (
                {"targets": [target_of(1, interval={edge: None})]},
                f"targets.0.interval.{edge}: expected a time as in RFC 3339",
            )
            for edge in ("start_time", "end_time")
        ),
        (
            {"targets": [target_of(1, strategy={"best_effort": 1})]},
            "targets.0.strategy.best_effort: Input should be a valid boolean",
        ),
    ],
)
def test_the_error_for_invalid_load_targets_names_the_field(
    sender: Sender, data: object, message: str
) -> None:
    with pytest.raises(MalformedError) as caught:
        read(sender, data)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "expected JSON"),
        (b"\xff", "expected JSON"),
        (b"[" * 100_000, "expected JSON"),
        (b'{"time": NaN}', "expected JSON"),
        (b" " * (MAX_MESSAGE_BYTES + 1), f"expected {MAX_MESSAGE_BYTES} bytes at most"),
    ],
)
def test_invalid_json_is_refused(payload: bytes, message: str) -> None:
    with pytest.raises(MalformedError, match=message):
        read_envelope(payload, LOAD_TARGET_SET)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
TIMES = st.one_of(
    st.just("2027-01-15T18:00:00Z"),
    st.just("2037-01-15T18:00:00.123456789+05:30"),
    st.datetimes().map(lambda time: time.isoformat() + "Z"),
    st.text(max_size=30),
    ANYTHING,
)


def fields(**known: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for objects with any of the fields."""
    return st.fixed_dictionaries({}, optional=known)


CONSTRAINTS = st.one_of(
    st.none(),
    fields(
        value=st.floats(-1, 1e7) | ANYTHING,
        unit=st.sampled_from(["watt", "kilowatt", "megawatt"]) | ANYTHING,
    ),
)
TARGETS = fields(
    interval=fields(start_time=TIMES, end_time=TIMES) | ANYTHING,
    load_constraint=CONSTRAINTS | ANYTHING,
    feed_tags=st.lists(st.text(), max_size=3) | ANYTHING,
    strategy=fields(best_effort=st.booleans() | ANYTHING) | ANYTHING,
)
CONTENTS = st.one_of(ANYTHING, fields(targets=st.lists(TARGETS, max_size=3) | ANYTHING))


@needs_contract
@given(CONTENTS)
def test_exactly_the_messages_within_the_contract_are_accepted(content: object) -> None:
    """Beyond the schema, a limit of 0, ends before starts, times without an offset, and sizes are refused."""
    envelope = read_envelope(ENVELOPE, LOAD_TARGET_SET)
    try:
        reported = read_load_targets(envelope, json.dumps(content).encode())
    except MalformedError:
        return
    assert problems("SetLoadTargetData", content) == []
    for target in reported.targets:
        assert 0 <= target.start_s < target.end_s
        assert target.constraint is None or 0 <= target.constraint.limit_w <= 1e12


ENVELOPE = json.dumps(
    {
        "specversion": "1.0.2",
        "id": "00000000-0000-4000-8000-000000000000",
        "source": "//grid/v1/isv/acme",
        "type": LOAD_TARGET_SET,
        "time": "2027-01-15T08:00:00Z",
        "datacontenttype": "application/json",
        "subject": "loadtarget",
        "traceparent": f"00-{'1' * 32}-{'1' * 16}-01",
        "data": "a.b.c",
    }
).encode()

GOOD_TARGETS = st.fixed_dictionaries(
    {
        "interval": fields(
            start_time=st.integers(0, 10**9).map(moment),
            end_time=st.integers(2 * 10**9, 3 * 10**9).map(moment),
        ),
        "load_constraint": st.one_of(
            st.none(),
            st.fixed_dictionaries(
                {"value": st.floats(1e-3, 1e6), "unit": st.sampled_from(["watt", "kilowatt", "megawatt"])}
            ),
        ),
    },
    optional={
        "feed_tags": st.lists(st.text(min_size=1, max_size=20), max_size=3),
        "strategy": fields(best_effort=st.booleans()),
    },
)


@needs_contract
@given(st.fixed_dictionaries({"targets": st.lists(GOOD_TARGETS, min_size=1, max_size=4)}))
def test_every_message_that_the_contract_allows_is_accepted(content: dict[str, Any]) -> None:
    assert problems("SetLoadTargetData", content) == []
    reported = read_load_targets(read_envelope(ENVELOPE, LOAD_TARGET_SET), json.dumps(content).encode())
    assert len(reported.targets) == len(content["targets"])


@given(st.one_of(st.binary(max_size=200), st.integers(0, len(ENVELOPE)).map(lambda end: ENVELOPE[:end])))
def test_no_bytes_raise_any_other_error(payload: bytes) -> None:
    try:
        read_envelope(payload, LOAD_TARGET_SET)
    except MalformedError:
        return
    assert payload == ENVELOPE


@needs_contract
def test_an_enforcement_outcome_is_read(tmp_path: Path) -> None:
    outcome = {
        "breach_id": "00000000-0000-4000-8000-000000000000",
        "feed_tag": "hall-a",
        "action": "applied",
        "code": "partial",
        "results": [
            {"resource_id": "a-1", "resource_type": "node", "requested_action": "throttle", "code": "applied"}
        ],
        "timestamp": moment(SENT_S),
    }
    assert problems("PowerBreachEnforcementData", outcome) == []
    reported = read_enforcement(json.dumps(outcome).encode())
    assert (reported.action, reported.code, reported.timestamp, len(reported.results)) == (
        "applied",
        "partial",
        SENT_S,
        1,
    )
