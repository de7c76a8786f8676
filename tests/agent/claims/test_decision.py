"""Grants, and the table of cases: who may have a GPU, and the reasons of refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from perseus.agent.claims.grants import ALL, Grant, Grants, MalformedGrantError, User, parse

ALICE = User(1004, "alice")
users = st.one_of(
    st.integers(0, 999_999).map(str),
    st.builds(
        "{}{}{}".format, st.sampled_from("az_"), st.text("az09._-", max_size=30), st.sampled_from(["", "$"])
    ),
)
gpus = st.one_of(
    st.integers(0, 9999).map(str),
    st.just(ALL),
    st.text("0123456789abcdef-", min_size=1, max_size=40).map("GPU-{}".format),
)
grants = st.lists(st.tuples(users, st.lists(gpus, min_size=1, max_size=5)), max_size=5)


@given(grants, st.sampled_from(["\n", "\r\n", "  # why\n", "\n\n# a comment: 1\n"]))
def test_written_grants_are_read_back(message: list[tuple[str, list[str]]], end: str) -> None:
    text = "".join(f"{user}:  {' '.join(names)} {end}" for user, names in message)
    assert parse(text) == tuple(Grant(user, frozenset(names)) for user, names in message)


@given(st.text())
def test_any_other_text_raises_one_error(text: str) -> None:
    try:
        found = parse(text)
    except MalformedGrantError as error:
        message = str(error)
    else:
        assert all(grant.user and grant.gpus for grant in found)
        return
    assert message.startswith("line ")
    assert message.isprintable()


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("alice 0 1", "line 1: expected USER: GPU …, found 'alice 0 1'"),
        ("# fine\nalice:", "line 2: expected a GPU's index or UUID, or all, found none"),
        ("alice: 0, 1", "line 1: expected a GPU's index or UUID, or all, found '0,'"),
        ("alice: ../etc", "found '../etc'"),
        ("alice: 12345678", "found '12345678'"),
        ("al ice: 0", "line 1: expected USER: GPU"),
        (": 0", "line 1: expected USER: GPU"),
        ("alice: GPU-\x1b[31m", r"found 'GPU-\\x1b\[31m'"),
        ("a: slurm-job=17", "line 1: expected a GPU's index or UUID, or all, found none"),
        ("a: 0 =17", "line 1: expected a label KEY=VALUE, found '=17'"),
        ("a: 0 Slurm=17", "line 1: expected a label KEY=VALUE, found 'Slurm=17'"),
        ("a: 0 job=\x1b", r"line 1: expected a label KEY=VALUE, found 'job=\\x1b'"),
        ("a: 0 " + " ".join(f"k{i}=v" for i in range(17)), "line 1: expected at most 16 labels, found 17"),
    ],
)
def test_a_mistake_is_named(text: str, mistake: str) -> None:
    with pytest.raises(MalformedGrantError, match=mistake):
        parse(text)


@pytest.mark.parametrize(
    ("line", "user", "is_theirs"),
    [
        ("alice: 0", ALICE, True),
        ("1004: 0", ALICE, True),
        ("bob: 0", ALICE, False),
        ("100: 0", ALICE, False),
        ("Alice: 0", ALICE, False),
        ("1004: 0", User(7, "1004"), False),
    ],
)
def test_the_user_of_a_grant(line: str, user: User, is_theirs: bool) -> None:
    (grant,) = parse(line)
    assert grant.is_for(user) is is_theirs


def test_labels_may_be_mixed_with_gpus() -> None:
    (grant,) = parse("bob: 2 slurm-job=17 GPU-a slurm-account=physics.ml  # why")
    assert grant == Grant(
        "bob", frozenset({"2", "GPU-a"}), (("slurm-account", "physics.ml"), ("slurm-job", "17"))
    )


# --- Who may have a GPU -------------------------------------------------------------------------------------

BOB_UID = 1005
GPU = ("GPU-b", 1)


@pytest.mark.parametrize(
    ("output", "problems", "expected"),
    [
        ("", (), None),
        ("alice: 1", (), Allowed(is_granted=True)),
        ("alice: 1", ("/x: line 1",), Allowed(is_granted=True)),
        ("alice: all", (), Allowed(is_granted=True)),
        ("alice: 01", (), Allowed(is_granted=True)),
        ("alice: 0\nalice: GPU-b", (), Allowed(is_granted=True)),
        ("alice: 1\nbob: 1", (), Allowed(is_granted=True)),
        ("alice: 1 job=7\nalice: 0 job=8\nbob: 1 job=9", (), Allowed(True, labels=(("job", "7"),))),
        ("alice: 1 job=7 a=b\nalice: all job=8", (), Allowed(True, labels=(("a", "b"), ("job", "8")))),
        ("alice: 0", (), NOT_GRANTED),
        ("alice: GPU-", (), NOT_GRANTED),
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
