"""The table of a job's transitions; entering a state checks it."""

import pytest

from perseus.service.domain.inputs import FinishRequested
from perseus.service.domain.model import JobState
from perseus.service.job.states import NEEDS_ALL_RANKS, TRANSITIONS, TransitionError, check_transition
from tests.service.service_fakes import Cluster, make_spec


def test_every_state_can_be_reached_and_every_job_can_be_ended() -> None:
    reached = {JobState.WAITING}
    while more := {after for before in reached for after in TRANSITIONS[before]} - reached:
        reached |= more
    assert reached == set(JobState) == set(TRANSITIONS)
    assert all(JobState.FINISHED in TRANSITIONS[state] for state in set(JobState) - {JobState.FINISHED})


def test_a_state_that_needs_all_ranks_can_be_left_when_one_is_lost() -> None:
    assert all(JobState.WAITING in TRANSITIONS[state] for state in NEEDS_ALL_RANKS)


def test_a_transition_outside_the_table_is_refused_with_the_expected_states() -> None:
    with pytest.raises(
        TransitionError, match="from STOCK: expected BASELINE, FINISHED, WAITING, found PLANNED"
    ):
        check_transition(JobState.STOCK, JobState.PLANNED)
    with pytest.raises(TransitionError, match="from FINISHED: expected no other state, found WAITING"):
        check_transition(JobState.FINISHED, JobState.WAITING)


def test_entering_a_state_checks_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(make_spec())
    monkeypatch.setitem(TRANSITIONS, JobState.WAITING, frozenset())
    with pytest.raises(TransitionError, match="from WAITING"):
        cluster.machine.handle(FinishRequested(), 0.0, 0.0)
    assert cluster.machine.record.state is JobState.WAITING
