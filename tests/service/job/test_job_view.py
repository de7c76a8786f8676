"""The public view of a job: a summary whose cost does not depend on its size, its details, its ranks.

Its record is stored whole and sent to every watcher: nothing in it changes with every iteration.
"""

from collections import Counter
from dataclasses import fields
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.api.paging import PAGE_BYTES
from perseus.service.domain.commands import ReportIteration, Store
from perseus.service.domain.errors import InvalidFieldError, PipelineOutOfRangeError
from perseus.service.domain.inputs import (
    BaselineRequested,
    BudgetTargetSet,
    FinishRequested,
    Input,
    MaxClockSet,
    PolicySet,
    RankLeft,
    SignalTargetSet,
    StragglerCleared,
    StragglerReported,
    TelemetryArrived,
)
from perseus.service.domain.model import (
    JobState,
    RankFilter,
    RankLeftReason,
    RankState,
    RefusalReason,
    Straggler,
)
from perseus.service.domain.records import JobRecord
from perseus.service.domain.signals import (
    ExtraTime,
    SignalKind,
    SignalRule,
    SignalTargetState,
    WorkUntil,
    WorkWindow,
)
from perseus.service.domain.specification import BudgetTerms, Deadline, OperatingPolicy
from perseus.service.domain.stall import StallReason, next_step
from perseus.service.job import views
from perseus.service.job.iterations.iteration_log import report
from perseus.service.job.planning.offers import OfferBoard
from perseus.service.job.ranks.rank_table import RankTable
from perseus.service.job.rules import Rules
from perseus.service.job.run import Run
from perseus.v1 import event_pb2, job_pb2
from tests.service.job.clusters import answer, cluster_in, straggler
from tests.service.service_fakes import EPOCH, Cluster, batch, make_spec


def test_a_new_job_states_what_it_waits_for() -> None:
    job = Cluster(make_spec()).job(is_full=True)
    assert job.state == job_pb2.JOB_STATE_WAITING
    assert job.state_reason.startswith("some ranks have not joined yet; all 4 ranks are missing, since ")
    assert job.next_step == next_step(StallReason.RANK_MISSING, "job")
    counts = job_pb2.Parallelism(pipeline_count=2, stage_count=2, tensor_count=1)
    assert (job.job_id, job.run_number, job.parallelism) == ("job", 1, counts)
    assert job.rank_counts == job_pb2.RankCounts(expected_count=4)
    assert not job.HasField("baseline")
    assert not job.HasField("finish_time")
    assert job.last_event_sequence == 1
    planned_s = job.min_planned_iteration_time_s, job.max_planned_iteration_time_s
    assert (job.t_min_s, job.t_star_s, *planned_s) == (0, 0, 0, 0)


def test_a_baseline_that_is_measured_again_is_not_shown_before_it_is_complete() -> None:
    cluster = cluster_in(JobState.PLANNED, pipelines=3)
    cluster.send(BaselineRequested("request"))
    assert cluster.machine.record.baseline is None
    assert cluster.job().max_planned_iteration_time_s == 0.0
    cluster.iterate_until(JobState.PLANNED)
    assert cluster.machine.record.baseline is not None


def test_the_power_of_lost_ranks_is_unknown_until_they_iterate_again() -> None:
    cluster = cluster_in(JobState.PLANNED, pipelines=3)
    assert cluster.job().figures.power_w == pytest.approx(600.0)
    rank = next(iter(cluster.ranks.values()))
    cluster.send(RankLeft(rank.place, rank.instance_id, RankLeftReason.TRAINER_GONE))
    figures = cluster.job().figures
    assert not figures.HasField("power_w")
    assert figures.HasField("iteration_time_s"), "the latest one stays known"
    assert set(views.rank_columns(cluster.machine.run, 0, 1).power_w) == {None}
    cluster.join_all()
    assert not cluster.job().figures.HasField("power_w")
    cluster.iterate(2)
    assert cluster.job().figures.power_w == pytest.approx(600.0)


def test_only_plans_save() -> None:
    cluster = cluster_in(JobState.PROFILING)
    cluster.iterate(4)
    *_, (_, compared) = report(cluster.machine.run.log.periods, 0)
    assert compared is not None, "the report compares it all the same"
    assert not cluster.job().figures.HasField("saving")
    assert views.saving(cluster.machine.run) is None
    cluster.send(FinishRequested())
    assert not cluster.job().figures.HasField("saving"), "its last period is no plan's"


def test_a_policy_that_no_plan_meets_is_noted_where_it_is_solved_and_set_and_with_the_state() -> None:
    policy = OperatingPolicy(max_average_power_w=1.0)
    cluster = cluster_in(JobState.PLANNED, policy=policy)
    cluster.send(PolicySet(OperatingPolicy()))
    cluster.send(PolicySet(policy))
    for kind in (event_pb2.JOB_EVENT_TYPE_SOLVED, event_pb2.JOB_EVENT_TYPE_POLICY_SET):
        *_, news = [event.message for event in cluster.events() if event.type == kind]
        assert "; no plan meets the policy's 1 W a pipeline: " in news
    assert cluster.job().state_reason.startswith("the frontier is solved; no plan meets the policy's 1 W")
    cluster.send(PolicySet(OperatingPolicy(5.0)))
    assert cluster.job().state_reason == "the frontier is solved"


