"""The replacement of a failed state machine: a job at stock that can be shown, finished and resumed."""

from dataclasses import replace

import pytest

from perseus.service.domain.commands import Command, Store
from perseus.service.domain.errors import (
    JobFinishedError,
    JobNotSolvedError,
    JobQuarantinedError,
    RankNotServedError,
    TimelineNotReadyError,
)
from perseus.service.domain.inputs import (
    FinishRequested,
    RankLeft,
    RegisteredAgain,
    TelemetryArrived,
)
from perseus.service.domain.model import FaultyPart, JobState, RankLeftReason
from perseus.service.domain.records import EndedRun, JobRecord
from perseus.service.domain.snapshot import Fault, RunSnapshot
from perseus.service.domain.specification import Registration
from perseus.service.domain.stall import StockReason, next_step
from perseus.service.job import views
from perseus.service.job.quarantine import handle, quarantine
from perseus.v1 import job_pb2
from tests.service.job.clusters import FIRST, planned
from tests.service.service_fakes import EPOCH, START_S, Cluster, batch

FAULT = Fault.of(FaultyPart.MACHINE, ValueError("odd \n thing"))


def quarantined(cluster: Cluster) -> tuple[RunSnapshot, list[Command]]:
    return quarantine(cluster.stored(), FAULT, cluster.rules, EPOCH, START_S)


def test_it_refuses_ranks_and_what_only_its_machine_knew() -> None:
    cluster = planned()
    snapshot, _ = quarantined(cluster)
    assert FAULT.error == "ValueError: odd ? thing"
    assert snapshot.job.next_step == next_step(StockReason.QUARANTINED, "job")
    with pytest.raises(JobQuarantinedError):
        handle(snapshot, cluster.ranks[FIRST].joined(), 0.0, START_S)
    with pytest.raises(JobQuarantinedError):
        snapshot.solved_frontier()
    with pytest.raises(JobQuarantinedError):
        snapshot.timeline(0)


def test_it_is_registered_again_once_and_its_end_is_stored() -> None:
    snapshot, _ = quarantined(planned())
    labelled = RegisteredAgain(Registration("labelled", labels=(("a", "b"),)))
    snapshot, (stored,) = handle(snapshot, labelled, 0.0, START_S)
    assert isinstance(stored, Store)
    assert handle(snapshot, labelled, 0.0, START_S)[1] == []
    assert [*snapshot.job.labels] == [job_pb2.Label(key="a", value="b")]
    snapshot, commands = handle(snapshot, FinishRequested(), 0.0, START_S + 5)
    records = [command.record for command in commands if isinstance(command, Store)]
    assert [record.state for record in records if isinstance(record, JobRecord)] == [JobState.FINISHED]
    assert [record.job for record in records if isinstance(record, EndedRun)] == [snapshot.job]


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
