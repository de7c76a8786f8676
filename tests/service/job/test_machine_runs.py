"""A run from its registration to its end: its states, joining, the way out of stock, and quarantine."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from perseus.service.domain.commands import Command, FindProfile, Store
from perseus.service.domain.errors import (
    JobFinishedError,
    JobNotSolvedError,
    JobQuarantinedError,
    RankNotServedError,
    SpecMismatchError,
    TimelineNotReadyError,
)
from perseus.service.domain.inputs import (
    BaselineRequested,
    FinishRequested,
    RankLeft,
    RegisteredAgain,
    ResumeRequested,
    SolveFailed,
    TelemetryArrived,
)
from perseus.service.domain.model import FaultyPart, Gpu, JobState, RankLeftReason
from perseus.service.domain.records import MAX_REQUEST_IDS, EndedRun, JobRecord, ProfiledWork
from perseus.service.domain.snapshot import Fault, RunSnapshot
from perseus.service.domain.specification import OperatingPolicy, Parallelism, Registration
from perseus.service.domain.stall import StockReason, next_step
from perseus.service.job import views
from perseus.service.job.machine import JobMachine
from perseus.service.job.planning import plan_watch
from perseus.service.job.planning.drift import BLOCK
from perseus.service.job.planning.plan_watch import MAX_PREDICTION_VIOLATIONS
from perseus.service.job.profiling.work_keys import WorkKeys
from perseus.service.job.quarantine import handle, quarantine
from perseus.service.job.run import Run
from perseus.service.job.runs import Begin, Continue, Decision, LatestRun, Refuse, Repeat, decide
from perseus.service.job.states import NEEDS_ALL_RANKS, TRANSITIONS, TransitionError, check_transition
from perseus.v1 import event_pb2, job_pb2
from tests.service.job.clusters import (
    FIRST,
    PatientCluster,
    TruthfulCluster,
    cluster_in,
    planned,
    slower_below_the_highest_clock,
)
from tests.service.service_fakes import (
    CLOCKS_MHZ,
    EPOCH,
    REGISTRATION,
    START_S,
    Cluster,
    FakeRank,
    batch,
    make_spec,
)


def joined_as(cluster: Cluster, rank: FakeRank, spec_fingerprint: str) -> None:
    cluster.send(replace(rank.joined(), spec_fingerprint=spec_fingerprint))


def test_ranks_of_another_specification_are_refused_and_nothing_changes() -> None:
    cluster = Cluster(make_spec())
    first, second, *_ = cluster.ranks.values()
    joined_as(cluster, first, REGISTRATION.spec_fingerprint)
    before = cluster.job(is_full=True)
    with pytest.raises(SpecMismatchError) as caught:
        joined_as(cluster, second, "other")
    assert caught.value.metadata["spec_fingerprint"] == "other"
    assert cluster.job(is_full=True) == before
    joined_as(cluster, second, "")  # without a fingerprint it is not checked
    cluster.send(RegisteredAgain(Registration("another request", "other")))
    joined_as(cluster, second, "other")


def test_registrations_survive_a_restart_up_to_the_limit_and_the_latest_ones_labels_count() -> None:
    cluster = Cluster(make_spec())
    for number in range(MAX_REQUEST_IDS):
        labels = (("slurm-job", str(number)),)
        cluster.send(
            RegisteredAgain(Registration(f"request {number}", f"fingerprint {number}", labels=labels))
        )
        assert cluster.machine.registrations.labels == labels
    first, *_ = cluster.ranks.values()
    with pytest.raises(SpecMismatchError):  # the oldest one is forgotten
        joined_as(cluster, first, REGISTRATION.spec_fingerprint)
    before = cluster.machine.registrations
    cluster.restart()
    known = cluster.machine.registrations.registrations
    assert [some.request_id for some in known] == [f"request {n}" for n in range(MAX_REQUEST_IDS)]
    assert cluster.machine.registrations.labels == before.labels
    count = len(cluster.history)
    cluster.send(RegisteredAgain(known[-1]))
    assert len(cluster.history) == count, "a retry stores nothing"


def test_versions_of_a_new_run_follow_those_of_the_run_before() -> None:
    first = cluster_in(JobState.PLANNED)
    second = Cluster(make_spec())
    second.machine = JobMachine(Run(second.spec, 2, second.rules, EPOCH, create_time_s=1.0, created_s=0.0))
    second.history = second.machine.register(REGISTRATION, first.machine.record.version)
    second.restart()  # also for a run without any event yet
    second.join_all()
    second.iterate_until(JobState.PROFILING)
    assert min(second.offered_versions) > max(first.offered_versions)


def test_the_same_request_for_a_baseline_is_carried_out_once() -> None:
    cluster = TruthfulCluster().plan()
    cluster.send(BaselineRequested("request"))
    cluster.run_until(JobState.PLANNED)
    cluster.send(BaselineRequested("request"))
    cluster.expect(JobState.PLANNED)
    cluster.restart()
    cluster.send(BaselineRequested("request"))
    assert len(cluster.announced(event_pb2.BaselineRequested)) == 1
    cluster.send(BaselineRequested("another"))
    cluster.expect(JobState.BASELINE)
    cluster.send(FinishRequested())
    cluster.send(BaselineRequested("another"))  # its answer was lost, and the job has ended since
    cluster.expect(JobState.FINISHED)


@pytest.mark.parametrize("state", [JobState.BASELINE, JobState.PROFILING])
def test_no_baseline_is_requested_before_there_are_plans(state: JobState) -> None:
    with pytest.raises(JobNotSolvedError):
        cluster_in(state).handle(BaselineRequested("too early"))


# ---------------------------------------------------------------------- the way out of stock


def unlucky_cluster() -> PatientCluster:
    """Return a cluster that has profiled, and is at stock as it found no frontier."""
    cluster = PatientCluster(make_spec())
    cluster.waiting = []
    cluster.join_all()
    cluster.iterate_until(JobState.SOLVING)
    cluster.send(SolveFailed("no luck"))
    cluster.expect(JobState.STOCK)
    cluster.waiting = None
    return cluster


def test_no_restart_leads_back_to_stock_and_a_resumed_job_waits_for_its_missing_ranks() -> None:
    cluster = unlucky_cluster()
    cluster.restart()
    cluster.expect(JobState.STOCK)
    cluster.join_all()
    first, *_ = cluster.ranks.values()
    cluster.send(RankLeft(first.place, first.instance_id, RankLeftReason.TRAINER_GONE))
    cluster.send(ResumeRequested())
    cluster.restart()
    cluster.expect(JobState.WAITING)
    first.start_trainer(cluster.machine.run.ranks.highest_iteration())
    cluster.join_all()
    cluster.iterate_until(JobState.PLANNED)


@pytest.mark.usefixtures("stock_beside_plans")
def test_longer_lags_are_found_until_predictions_are_violated_too_often_and_again_once_resumed() -> None:
    cluster = TruthfulCluster(lag_s=0.006).plan()
    cluster.run(BLOCK)
    cluster.lag_s = 0.015  # transfer times rise
    cluster.run(3 * BLOCK)
    cluster.expect(JobState.PLANNED)
    cluster.plan_delay_s = 1.0
    cluster.run_until(JobState.STOCK, limit=400)
    cluster.plan_delay_s = 0.0
    lags_s = [solved.transfer_lag_s for solved in cluster.announced(event_pb2.Solved)]
    assert lags_s == sorted(lags_s)
    violations = cluster.announced(event_pb2.PredictionViolated)
    assert len(violations) == len(lags_s) == MAX_PREDICTION_VIOLATIONS + 1
    assert cluster.announced(event_pb2.StateChanged)[-1].reason == (
        "predictions were violated 3 times; it is tried again after 30 min at stock"
    )
    cluster.send(ResumeRequested())
    cluster.run_until(JobState.PLANNED)
    *_, before, after = cluster.announced(event_pb2.StateChanged)
    assert before.after == job_pb2.JOB_STATE_SOLVING, "it is not planned on the frontier that failed"
    assert after.after == job_pb2.JOB_STATE_PLANNED
    cluster.slowness = slower_below_the_highest_clock
    cluster.run(2 * BLOCK)
    assert len(cluster.announced(event_pb2.PredictionViolated)) > MAX_PREDICTION_VIOLATIONS + 1
    cluster.expect(JobState.PLANNED)


@pytest.mark.usefixtures("stock_beside_plans")
def test_violated_predictions_survive_a_restart_and_kept_ones_cancel_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_watch, "FORGIVING_ITERATIONS", 2 * BLOCK)
    cluster = TruthfulCluster(lag_s=0.006).plan()
    cluster.run(BLOCK)
    assert cluster.machine.record.prediction_violation_count == 1
    cluster.restart()
    cluster.join_all()
    assert cluster.machine.record.prediction_violation_count == 1
    cluster.run(5 * BLOCK)
    assert cluster.machine.record.prediction_violation_count == 0


@pytest.mark.parametrize("state", [JobState.BASELINE, JobState.PROFILING, JobState.PLANNED, None])
def test_a_job_that_is_not_at_stock_is_not_resumed(state: JobState | None) -> None:
    cluster = cluster_in(state or JobState.BASELINE)
    if state is None:
        cluster.send(FinishRequested())
    before = cluster.job(is_full=True)
    assert cluster.handle(ResumeRequested()) == []
    assert cluster.job(is_full=True) == before


# ---------------------------------------------------------------------- profiles for others


def test_profiles_are_kept_for_other_runs_and_requested_by_the_same_keys() -> None:
    cluster = cluster_in(JobState.PROFILING)
    (asked,) = [command for command in cluster.history if isinstance(command, FindProfile)]
    assert profiled(cluster) == []
    cluster.iterate_until(JobState.PLANNED)
    assert profiled(cluster) == [ProfiledWork(stage, key) for stage, key in enumerate(asked.keys)]


def test_a_restart_repeats_the_request_as_long_as_an_answer_is_of_use() -> None:
    cluster = cluster_in(JobState.PROFILING)
    cluster.restart()
    assert isinstance(cluster.history[-1], FindProfile)
    cluster.join_all()
    cluster.iterate_until(JobState.PLANNED)
    cluster.restart()
    assert not isinstance(cluster.history[-1], FindProfile)


def profiled(cluster: Cluster) -> list[ProfiledWork]:
    records = [command.record for command in cluster.history if isinstance(command, Store)]
    return [record for record in records if isinstance(record, ProfiledWork)]


GPU = Gpu("GPU-1", "A40", CLOCKS_MHZ, 300.0)


@pytest.mark.parametrize(
    ("changes", "gpu", "is_same"),
    [
        ({}, GPU, True),
        ({}, replace(GPU, uuid="GPU-2", supported_clocks_mhz=(900,)), True),
        ({}, replace(GPU, model="A100"), False),
        ({}, replace(GPU, power_limit_w=250.0), False),
        ({}, replace(GPU, power_limit_w=0.0), False),
        ({"pipelines": 5}, GPU, True),
        ({"tensors": 2}, GPU, False),
        ({"microbatches": 4}, GPU, False),
        ({"stages": 3}, GPU, False),
    ],
)
def test_work_without_a_fingerprint_is_known_by_its_place_in_the_schedule(
    changes: dict[str, int], gpu: Gpu, is_same: bool
) -> None:
    def keys(gpu: Gpu, **changes: int) -> tuple[str, ...]:
        spec = make_spec(**changes)  # type: ignore[arg-type]
        return WorkKeys(spec, spec.check()).of([{gpu.kind}] * spec.parallelism.stage_count)

    first, second = keys(GPU)
    assert first != second
    assert (keys(gpu, **changes)[0] == first) is is_same


def test_work_with_a_fingerprint_is_known_at_any_place() -> None:
    def keys(*stage_work: str, microbatches: int = 3) -> tuple[str, ...]:
        spec = replace(make_spec(microbatches=microbatches, stages=len(stage_work)), stage_work=stage_work)
        return WorkKeys(spec, spec.check()).of([{GPU.kind}] * len(stage_work))

    first, last = keys("12 layers", "11 layers, head")
    middle = keys("12 layers", "12 layers", "", microbatches=7)
    assert middle[:2] == (first, first)
    assert last not in middle


# ---------------------------------------------------------------------- the table of transitions


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


# ---------------------------------------------------------------------- the run that a registration leads to


BOTH, DIFFERENCES = (False, True), (None, "schedule")


@pytest.mark.parametrize(
    ("has_finished", "is_live", "difference", "known_to", "expected"),
    [
        pytest.param(BOTH, BOTH, DIFFERENCES, (2,), Repeat(2), id="it led to an earlier run, and does again"),
        pytest.param((False,), BOTH, (None,), (None, 3), Continue(), id="the same while the run lasts"),
        pytest.param((False,), (True,), ("schedule",), (None, 3), Refuse("schedule"), id="another"),
        pytest.param(
            (False,), (False,), ("schedule",), (None, 3), Begin(4, abandons="schedule"), id="no rank is left"
        ),
        # Ranks may still be live: the job was ended from outside.
        pytest.param((True,), BOTH, DIFFERENCES, (None,), Begin(4), id="a new one after the end"),
        pytest.param((True,), BOTH, DIFFERENCES, (3,), Repeat(3), id="a known one after the end"),
    ],
)
def test_a_registration_leads_to_the_run_in_the_table(
    has_finished: tuple[bool, ...],
    is_live: tuple[bool, ...],
    difference: tuple[str | None, ...],
    known_to: tuple[int | None, ...],
    expected: Decision,
) -> None:
    """The latest run is the third; `known_to`: the run that knows the request."""
    for ended, live, differs, known in product(has_finished, is_live, difference, known_to):
        assert decide(LatestRun(3, ended, live, differs), known) == expected


@pytest.mark.parametrize(
    ("part", "other"),
    [
        (None, {}),
        ("parallelism", {"parallelism": Parallelism(2, 3, 1)}),
        ("schedule", {"schedule": make_spec(microbatches=4).schedule}),
        ("policy", {"policy": OperatingPolicy(max_slowdown_percent=5.0)}),
        ("stage_work", {"stage_work": ("16 layers", "8 layers")}),
    ],
)
def test_the_part_in_which_another_specification_differs(part: str | None, other: dict[str, Any]) -> None:
    spec = replace(make_spec(), stage_work=("12 layers", "12 layers"))
    assert spec.difference(replace(spec, **other)) == part


def test_the_first_registration_of_a_job_begins_its_first_run() -> None:
    assert decide(None, None) == Begin(1)


# ---------------------------------------------------------------------- the replacement of a failed machine


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
