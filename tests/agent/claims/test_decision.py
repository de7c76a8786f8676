"""The table of cases: who may have a GPU, and the reasons of refusals."""

import pytest

from perseus.agent.claims.decision import (
    GRANTS_NOT_UNDERSTOOD,
    NOT_GRANTED,
    NOT_KNOWN,
    NOT_OPENABLE,
    OF_ANOTHER_USER,
    Access,
    Allowed,
    GpuObservation,
    Refused,
    by_grant,
    by_observation,
)
from perseus.agent.claims.grants import Grants, User, parse

ALICE = User(1004, "alice")
BOB_UID = 1005
GPU = ("GPU-b", 1)


@pytest.mark.parametrize(
    ("output", "problems", "expected"),
    [
        ("", (), None),
        ("alice: 1", (), Allowed(is_granted=True)),
        ("alice: 1", ("/x: line 1",), Allowed(is_granted=True)),
        ("alice: all", (), Allowed(is_granted=True)),
        ("alice: 0\nalice: GPU-b", (), Allowed(is_granted=True)),
        ("alice: 1\nbob: 1", (), Allowed(is_granted=True)),
        ("alice: 1 job=7\nalice: 0 job=8\nbob: 1 job=9", (), Allowed(True, labels=(("job", "7"),))),
        ("alice: 1 job=7 a=b\nalice: all job=8", (), Allowed(True, labels=(("a", "b"), ("job", "8")))),
        ("alice: 0", (), NOT_GRANTED),
        ("bob: 1", (), NOT_GRANTED),
        ("bob: GPU-b", (), NOT_GRANTED),
        ("bob: 0", (), None),
        ("bob: all", (), None),
        ("", ("/x: line 1",), GRANTS_NOT_UNDERSTOOD),
        ("bob: 0", ("/x: line 1",), GRANTS_NOT_UNDERSTOOD),
    ],
)
def test_judging_by_grants(output: str, problems: tuple[str, ...], expected: Allowed | str | None) -> None:
    verdict = by_grant(Grants(parse(output), problems), ALICE, *GPU)
    assert (verdict.reason if isinstance(verdict, Refused) else verdict) == expected


OPEN, CLOSED, UNKNOWN = Access.OPEN, Access.CLOSED, Access.UNKNOWN
NOBODY: frozenset[int] = frozenset()
HERS, HIS = frozenset({ALICE.uid}), frozenset({BOB_UID})


@pytest.mark.parametrize(
    ("observation", "stands", "expected"),
    [
        (GpuObservation(OPEN, owners=NOBODY), False, Allowed()),
        (GpuObservation(OPEN, owners=HERS), False, Allowed(is_running=True)),
        (GpuObservation(OPEN, owners=HIS), False, OF_ANOTHER_USER),
        (GpuObservation(OPEN, owners=HERS | HIS), False, OF_ANOTHER_USER),
        (GpuObservation(OPEN, owners=frozenset({0})), False, OF_ANOTHER_USER),
        (GpuObservation(OPEN, owners=None), False, NOT_KNOWN),
        (GpuObservation(OPEN, owners=None, is_agents_user=True), False, Allowed()),
        (GpuObservation(CLOSED, "closed", NOBODY), False, NOT_OPENABLE),
        (GpuObservation(CLOSED, "closed", HERS), False, NOT_OPENABLE),
        (GpuObservation(UNKNOWN, "no idea", NOBODY), False, NOT_OPENABLE),
        # A proven claim does not end for a process that comes later.
        (GpuObservation(OPEN, owners=HERS | HIS), True, Allowed(is_running=True)),
        (GpuObservation(OPEN, owners=HIS), True, Allowed(is_running=True)),
    ],
)
def test_judging_by_observation(observation: GpuObservation, stands: bool, expected: Allowed | str) -> None:
    verdict = by_observation(ALICE, GPU[0], observation, stands=stands)
    assert (verdict.reason if isinstance(verdict, Refused) else verdict) == expected


def test_a_refusal_has_expectation_and_finding() -> None:
    refused = by_observation(
        ALICE, "GPU-b", GpuObservation(CLOSED, "/dev/nvidia1 is closed to them"), stands=False
    )
    assert isinstance(refused, Refused)
    assert refused.message == (
        "GPU GPU-b: expected that user alice may open its device, found that they may not: /dev/nvidia1 is "
        "closed to them; a grant can permit it (docs/security.md)"
    )