def test_the_overhead_of_iterations_turns_planned_times_into_measured_ones() -> None:
    cluster = cluster_in(JobState.PLANNED, pipelines=3)
    job = cluster.job()
    planned_s = job.max_planned_iteration_time_s + job.iteration_overhead_s
    assert planned_s == pytest.approx(job.figures.predicted_iteration_time_s)
    stock_s = job.no_slowdown_time.iteration_time_s + job.iteration_overhead_s
    assert stock_s == pytest.approx(job.baseline.iteration_time_s)
    cluster.restart_with(lambda _commands: None)
    cluster.join_all()
    cluster.iterate(3)
    restarted = cluster.job()
    assert restarted.t_min_s == 0, "not solved yet"
    assert restarted.iteration_overhead_s == job.iteration_overhead_s


def test_the_view_outlives_the_coordinator() -> None:
    cluster = cluster_in(JobState.PLANNED, pipelines=3)
    cluster.iterate(3)
    cluster.send(straggler(pipeline=1))
    before, reported = cluster.job(is_full=True), list(report(cluster.machine.run.log.periods, 0))
    assert views.without_details(before) == cluster.job()
    cluster.restart()
    cluster.join_all()
    after = cluster.job(is_full=True)
    assert after.last_event_sequence > before.last_event_sequence
    # The latest iterations are measured anew; no iteration of the baseline is kept.
    assert (before.baseline.has_timeline, after.baseline.has_timeline) == (True, False)
    assert after.figures.predicted_iteration_time_s == before.figures.predicted_iteration_time_s
    for job in (before, after):
        job.ClearField("figures")
        job.ClearField("last_event_sequence")
        job.baseline.ClearField("has_timeline")
    assert after == before
    assert list(report(cluster.machine.run.log.periods, 0)) == reported
    assert {period.state for period, saving in reported if saving is None} == {JobState.BASELINE}


def test_neither_a_summary_nor_a_page_of_ranks_goes_over_the_whole_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = cluster_in(JobState.PLANNED, pipelines=3)

    def refuse(_: object) -> None:
        raise AssertionError("all ranks or pipelines were gone over")

    expected = cluster.job()
    monkeypatch.setattr(RankTable, "__iter__", refuse)
    monkeypatch.setattr(OfferBoard, "__iter__", refuse)
    assert cluster.job() == expected
    assert next(cluster.machine.run.ranks.select(RankFilter(), 4))[0] == 4


def largest(job: job_pb2.Job) -> job_pb2.Job:
    """Return a planned job's summary, as large as it gets with 4,096 ranks.

    The state's reason and the next step come on top.
    """
    job.job_id, job.epoch = "j" * 63, "e" * 32
    job.parallelism.CopyFrom(job_pb2.Parallelism(pipeline_count=64, stage_count=8, tensor_count=8))
    for field in job.rank_counts.DESCRIPTOR.fields:
        setattr(job.rank_counts, field.name, 4096 // len(job.rank_counts.DESCRIPTOR.fields))
    job.straggler_count = 64
    job.finish_time.FromNanoseconds(10**18 // 7)
    job.last_event_sequence = 2**40
    return job


def test_a_summary_takes_a_few_hundred_bytes_for_any_size_of_job() -> None:
    small = cluster_in(JobState.PLANNED, pipelines=3).job().ByteSize()
    large = largest(cluster_in(JobState.PLANNED, pipelines=8).job()).ByteSize()
    assert small < 400
    assert large < 600
    # A page of 1,000 then takes half of a message's default limit.
    assert 1000 * (large + 500) < PAGE_BYTES


@given(
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    st.lists(st.integers(0, 35)),
    st.sets(st.sampled_from([RankState.EXPECTED, RankState.CONNECTED])),
    st.booleans(),
    st.booleans(),
    st.integers(0, 40),
)
def test_ranks_are_selected_by_state_pipeline_and_stage_from_any_place(
    counts: tuple[int, int, int],
    joined: list[int],
    states: set[RankState],
    has_pipeline: bool,
    has_stage: bool,
    first: int,
) -> None:
    cluster = Cluster(make_spec(pipelines=counts[0], stages=counts[1], tensors=counts[2]))
    places = list(cluster.ranks)
    for index in joined:
        cluster.handle(cluster.ranks[places[index % len(places)]].joined())
    ranks = cluster.machine.run.ranks
    for pipeline, stage in product(
        range(counts[0]) if has_pipeline else [None], range(counts[1]) if has_stage else [None]
    ):
        expected = [
            (index, ranks[place])
            for index, place in enumerate(places)
            if index >= first
            and (not states or ranks[place].state in states)
            and pipeline in (None, place.pipeline)
            and stage in (None, place.stage)
        ]
        assert list(ranks.select(RankFilter(frozenset(states), pipeline, stage), first)) == expected


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        (RankFilter(pipeline=2), PipelineOutOfRangeError),
        (RankFilter(pipeline=-1), PipelineOutOfRangeError),
        (RankFilter(stage=2), InvalidFieldError),
        (RankFilter(stage=-1), InvalidFieldError),
    ],
)
def test_a_place_outside_the_job_is_refused(wanted: RankFilter, error: type[Exception]) -> None:
    with pytest.raises(error):
        Run(make_spec(), 1, Rules(), EPOCH, 0.0, 0.0).ranks.select(wanted)


