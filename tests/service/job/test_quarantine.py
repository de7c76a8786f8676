"""The replacement of a failed state machine: a job at stock that can be shown, finished and resumed."""

from dataclasses import replace

import pytest

from perseus.service.domain.commands import Announce, Command, RefuseRank, Store
from perseus.service.domain.errors import (
    JobFinishedError,
    JobNotSolvedError,
    JobQuarantinedError,
    RankNotServedError,
    TimelineNotReadyError,
)
from perseus.service.domain.inputs import (
    AgentHeard,
    FinishRequested,
    RankLeft,
    RegisteredAgain,
    TelemetryArrived,
    Tick,
)
from perseus.service.domain.model import FaultyPart, JobState, RankLeftReason
from perseus.service.domain.records import EndedRun, JobRecord
from perseus.service.domain.snapshot import Fault, RunSnapshot
from perseus.service.domain.specification import Registration
from perseus.service.domain.stall import StockReason, next_step
from perseus.service.job import views
from perseus.service.job.quarantine import handle, quarantine
from perseus.v1 import event_pb2, job_pb2
from tests.service.job.machine_bench import FIRST, planned
from tests.service.service_fakes import EPOCH, START_S, Cluster, batch

FAULT = Fault.of(FaultyPart.MACHINE, ValueError("odd \n thing"))


def quarantined(cluster: Cluster) -> tuple[RunSnapshot, list[Command]]:
    return quarantine(cluster.stored(), FAULT, cluster.rules, EPOCH, START_S)


def test_a_run_is_put_at_stock_and_its_ranks_are_refused() -> None:
    cluster = planned()
    known = cluster.stored()
    snapshot, commands = quarantined(cluster)
    refused = [command for command in commands if isinstance(command, RefuseRank)]
    assert {command.rank for command in refused} == set(cluster.ranks)
    assert all(isinstance(command.why, JobQuarantinedError) for command in refused)
    changed, event = (command.event for command in commands if isinstance(command, Announce))
    assert (changed.sequence, event.sequence) == (known.last_sequence + 1, known.last_sequence + 2)
    assert changed.state_changed == event_pb2.StateChanged(
        before=job_pb2.JOB_STATE_PLANNED, after=job_pb2.JOB_STATE_STOCK, reason=changed.state_changed.reason
    )
    assert event.quarantined == event_pb2.Quarantined(
        part=event_pb2.FAULTY_PART_MACHINE,
        error="ValueError: odd ? thing",
        before=job_pb2.JOB_STATE_PLANNED,
    )

    assert snapshot.job.state == job_pb2.JOB_STATE_STOCK
    assert "ValueError: odd ? thing" in snapshot.job.state_reason
    assert snapshot.job.next_step == next_step(StockReason.QUARANTINED, "job")
    assert snapshot.job.rank_counts == job_pb2.RankCounts(lost_count=len(cluster.ranks))
    for silent in (Tick(), AgentHeard("agent-0")):
        assert handle(snapshot, silent, 0.0, START_S)[1] == []
    for rank in cluster.ranks.values():
        with pytest.raises(JobQuarantinedError):
            handle(snapshot, rank.joined(), 0.0, START_S)
    with pytest.raises(JobQuarantinedError):
        snapshot.solved_frontier()
    with pytest.raises(JobQuarantinedError):
        snapshot.timeline(0)


def test_it_is_registered_again_once_and_ends_once() -> None:
    cluster = planned()
    snapshot, _ = quarantined(cluster)
    labelled = RegisteredAgain(Registration("labelled", labels=(("a", "b"),)))
    snapshot, (stored,) = handle(snapshot, labelled, 0.0, START_S)
    assert isinstance(stored, Store)
    assert handle(snapshot, labelled, 0.0, START_S)[1] == []
    snapshot, commands = handle(snapshot, FinishRequested(), 0.0, START_S + 5)
    records = [command.record for command in commands if isinstance(command, Store)]
    assert [record.state for record in records if isinstance(record, JobRecord)] == [JobState.FINISHED]
    assert [record.job for record in records if isinstance(record, EndedRun)] == [snapshot.job]
    assert handle(snapshot, FinishRequested(), 0.0, START_S + 6)[1] == []
    assert [*snapshot.job.labels] == [job_pb2.Label(key="a", value="b")]
    assert snapshot.job.state == job_pb2.JOB_STATE_FINISHED
    assert snapshot.job.finish_time.ToNanoseconds() == (START_S + 5) * 10**9
    assert quarantined(cluster)[1], "the job itself continues"


def test_a_finished_run_stays_finished() -> None:
    cluster = planned()
    cluster.send(FinishRequested())
    snapshot, (stored,) = quarantined(cluster)
    assert stored == Store(EndedRun(snapshot.job))
    assert snapshot.job.state == job_pb2.JOB_STATE_FINISHED
    with pytest.raises(JobFinishedError):
        handle(snapshot, cluster.ranks[FIRST].joined(), 0.0, START_S)


def test_the_snapshot_of_an_ended_run_shows_the_same_as_its_machine() -> None:
    cluster = planned()
    for rank in cluster.ranks.values():
        cluster.send(RankLeft(rank.place, rank.instance_id, RankLeftReason.FINISHED))
    run = cluster.machine.run
    (ended,) = [
        each.record
        for each in cluster.history
        if isinstance(each, Store) and isinstance(each.record, EndedRun)
    ]
    snapshot = views.snapshot(run, ended)
    assert snapshot.job == ended.job == views.job(run, is_full=True)
    assert snapshot.solved_frontier() is views.solved_frontier(run)
    for pipeline in range(2):
        assert (
            snapshot.timeline(pipeline).timeline.iteration == views.timeline(run, pipeline).timeline.iteration
        )
    assert snapshot.timeline(0, from_baseline=True).pipeline == 0
    for first, count in ((0, 100), (1, 1)):
        assert snapshot.columns(first, count) == views.rank_columns(run, first, count)
    lighter = replace(snapshot, measured=None)
    assert lighter.columns(0, 1) is None
    with pytest.raises(JobNotSolvedError):
        lighter.solved_frontier()
    with pytest.raises(TimelineNotReadyError):
        lighter.timeline(0)
    with pytest.raises(RankNotServedError):
        handle(snapshot, TelemetryArrived(FIRST, "agent-0", batch(1, [99], 0, 0.8)), 0.0, START_S)
