"""Predictions, drift, transfers and earlier profiles, on an emulated cluster whose plans may be wrong."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from perseus.service.domain.commands import Announce, FindProfile, Solve
from perseus.service.domain.inputs import (
    FinishRequested,
    LagNotFound,
    PolicySet,
    ProfileFound,
    RankLeft,
)
from perseus.service.domain.measured import KnownProfile, StageProfile
from perseus.service.domain.model import JobState, RankLeftReason
from perseus.service.domain.specification import OperatingPolicy
from perseus.service.job import views
from perseus.service.job.planning.drift import BLOCK
from perseus.service.job.planning.plan_watch import MAX_SUSPECTED
from perseus.service.job.profiling.stage_profiles import corrected
from perseus.service.job.rules import Rules
from perseus.service.job.stragglers.registry import StragglerRegistry
from perseus.solver import common_lag_s
from perseus.v1 import event_pb2
from tests.service.job.clusters import (
    FIRST,
    TruthfulCluster,
    cluster_in,
    slower_below_the_highest_clock,
    straggler,
)
from tests.service.service_fakes import CLOCKS_MHZ, Cluster, make_spec


@pytest.mark.usefixtures("stock_beside_plans")
def test_a_plan_that_is_slower_than_promised_is_withdrawn_once_a_suspicion_stays_unconfirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StragglerRegistry, "suspects", (1,))
    cluster = TruthfulCluster(slower_below_the_highest_clock).plan()
    begun = max(rank.in_force_since for rank in cluster.ranks.values())
    while not cluster.announced(event_pb2.PredictionViolated):
        cluster.run(1)
    assert MAX_SUSPECTED <= cluster.ranks[FIRST].iteration - begun < 4 * MAX_SUSPECTED
    correction, *_ = cluster.announced(event_pb2.ProfileCorrected)
    assert correction.stage == 1


@pytest.mark.usefixtures("stock_beside_plans")
def test_a_slow_plan_that_computations_do_not_explain_is_announced_with_all_its_figures() -> None:
    cluster = TruthfulCluster().plan()
    cluster.plan_delay_s = 1.0
    cluster.run_until(JobState.STOCK, limit=4 * BLOCK)
    first, unexplained = cluster.announced(event_pb2.MeasurementsUnexplained)
    assert first.residual_s == pytest.approx(unexplained.residual_s, rel=0.01), "after measuring anew"
    assert unexplained.median_time_s == pytest.approx(unexplained.baseline_time_s + 1.0, rel=0.01)
    known = {field.name for field, _ in unexplained.ListFields()}
    unknown = {field.name for field in unexplained.DESCRIPTOR.fields} - known
    assert unknown <= {"transfer_lag_s"}, "which is 0 if the model has none"


@pytest.mark.parametrize("state", [JobState.PROFILING, JobState.PLANNED])
def test_new_gpus_are_measured_anew(state: JobState) -> None:
    cluster = cluster_in(state)
    everybody = [*cluster.ranks.values()]
    for is_other in (False, True):
        iteration = max(rank.iteration for rank in everybody)
        for rank in everybody:
            cluster.send(RankLeft(rank.place, rank.instance_id, RankLeftReason.TRAINER_GONE))
            rank.start_trainer(iteration)
        for rank in everybody:
            joined = rank.joined()
            cluster.send(replace(joined, gpu=replace(joined.gpu, model="Other")) if is_other else joined)
        cluster.expect(JobState.BASELINE if is_other else state)
        assert (cluster.machine.run.profiler.profiles == ()) is (is_other or state is JobState.PROFILING)
    assert "on GPUs of another model" in cluster.job().state_reason
    cluster.iterate_until(JobState.PLANNED)


@pytest.mark.usefixtures("stock_beside_plans")
def test_a_straggler_explains_slow_iterations() -> None:
    cluster = TruthfulCluster().plan()
    cluster.send(straggler(2.0))
    cluster.plan_delay_s = 1.0
    cluster.run(3 * BLOCK)
    cluster.expect(JobState.PLANNED)


def test_drift_is_followed_without_going_back_to_stock() -> None:
    cluster = TruthfulCluster().plan()
    version, (before_s, _) = cluster.machine.record.version, cluster.planned_times_s()
    cluster.slowness = lambda _stage, _mhz: 0.9
    cluster.run(2 * BLOCK)
    cluster.expect(JobState.PLANNED)
    assert cluster.announced(event_pb2.ProfileCorrected)
    assert cluster.announced(event_pb2.PredictionViolated) == []
    # All clocks are equally faster: they stay, so no rank gets an offer, but the prediction is shorter.
    assert cluster.machine.record.version == version
    assert cluster.planned_times_s() == pytest.approx([0.9 * before_s] * 2, rel=0.01)


# ---------------------------------------------------------------------- profiling


THOROUGH = Rules(lease_s=30.0, baseline_iterations=2, profile_iterations=2, profile_accuracy_percent=1e-7)


def same_work() -> TruthfulCluster:
    """Return a cluster that measures two clocks, to compare profiles with."""
    cluster = TruthfulCluster(rules=THOROUGH)
    cluster.join_all()
    cluster.run_until(JobState.PROFILING)
    return cluster


def test_a_profile_of_identical_work_is_compared_with_the_baseline_and_no_clock_is_profiled() -> None:
    before = TruthfulCluster().plan().machine.run.profiler.profiles
    # Another order: 12 microbatches instead of 8.
    cluster = Cluster(replace(make_spec(microbatches=12), stage_work=("12 layers", "9 layers")))
    cluster.join_all()
    cluster.expect(JobState.BASELINE)
    (asked,) = [command for command in cluster.history if isinstance(command, FindProfile)]
    cluster.send(ProfileFound(known(before, 0, 1)))
    cluster.iterate_until(JobState.PLANNED, limit=6)
    assert [command for command in cluster.history if isinstance(command, FindProfile)] == [asked]
    assert cluster.machine.run.profiler.profiles == before
    reported = [command.event for command in cluster.history if isinstance(command, Announce)]
    assert event_pb2.JOB_EVENT_TYPE_PROFILE_ADOPTED in {each.type for each in reported}
    assert event_pb2.JOB_EVENT_TYPE_CLOCK_PROFILED not in {each.type for each in reported}


def other_work() -> Cluster:
    """Return a cluster that asks for profiles of work with fingerprints, to compare with its baseline."""
    cluster = Cluster(replace(make_spec(), stage_work=("12 layers", "9 layers")))
    cluster.join_all()
    return cluster


@pytest.mark.parametrize("begun", [other_work, same_work])
def test_a_profile_is_adopted_only_for_the_stages_where_it_agrees(begun: Callable[[], Cluster]) -> None:
    before = TruthfulCluster(rules=THOROUGH).plan().machine.run.profiler.profiles
    slower_s = {
        (1, profile.clock_mhz, key): 1.1 * m.time_s
        for profile in before
        if profile.stage == 1
        for key, m in profile.measurements.items()
    }
    cluster = begun()
    cluster.send(ProfileFound(known(corrected(before, slower_s), 0, 1)))
    cluster.iterate_until(JobState.PLANNED)
    (adopted,) = cluster.announced(event_pb2.ProfileAdopted)
    assert adopted.stages == [0]
    stage_1 = [profile for profile in cluster.machine.run.profiler.profiles if profile.stage == 1]
    assert not {
        (1, profile.clock_mhz, key)
        for profile in stage_1
        for key, m in profile.measurements.items()
        if m.time_s == slower_s[1, profile.clock_mhz, key]
    }
    assert stage_1
    if begun is same_work:
        assert stage_1 == [profile for profile in before if profile.stage == 1]


def known(profiles: Iterable[StageProfile], *stages: int) -> tuple[KnownProfile, ...]:
    """Return the profiles that an earlier run has measured of some stages."""
    return tuple(
        KnownProfile(stage, tuple(profile for profile in profiles if profile.stage == stage), "before", 3)
        for stage in stages
    )


@pytest.mark.parametrize(
    "rules",
    [
        Rules(profile_iterations=2, profile_accuracy_percent=1e-7, profile_clocks=3),
        Rules(profile_iterations=2, profile_accuracy_percent=1e-7, profile_budget_j=400.0),
    ],
)
def test_profiling_keeps_its_budget(rules: Rules) -> None:
    cluster = TruthfulCluster(rules=rules.model_copy(update={"baseline_iterations": 2})).plan()
    assert 2 <= cluster.machine.run.profiler.clock_count < len(CLOCKS_MHZ)


def test_without_a_reported_blocking_power_the_job_is_planned_but_its_own_target_stays() -> None:
    cluster = Cluster(make_spec(policy=OperatingPolicy(50.0)))
    for rank in cluster.ranks.values():
        rank.reports_power = False
    cluster.join_all()
    cluster.iterate_until(JobState.PLANNED)
    frontier = views.solved_frontier(cluster.machine.run)
    assert all(power_w > 0 for power_w in frontier.pipeline.blocking_power_w)
    reasons = [event.message for event in cluster.events() if event.HasField("profiling_ended")]
    assert any("no rank has reported its blocking power, so it is assumed" in why for why in reasons)
    cluster.iterate(8)
    assert frontier.t_star_s > frontier.t_min_s
    assert cluster.planned_times_s() == pytest.approx([frontier.t_min_s] * 2)
    cluster.send(straggler(3.0))
    cluster.iterate(8)
    assert cluster.planned_times_s() == pytest.approx([frontier.t_min_s, frontier.t_slow_s])
    stored = {profile.blocking_power_w for profile in cluster.stored().profiles}
    assert stored == {None}
    cluster.send(PolicySet(OperatingPolicy(20.0)))
    (said,) = (event.message for event in cluster.events() if event.HasField("policy_set"))
    assert said.endswith("; it slows nothing while no rank has reported its blocking power")


def test_the_first_clock_is_held_until_a_rank_reports_its_blocking_power() -> None:
    cluster = Cluster(make_spec(), Rules(lease_s=30.0, baseline_iterations=1, profile_iterations=2))
    late = next(iter(cluster.ranks.values()))
    for rank in cluster.ranks.values():
        rank.reports_power = False
    cluster.join_all()
    cluster.iterate_until(JobState.PROFILING)
    cluster.iterate(5)
    assert not cluster.announced(event_pb2.ClockProfiled), "longer than its times and energies need"
    late.reports_power = True
    cluster.iterate(2)
    assert len(cluster.announced(event_pb2.ClockProfiled)) == 1
    cluster.iterate_until(JobState.PLANNED)
    assert "so it is assumed" not in str(cluster.announced(event_pb2.ProfilingEnded))


# ---------------------------------------------------------------------- transfers that take time


LAG_S = 0.006


def violated() -> TruthfulCluster:
    """Return a cluster whose first plan has violated its prediction; the next problem is not solved yet."""
    cluster = TruthfulCluster(lag_s=LAG_S).plan()
    cluster.waiting = []
    cluster.run_until(JobState.SOLVING)
    return cluster


@pytest.mark.usefixtures("stock_beside_plans")
def test_an_unexplained_plan_that_is_obsolete_is_not_announced() -> None:
    cluster = violated()
    cluster.send(FinishRequested())
    assert cluster.handle(LagNotFound(event_pb2.MeasurementsUnexplained())) == []
    cluster.expect(JobState.FINISHED)


@pytest.mark.usefixtures("stock_beside_plans")
def test_only_the_next_frontier_explains_a_slow_plan_and_later_ones_keep_the_lag() -> None:
    cluster = TruthfulCluster(lag_s=LAG_S).plan()
    cluster.run(BLOCK)
    cluster.slowness = lambda _stage, _mhz: 0.9
    cluster.run(2 * BLOCK)
    solves = [command for command in cluster.history if isinstance(command, Solve)]
    assert [solve.slow is not None for solve in solves] == [False, True, False]
    assert common_lag_s(solves[-1].problem) == pytest.approx(LAG_S, rel=0.01)


@pytest.mark.usefixtures("stock_beside_plans")
def test_a_restarted_coordinator_knows_the_lag_and_makes_the_same_plans() -> None:
    cluster = TruthfulCluster(lag_s=LAG_S).plan()
    cluster.run(BLOCK)
    record = cluster.stored().record
    assert record is not None
    assert record.lag_s == pytest.approx(LAG_S, rel=0.01)
    before, versions = views.solved_frontier(cluster.machine.run), cluster.machine.run.offers.plan_versions
    while cluster.machine.run.offers.is_beside_plans:
        cluster.run(1)
    cluster.restart()
    cluster.join_all()
    cluster.run(BLOCK)
    assert views.solved_frontier(cluster.machine.run).pipeline == before.pipeline
    assert views.solved_frontier(cluster.machine.run).points == before.points
    assert cluster.machine.run.offers.plan_versions == versions
