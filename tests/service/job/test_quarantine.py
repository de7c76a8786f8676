"""What stands in for a state machine that failed: a job at stock that can be shown, finished and resumed."""

import pytest

from perseus.service.domain.commands import Announce, RefuseRank, SendOffer, Store
from perseus.service.domain.errors import JobQuarantinedError
from perseus.service.domain.inputs import (
    Abandoned,
    AgentHeard,
    FinishRequested,
    RegisteredAgain,
    ResumeRequested,
    Tick,
)
from perseus.service.domain.model import STOCK, FaultyPart, JobState, RankFilter, RankState
from perseus.service.domain.records import JobRecord
from perseus.service.domain.specification import Registration
from perseus.service.job.machine import JobMachine
from perseus.service.job.quarantine import Fault, QuarantinedRun
from perseus.v1 import event_pb2, job_pb2
from tests.service.service_fakes import EPOCH, START_S, Cluster, make_spec

FAULT = Fault.of(FaultyPart.MACHINE, ValueError("odd \n thing"))


def planned() -> Cluster:
    cluster = Cluster(make_spec())
    cluster.join_all()
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(4)
    return cluster


def test_a_run_is_put_at_stock_and_its_ranks_are_told() -> None:
    cluster = planned()
    known = cluster.stored()
    stand_in = QuarantinedRun(known, FAULT, cluster.rules, EPOCH, START_S)
    commands = stand_in.begin()
    refused = [command for command in commands if isinstance(command, RefuseRank)]
    assert {command.rank for command in refused} == set(cluster.ranks)
    assert all(isinstance(command.why, JobQuarantinedError) for command in refused)
    changed, quarantined = (command.event for command in commands if isinstance(command, Announce))
    assert (changed.sequence, quarantined.sequence) == (known.last_sequence + 1, known.last_sequence + 2)
    assert changed.state_changed == event_pb2.StateChanged(
        before=job_pb2.JOB_STATE_PLANNED, after=job_pb2.JOB_STATE_STOCK, reason=changed.state_changed.reason
    )
    assert quarantined.quarantined == event_pb2.Quarantined(
        part=event_pb2.FAULTY_PART_MACHINE,
        error="ValueError: odd ? thing",
        before=job_pb2.JOB_STATE_PLANNED,
    )

    view = stand_in.view()
    assert view.state is JobState.STOCK
    assert "ValueError: odd ? thing" in view.state_reason
    assert view.rank_counts[RankState.LOST] == len(cluster.ranks)
    assert [rank.coordinates for _, rank in stand_in.ranks(RankFilter())] == list(cluster.ranks)
    assert list(stand_in.report(0)) == list(cluster.machine.report(0))
    for silent in (Tick(), AgentHeard("agent-0")):
        assert stand_in.handle(silent, 0.0, START_S) == []
    for rank in cluster.ranks.values():
        with pytest.raises(JobQuarantinedError):
            stand_in.handle(rank.joined(), 0.0, START_S)
    with pytest.raises(JobQuarantinedError):
        stand_in.solved_frontier()


def test_it_is_registered_again_and_ends_once() -> None:
    cluster = planned()
    stand_in = QuarantinedRun(cluster.stored(), FAULT, cluster.rules, EPOCH, START_S)
    stand_in.begin()
    (stored,) = stand_in.handle(RegisteredAgain(Registration("another")), 0.0, START_S)
    assert isinstance(stored, Store)
    assert stand_in.handle(RegisteredAgain(Registration("another")), 0.0, START_S) == []
    stand_in.handle(RegisteredAgain(Registration("labelled", labels=(("a", "b"),))), 0.0, START_S)
    assert stand_in.view().labels == (("a", "b"),)
    commands = stand_in.handle(FinishRequested(), 0.0, START_S + 5)
    records = [command.record for command in commands if isinstance(command, Store)]
    assert [record.state for record in records if isinstance(record, JobRecord)] == [JobState.FINISHED]
    assert stand_in.has_finished
    assert stand_in.view().finish_time_s == START_S + 5
    assert stand_in.handle(Abandoned("another"), 0.0, START_S + 6) == []
    assert QuarantinedRun(cluster.stored(), FAULT, cluster.rules, EPOCH, START_S).begin(), (
        "the job itself goes on"
    )


def test_what_is_stored_of_it_brings_no_plan_back_and_resumes_from_its_profile() -> None:
    cluster = planned()
    version = cluster.machine.version
    cluster.history += QuarantinedRun(cluster.stored(), FAULT, cluster.rules, EPOCH, START_S).begin()
    cluster.restart()
    cluster.expect(JobState.STOCK)
    assert all(offer.clocks == STOCK for offer in cluster.machine._offers)
    assert cluster.machine.version > version
    for rank in cluster.ranks.values():
        rank.start_trainer(rank.iteration)
    commands = [command for rank in cluster.ranks.values() for command in cluster.tell(rank.joined())]
    assert all(command.offer.clocks == STOCK for command in commands if isinstance(command, SendOffer))
    cluster.carry_out(commands)
    cluster.send(ResumeRequested())
    cluster.iterate_until(JobState.PLANNED)
    assert isinstance(cluster.machine, JobMachine)
    cluster.iterate(4)
    cluster.expect_in_force()


def test_a_finished_run_stays_finished() -> None:
    cluster = planned()
    cluster.send(FinishRequested())
    stand_in = QuarantinedRun(cluster.stored(), FAULT, cluster.rules, EPOCH, START_S)
    assert stand_in.begin() == []
    assert stand_in.has_finished


def test_its_ranks_are_told_in_columns_without_figures() -> None:
    cluster = planned()
    before = cluster.machine.rank_columns(0, 100)
    assert set(before.state) == {RankState.CONNECTED}
    assert None not in (*before.clock_mhz, *before.slowness, *before.power_w)
    stand_in = QuarantinedRun(cluster.stored(), FAULT, cluster.rules, EPOCH, START_S)
    counts = cluster.spec.parallelism
    width = counts.stage_count * counts.tensor_count
    told = stand_in.rank_columns(1, 1)
    assert list(told.state) == [RankState.LOST] * width
    assert list(told.power_w) == list(told.clock_mhz) == list(told.slowness) == [None] * width
    assert len(stand_in.rank_columns(0, 100).state) == counts.pipeline_count * width
    assert before.iteration[:width] == cluster.machine.rank_columns(0, 1).iteration
