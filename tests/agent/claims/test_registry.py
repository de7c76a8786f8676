"""Two users on one node: claims to GPUs and jobs, and which of them yields."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.agent.claims.decision import Allowed, Refused
from perseus.agent.claims.grants import User
from perseus.agent.claims.registry import GPU_TAKEN, JOB_TAKEN, RANK_TAKEN, Claim, ClaimRegistry
from perseus.agent.link.computation import Rank

ALICE, BOB = User(1004, "alice"), User(1005, "bob")
SEEN, RUNNING, GRANTED = Allowed(), Allowed(is_running=True), Allowed(is_granted=True)


def claim(user: User, job: str, stage: int, gpu: str, verdict: Allowed | None = SEEN) -> Claim:
    return Claim(Rank(job, 0, stage, 0), gpu, user, verdict)


def outcome(holder: Claim, newcomer: Claim) -> str:
    registry = ClaimRegistry()
    registry.enter(holder)
    found = registry.conflicts(newcomer)
    if isinstance(found, Refused):
        return found.reason
    return "gives way" if found else "both"


@pytest.mark.parametrize(
    ("holder", "newcomer", "expected"),
    [
        # Of one user.
        (claim(ALICE, "a", 0, "G0"), claim(ALICE, "a", 1, "G1"), "both"),
        (claim(ALICE, "a", 0, "G0", RUNNING), claim(ALICE, "a", 0, "G1", GRANTED), RANK_TAKEN),
        (claim(ALICE, "a", 0, "G0", SEEN), claim(ALICE, "b", 0, "G0", GRANTED), GPU_TAKEN),
        # The same GPU.
        (claim(BOB, "b", 0, "G0", SEEN), claim(ALICE, "a", 0, "G0", SEEN), GPU_TAKEN),
        (claim(BOB, "b", 0, "G0", SEEN), claim(ALICE, "a", 0, "G0", RUNNING), "gives way"),
        (claim(BOB, "b", 0, "G0", SEEN), claim(ALICE, "a", 0, "G0", GRANTED), "gives way"),
        (claim(BOB, "b", 0, "G0", RUNNING), claim(ALICE, "a", 0, "G0", RUNNING), GPU_TAKEN),
        (claim(BOB, "b", 0, "G0", RUNNING), claim(ALICE, "a", 0, "G0", GRANTED), "gives way"),
        (claim(BOB, "b", 0, "G0", GRANTED), claim(ALICE, "a", 0, "G0", RUNNING), GPU_TAKEN),
        (claim(BOB, "b", 0, "G0", GRANTED), claim(ALICE, "a", 0, "G0", GRANTED), GPU_TAKEN),
        # Nobody holds an unusable GPU.
        (claim(BOB, "b", 0, "G0", None), claim(ALICE, "a", 0, "G0", SEEN), "both"),
        # The same job.
        (claim(BOB, "a", 0, "G0", SEEN), claim(ALICE, "a", 0, "G1", SEEN), JOB_TAKEN),
        (claim(BOB, "a", 0, "G0", SEEN), claim(ALICE, "a", 1, "G1", RUNNING), "gives way"),
        (claim(BOB, "a", 0, "G0", None), claim(ALICE, "a", 1, "G1", RUNNING), "gives way"),
        (claim(BOB, "a", 0, "G0", RUNNING), claim(ALICE, "a", 1, "G1", RUNNING), JOB_TAKEN),
        (claim(BOB, "a", 0, "G0", GRANTED), claim(ALICE, "a", 1, "G1", None), JOB_TAKEN),
    ],
)
def test_which_claim_yields(holder: Claim, newcomer: Claim, expected: str) -> None:
    assert outcome(replace(holder), newcomer) == expected


@pytest.mark.parametrize(
    ("answers", "holder", "expected"),
    [
        ([True], SEEN, JOB_TAKEN),
        ([True], RUNNING, JOB_TAKEN),
        ([False], RUNNING, "gives way"),
        ([True, False], RUNNING, "gives way"),
        ([False, True], RUNNING, JOB_TAKEN),
    ],
)
def test_the_coordinators_answer_counts(answers: list[bool], holder: Allowed, expected: str) -> None:
    registry = ClaimRegistry()
    held = claim(BOB, "a", 0, "G0", holder)
    registry.enter(held)
    for is_accepted in answers:
        registry.answered(held.rank, is_accepted=is_accepted)
    found = registry.conflicts(claim(ALICE, "a", 1, "G1", RUNNING))
    assert (found.reason if isinstance(found, Refused) else "gives way") == expected


claims = st.builds(
    claim,
    st.sampled_from([ALICE, BOB]),
    st.sampled_from(["a", "b"]),
    st.integers(0, 1),
    st.sampled_from(["G0", "G1"]),
    st.sampled_from([SEEN, RUNNING, GRANTED, None]),
)


@given(st.lists(claims, max_size=12))
def test_a_gpu_a_rank_and_a_job_belong_to_one_user_at_a_time(newcomers: list[Claim]) -> None:
    registry = ClaimRegistry()
    for newcomer in newcomers:
        found = registry.conflicts(newcomer)
        if isinstance(found, Refused):
            continue
        for other in found:
            assert other.user != newcomer.user
            registry.end(other)
        registry.enter(newcomer)
        held = registry.claims()
        gpus = [each.gpu_uuid for each in held if each.verdict is not None]
        assert len(gpus) == len(set(gpus))
        assert len({each.rank for each in held}) == len(held)
        assert len({(each.rank.job_id, each.user) for each in held}) == len({e.rank.job_id for e in held})