def test_a_baseline_that_every_rank_reports_at_once_is_kept() -> None:
    cluster = cluster_in(JobState.BASELINE, pipelines=1)
    for rank in cluster.ranks.values():
        reported = batch(1, range(4), 0, 0.8, order=rank.order)
        cluster.send(TelemetryArrived(rank.place, rank.instance_id, reported))
    cluster.expect(JobState.PROFILING)
    measured = views.timeline(cluster.machine.run, 0, from_baseline=True)
    assert measured.timeline.iteration in range(4)
    assert not any(any(stage.clock_mhz) for stage in measured.timeline.stages)


# ---------------------------------------------------------------------- the stored record


STEADY = 16
"""Iterations that a state, or the clocks held in it, last at least."""

RULES = Rules(lease_s=3600.0, baseline_iterations=STEADY, profile_iterations=STEADY, profile_clocks=3)
WINDOW = WorkWindow(0.0, 86_400.0, 50_000.0)
POLICIES = {
    "no slowdown": OperatingPolicy(),
    "slowdown": OperatingPolicy(10.0, budget_terms=BudgetTerms(20.0, 2.0)),
    "deadline": OperatingPolicy(deadline=Deadline(10**6, 1e6)),
    "power": OperatingPolicy(max_average_power_w=400.0),
    "carbon": OperatingPolicy(signal=SignalRule(SignalKind.CARBON, ExtraTime(10, 86_400.0))),
    "price": OperatingPolicy(signal=SignalRule(SignalKind.PRICE, work_until=WorkUntil(10**6, 2e9))),
}


@pytest.mark.parametrize("name", POLICIES)
def test_no_field_of_the_record_changes_with_every_iteration(name: str) -> None:
    policy = POLICIES[name]
    cluster = Cluster(make_spec(policy=policy), RULES)
    cluster.join_all()
    for rank in cluster.ranks.values():
        rank.reports_power = False  # the first clock is held until it is known
    cluster.iterate_until(JobState.PROFILING)
    cluster.iterate(STEADY)
    for rank in cluster.ranks.values():
        rank.reports_power = True
    cluster.iterate_until(JobState.PLANNED)
    inputs: list[Input] = [
        BudgetTargetSet(0.9, is_urgent=False),
        StragglerReported(Straggler(1, slowdown_factor=1.2)),
        MaxClockSet(1200),
    ]
    if policy.signal is not None:
        inputs[:0] = [SignalTargetSet(policy.signal, WINDOW, SignalTargetState.FOLLOWING, 0.9, 400.0)]
    for event in inputs:
        cluster.send(event)
        cluster.iterate(STEADY)
        cluster.iterate(STEADY, is_regular=False)
        for _ in range(STEADY):  # every second of twice as many is reported
            for rank in cluster.ranks.values():
                rank.iteration += 1
            cluster.iterate()
    cluster.send(MaxClockSet(None))
    cluster.send(StragglerCleared(1))
    for place, rank in cluster.ranks.items():  # no clocks are left
        version = cluster.machine.run.offers.of_rank(place).version
        cluster.send(answer(cluster, place, version, RefusalReason.NOT_PERMITTED, rank.iteration))
    cluster.expect(JobState.STOCK)
    cluster.iterate(STEADY)
    record, counts, changes = JobRecord(policy), Counter[JobState](), Counter[tuple[JobState, str]]()
    for command in cluster.history:
        if isinstance(command, ReportIteration) and not command.summary.pipeline:
            counts[record.state] += 1
        elif isinstance(command, Store) and isinstance(command.record, JobRecord):
            for field in fields(JobRecord):
                if getattr(record, field.name) != getattr(command.record, field.name):
                    changes[record.state, field.name] += 1
            record = command.record
    seen = {JobState.BASELINE, JobState.PROFILING, JobState.PLANNED, JobState.STOCK}
    assert {state for state, count in counts.items() if count >= STEADY} >= seen
    often = {
        f"{field} in {state.name}: {count} of {counts[state]} iterations"
        for (state, field), count in changes.items()
        if state in seen and 4 * count > counts[state]
    }
    assert not often
