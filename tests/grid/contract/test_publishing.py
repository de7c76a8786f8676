"""Everything that a gateway publishes matches the contract's own schemas."""

import json
from dataclasses import replace
from typing import Any

import pytest

from perseus.grid.contract.messages import (
    POWER_BREACH_ALERT,
    POWER_STATE_STATUS,
    write_data,
    write_envelope,
)
from perseus.grid.contract.publishing import alert, status
from perseus.grid.dsx_flex.breaches import Breach, BreachStatus
from perseus.grid.dsx_flex.commands import FeedSnapshot, PublishAlert, PublishStatus
from perseus.grid.dsx_flex.values import Constraint, FeedEvent, Piece
from tests.grid.contract.contract_schemas import needs_contract, problems
from tests.grid.dsx_flex.gateways import NOW_S, TRACE, reading, uuid4

OPEN = Piece("hall-a", NOW_S, float("inf"), Constraint(0.7, "megawatt"), True, uuid4(2), uuid4(1), 0)
CLOSED = replace(OPEN, start_s=NOW_S + 60, end_s=NOW_S + 90, best_effort=False)


def snapshot(event: FeedEvent, since_s: float | None) -> FeedSnapshot:
    return FeedSnapshot(
        reading=reading(default_w=8e5),
        targets=((OPEN, True), (CLOSED, False)),
        event=event,
        in_flight=False,
        since_s=since_s,
        is_compliant=True,
    )


def written(event_type: str, content: dict[str, Any], correlation_id: str | None = None) -> dict[str, Any]:
    """Return a published envelope with the signed content in place of the JWS: the schema allows both."""
    payload = write_envelope(
        event_id=uuid4(9),
        agent="maxlps",
        event_type=event_type,
        time_s=NOW_S,
        data="a.b.c",
        trace=TRACE,
        correlation_id=correlation_id,
    )
    envelope: dict[str, Any] = json.loads(payload)
    return {**envelope, "data": content}


@needs_contract
@pytest.mark.parametrize("since_s", [None, NOW_S])
@pytest.mark.parametrize("event", FeedEvent)
def test_a_power_state_matches_the_contract(event: FeedEvent, since_s: float | None) -> None:
    content = json.loads(write_data(status(PublishStatus({"hall-a": snapshot(event, since_s)}, NOW_S))))
    assert problems("PowerStateStatusData", content) == []
    assert problems("PowerStateStatusEvent", written(POWER_STATE_STATUS, content)) == []
    feed = content["feeds"]["hall-a"]
    assert feed["event"] == event.value
    assert feed["metadata"]["default_constraint"] == {"value": 8e5, "unit": "watt"}
    assert [target["active"] for target in feed["targets"]] == [True, False]
    assert [set(target["interval"]) for target in feed["targets"]] == [
        {"start_time"},
        {"start_time", "end_time"},
    ]
    assert feed["targets"][0]["load_constraint"] == {"value": 0.7, "unit": "megawatt"}
    assert ("power_event_start_time" in feed) == (since_s is not None)


BREACH = Breach(
    uuid4(5),
    "hall-a",
    uuid4(2),
    Constraint(700, "kilowatt"),
    best_effort=False,
    detected_s=NOW_S,
    status=BreachStatus.ACTIVE,
    is_critical=True,
    measured_w=850e3,
)
NODES = {"gpt3": ["a-1", "a-2"], "bert": ["a-2", "a-3"]}


def reported(**changed: Any) -> dict[str, Any]:
    breach = replace(BREACH, **changed)
    is_over = breach.status is BreachStatus.RESOLVED
    to_pause, held = ((), ()) if is_over else (("gpt3", "gone"), ("bert",))
    content: dict[str, Any] = json.loads(
        write_data(alert(PublishAlert(breach, to_pause, held, TRACE), NODES))
    )
    return content


@needs_contract
@pytest.mark.parametrize("best_effort", [False, True])
@pytest.mark.parametrize("state", BreachStatus)
def test_a_breach_matches_the_contract(state: BreachStatus, best_effort: bool) -> None:
    resolved_s = NOW_S + 9 if state is BreachStatus.RESOLVED else None
    content = reported(status=state, best_effort=best_effort, resolved_s=resolved_s)
    assert problems("PowerBreachAlertData", content) == []
    assert problems("PowerBreachAlertEvent", written(POWER_BREACH_ALERT, content, uuid4(2))) == []
    assert ("shed_hints" in content) == (state is not BreachStatus.RESOLVED)
    assert ("resolved_at" in content["breach"]) == (state is BreachStatus.RESOLVED)


def test_hints_name_nodes_of_jobs_to_pause_first_and_stop_no_job_for_best_effort() -> None:
    hints = reported()["shed_hints"]
    assert [(hint["resource_id"], hint["action"], hint["priority"]) for hint in hints] == [
        ("a-1", "suspend", 1),
        ("a-2", "suspend", 2),
        ("a-3", "throttle", 3),
    ]
    assert {hint["action"] for hint in reported(best_effort=True)["shed_hints"]} == {"throttle"}


def test_only_an_escalated_breach_asks_for_nodes_to_be_shut_down() -> None:
    escalated = BreachStatus.ESCALATED
    assert reported()["infrastructure_actions"] == []
    assert reported(status=escalated)["infrastructure_actions"] == ["SHUTDOWN_NODES"]
    assert reported(status=escalated, best_effort=True)["infrastructure_actions"] == []


def test_an_envelope_has_its_sender_and_subject(tmp_path: object) -> None:
    envelope = written(POWER_BREACH_ALERT, {}, uuid4(2))
    assert (envelope["source"], envelope["subject"]) == ("//grid/v1/dsx-flex-agent/maxlps", "powerbreach")
    assert (envelope["traceparent"], envelope["tracestate"]) == (TRACE.traceparent, TRACE.tracestate)
    assert "correlationid" not in written(POWER_BREACH_ALERT, {})
