"""The scenarios of the recorded runs: each function is one run on an emulated cluster."""

from contextlib import suppress
from dataclasses import replace

from perseus.service.domain.commands import Solve
from perseus.service.domain.errors import JobQuarantinedError
from perseus.service.domain.inputs import (
    Abandoned,
    AgentDisconnected,
    AgentHeard,
    AgentLeft,
    BaselineRequested,
    BudgetTargetSet,
    EpochRenewed,
    FinishRequested,
    GpuErrorReported,
    Input,
    MaxClockSet,
    PolicySet,
    ProfileFound,
    RankLeft,
    RegisteredAgain,
    ResumeRequested,
    SignalTargetSet,
    SolveFailed,
    SolveRetried,
    StragglerCleared,
    StragglerReported,
    Tick,
)
from perseus.service.domain.measured import KnownProfile
from perseus.service.domain.model import FaultyPart, GpuErrorReason, JobState, RankLeftReason, Straggler
from perseus.service.domain.signals import ExtraTime, SignalKind, SignalRule, SignalTargetState, WorkWindow
from perseus.service.domain.snapshot import Fault, RunSnapshot
from perseus.service.domain.specification import BudgetTerms, Deadline, OperatingPolicy, Registration
from perseus.service.domain.telemetry import GpuLimits
from perseus.service.job import views
from perseus.service.job.quarantine import handle, quarantine
from perseus.service.job.rules import Rules
from tests.service.job.clusters import (
    FIRST,
    TimedCluster,
    TruthfulCluster,
    cluster_in,
    planned,
    slower_below_the_highest_clock,
    straggler,
)
from tests.service.job.recorded.runs import Broken, Step
from tests.service.service_fakes import EPOCH, START_S, Cluster, make_spec

Steps = list[Step]
QUICK = Rules(lease_s=10.0, baseline_iterations=1, profile_iterations=1)


def _planned(cluster: Cluster, more: int = 3) -> Cluster:
    cluster.join_all()
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(more)
    return cluster


def _broken(cluster: Cluster, steps: Steps, part: FaultyPart) -> RunSnapshot:
    """Quarantine the cluster's run, and keep the result as its store would."""
    steps.append(Step(Broken(part.value, "ValueError: odd"), cluster.now_s, START_S + cluster.now_s))
    fault, wall_time_s = Fault(part, "ValueError: odd"), START_S + cluster.now_s
    snapshot, commands = quarantine(cluster.stored(), fault, cluster.rules, EPOCH, wall_time_s)
    cluster.history.extend(commands)
    return snapshot


def _reported(cluster: Cluster, snapshot: RunSnapshot, steps: Steps, event: Input) -> RunSnapshot:
    """Give a quarantined run an input."""
    steps.append(Step(event, cluster.now_s, START_S + cluster.now_s))
    snapshot, commands = handle(snapshot, event, cluster.now_s, START_S + cluster.now_s)
    cluster.history.extend(commands)
    return snapshot


# ---------------------------------------------------------------------- from registration to the end


def from_registration_to_the_end(_steps: Steps) -> None:
    cluster = _planned(Cluster(make_spec()), more=10)
    for rank in cluster.ranks.values():
        cluster.send(RankLeft(rank.place, rank.instance_id, RankLeftReason.FINISHED))


def tensor_parallel_ranks(_steps: Steps) -> None:
    cluster = planned(tensors=2, pipelines=3)
    cluster.send(FinishRequested())


def predictions_that_hold(_steps: Steps) -> None:
    TruthfulCluster(reports_timelines=True).plan().run(30)


def irregular_iterations(_steps: Steps) -> None:
    cluster = planned()
    cluster.iterate(3, 1.7, is_regular=False)
    cluster.iterate(5)


def a_policy_for_every_need(_steps: Steps) -> None:
    cluster = planned(policy=OperatingPolicy(10.0))
    for policy in (
        OperatingPolicy(30.0),
        OperatingPolicy(max_average_power_w=1.0),
        OperatingPolicy(deadline=Deadline(100, 95.0)),
        OperatingPolicy(budget_terms=BudgetTerms(5.0, 2.0)),
    ):
        cluster.send(PolicySet(policy))
        cluster.iterate(4)


def a_budget_of_profiling_that_is_used_up(_steps: Steps) -> None:
    rules = Rules(
        baseline_iterations=2, profile_iterations=2, profile_accuracy_percent=1e-7, profile_budget_s=12.0
    )
    TruthfulCluster(rules=rules).plan()


def slow_clock_changes(_steps: Steps) -> None:
    cluster = Cluster(make_spec(microbatches=6))
    for rank in cluster.ranks.values():
        rank.set_latency_s = 0.03
    _planned(cluster, more=8)


# ---------------------------------------------------------------------- stragglers


def a_straggler_that_is_reported_and_cleared(_steps: Steps) -> None:
    cluster = planned(pipelines=3)
    cluster.send(straggler(1.3))
    cluster.iterate(4)
    cluster.send(StragglerReported(Straggler(1, iteration_time_s=2.0)))
    cluster.iterate(4)
    for pipeline in (1, 0):
        cluster.send(StragglerCleared(pipeline))
        cluster.iterate(3)


def a_straggler_that_is_found(_steps: Steps) -> None:
    cluster = TimedCluster(make_spec(pipelines=4, microbatches=6))
    cluster.run_to_plan()
    cluster.run(30)
    cluster.findings(25, {2: 1.3})
    cluster.findings(25, {2: 1.0})


def two_stragglers_and_a_restart(_steps: Steps) -> None:
    cluster = TimedCluster(make_spec(pipelines=4, microbatches=6), seed=1)
    cluster.run_to_plan()
    cluster.findings(20, {0: 1.2})
    cluster.findings(10, {3: 1.5})
    cluster.restart()
    cluster.join_all()
    cluster.findings(30, {0: 1.0, 3: 1.0})


def a_straggler_while_profiling(_steps: Steps) -> None:
    cluster = cluster_in(JobState.PROFILING)
    cluster.send(straggler(1.5))
    _planned(cluster)


# ---------------------------------------------------------------------- refusals


def clocks_that_a_gpu_refuses(_steps: Steps) -> None:
    cluster = Cluster(make_spec())
    cluster.ranks[FIRST].missing_mhz = frozenset({1200, 1000})
    _planned(cluster, more=6)


def clocks_that_no_rank_may_set(_steps: Steps) -> None:
    cluster = Cluster(make_spec())
    for rank in cluster.ranks.values():
        rank.is_permitted = False
    cluster.join_all()
    cluster.iterate(6)


def a_permission_that_is_lost_and_comes_back(_steps: Steps) -> None:
    cluster = planned()
    rank = cluster.ranks[FIRST]
    cluster.send(rank.lose_permission())
    cluster.iterate(6)
    cluster.send(AgentLeft(rank.instance_id))
    for other in cluster.ranks.values():
        if other.place.pipeline == 0:
            other.instance_id, other.is_permitted = "agent-new", True
            other.start_trainer(other.iteration)
            cluster.send(other.joined())
    cluster.iterate(30)


def gpus_that_fail(_steps: Steps) -> None:
    cluster = planned()
    for number in range(3):
        report = GpuErrorReported(FIRST, "GPU-0-0-0", GpuErrorReason.LOST, f"it fell off the bus: {number}")
        cluster.send(report)
    cluster.iterate(3)


# ---------------------------------------------------------------------- agents that go, kills and restarts


def an_agent_that_is_silent(_steps: Steps) -> None:
    cluster = _planned(Cluster(make_spec(), QUICK))
    cluster.send(AgentDisconnected("agent-0"))
    cluster.now_s += 4.0
    cluster.send(AgentHeard("agent-1"))
    cluster.now_s += 7.0
    cluster.send(Tick())
    cluster.now_s += 11.0
    cluster.send(Tick())
    for rank in cluster.ranks.values():
        rank.start_trainer()
    cluster.join_all()
    cluster.iterate(12)


def a_trainer_that_is_started_again(_steps: Steps) -> None:
    cluster = planned()
    for rank in cluster.ranks.values():
        cluster.send(RankLeft(rank.place, rank.instance_id, RankLeftReason.TRAINER_GONE))
    for rank in cluster.ranks.values():
        rank.start_trainer(5)
        cluster.send(rank.joined())
    cluster.iterate(10)


def a_coordinator_that_is_killed_while_profiling(_steps: Steps) -> None:
    cluster = cluster_in(JobState.BASELINE)
    cluster.iterate(12)
    cluster.restart()
    cluster.join_all()
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(5)


def a_coordinator_that_is_killed_again_and_again(_steps: Steps) -> None:
    cluster = TruthfulCluster(reports_timelines=True)
    cluster.join_all()
    for count in (1, 3, 8, 13, 5, 20):
        cluster.run(count)
        cluster.restart()
        cluster.now_s += 1.0
        cluster.join_all()
    cluster.run(10)


def a_coordinator_that_lost_state(_steps: Steps) -> None:
    cluster = planned()
    cluster.send(EpochRenewed(EPOCH))
    cluster.iterate(3)
    cluster.send(straggler(pipeline=1))
    cluster.iterate(4)


# ---------------------------------------------------------------------- budgets, carbon


def a_power_budget_that_falls_and_ends(_steps: Steps) -> None:
    cluster = planned()
    points = views.solved_frontier(cluster.machine.run).points
    for index, is_urgent in ((len(points) // 2, True), (-1, True), (len(points) // 4, False)):
        cluster.send(BudgetTargetSet(points[index].iteration_time_s, is_urgent))
        cluster.iterate(4)
    cluster.restart()
    cluster.join_all()
    cluster.send(BudgetTargetSet(None, is_urgent=False))
    cluster.iterate(4)


def a_maximum_clock_before_and_after_plans(_steps: Steps) -> None:
    cluster = cluster_in(JobState.BASELINE)
    cluster.send(MaxClockSet(1000))
    cluster.iterate(6, duration_s=1.1)
    cluster.restart()
    cluster.join_all()
    cluster.send(MaxClockSet(1250, outlasts_lease=True))
    cluster.iterate(4)
    cluster.send(MaxClockSet(None))
    cluster.iterate_until(JobState.PLANNED)
    cluster.send(MaxClockSet(1100))
    cluster.iterate(4)
    cluster.send(BaselineRequested("again"))
    cluster.iterate(4)
    cluster.send(MaxClockSet(None))
    cluster.iterate(10)


def load_shifting_by_carbon(_steps: Steps) -> None:
    rule = SignalRule(SignalKind.CARBON, ExtraTime(10, 86_400.0))
    window = WorkWindow(0.0, 86_400.0, 50_000.0)
    cluster = planned(policy=OperatingPolicy(signal=rule))
    points = views.solved_frontier(cluster.machine.run).points
    for share, value in ((0.4, 400.0), (0.1, 120.0)):
        target_time_s = points[int(share * len(points))].iteration_time_s
        cluster.send(SignalTargetSet(rule, window, SignalTargetState.FOLLOWING, target_time_s, value))
        cluster.iterate(4)
    cluster.restart()
    cluster.join_all()
    cluster.send(SignalTargetSet(rule, window, SignalTargetState.NO_SIGNAL, None, None))
    cluster.iterate(4)
    cluster.send(PolicySet(OperatingPolicy()))
    cluster.iterate(4)


# ---------------------------------------------------------------------- drift, the guard, other work


def drift_that_is_followed(_steps: Steps) -> None:
    cluster = TruthfulCluster().plan()
    cluster.slowness = lambda _stage, _mhz: 0.9
    cluster.run(80)


def a_prediction_that_is_violated(_steps: Steps) -> None:
    cluster = TruthfulCluster(slower_below_the_highest_clock).plan()
    cluster.run(40)
    cluster.restart()
    cluster.join_all()
    cluster.run(10)


def a_violation_that_nothing_explains(_steps: Steps) -> None:
    cluster = TruthfulCluster().plan()
    cluster.plan_delay_s = 1.0
    cluster.run_until(JobState.STOCK)
    cluster.plan_delay_s = 0.0
    cluster.send(ResumeRequested())
    cluster.run(40)


def transfers_that_take_time(_steps: Steps) -> None:
    TruthfulCluster(lag_s=0.01).plan().run(30)


def work_that_doubles(_steps: Steps) -> None:
    cluster = TruthfulCluster(reports_timelines=True).plan()
    cluster.run(20)
    cluster.work = lambda stage: 2.0 if stage == 1 else 1.0
    cluster.run(60)


def a_power_limit_that_changes(_steps: Steps) -> None:
    cluster = TruthfulCluster()
    for limit_w in (300.0, 250.0):
        for rank in cluster.ranks.values():
            rank.limits = GpuLimits(limit_w)
        cluster.run_until(JobState.PLANNED) if limit_w < 300 else cluster.plan()
        cluster.run(6)


def a_gpu_that_is_capped(_steps: Steps) -> None:
    cluster = TruthfulCluster(reports_timelines=True).plan()
    cluster.run(6)
    cluster.caps_mhz[FIRST] = 1100
    cluster.run(40)


def a_baseline_that_is_measured_again(_steps: Steps) -> None:
    cluster = TruthfulCluster().plan()
    cluster.send(BaselineRequested("request"))
    cluster.send(BaselineRequested("request"))
    cluster.run(20)


# ---------------------------------------------------------------------- other runs


def an_elastic_restart_with_a_profile_from_before(_steps: Steps) -> None:
    """The job shrinks: its run is abandoned, and the next one has another number of pipelines."""
    first = TruthfulCluster().plan()
    for rank in first.ranks.values():
        first.send(RankLeft(rank.place, rank.instance_id, RankLeftReason.TRAINER_GONE))
    first.send(RegisteredAgain(Registration("again", "fingerprint")))
    first.send(Abandoned("another specification was registered: its parallelism differs"))
    cluster = Cluster(make_spec(pipelines=1, microbatches=8), run_number=2)
    cluster.join_all()
    cluster.iterate_until(JobState.PROFILING)
    profiles = first.machine.run.profiler.profiles
    known = tuple(
        KnownProfile(stage, tuple(profile for profile in profiles if profile.stage == stage), "job", 1)
        for stage in range(2)
    )
    cluster.send(ProfileFound(known))
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(5)


def ranks_of_another_specification(_steps: Steps) -> None:
    cluster = Cluster(make_spec())
    first, second, *_ = cluster.ranks.values()
    cluster.send(replace(first.joined(), spec_fingerprint="fingerprint"))
    cluster.send(RegisteredAgain(Registration("another request", "other", labels=(("team", "vision"),))))
    cluster.send(replace(second.joined(), spec_fingerprint="other"))
    _planned(cluster)


def a_problem_that_is_not_solved(_steps: Steps) -> None:
    cluster = cluster_in(JobState.BASELINE)
    while not any(isinstance(command, Solve) for command in cluster.history):
        for rank in cluster.ranks.values():
            if (in_force := rank.begin()) is not None:
                cluster.carry_out(cluster.handle(in_force))
        cluster.now_s += 0.8
        for rank in cluster.ranks.values():
            commands = cluster.handle(rank.end(0.8))
            cluster.carry_out([command for command in commands if not isinstance(command, Solve)])
    cluster.send(SolveRetried("its process died", 1, 2.0))
    cluster.send(SolveFailed("the problem is too large"))
    cluster.send(ResumeRequested())
    cluster.iterate(12)


# ---------------------------------------------------------------------- quarantine


def a_quarantined_run_that_is_resumed(steps: Steps) -> None:
    cluster = planned()
    run = _broken(cluster, steps, FaultyPart.MACHINE)
    for event in (
        Tick(),
        AgentHeard("agent-0"),
        StragglerCleared(0),
        MaxClockSet(1000),
        MaxClockSet(None),
    ):
        with suppress(JobQuarantinedError):
            _reported(cluster, run, steps, event)
    cluster.restart()
    cluster.send(ResumeRequested())
    for rank in cluster.ranks.values():
        rank.start_trainer(rank.iteration)
    cluster.join_all()
    cluster.iterate(12)


def a_quarantined_run_that_is_finished(steps: Steps) -> None:
    cluster = cluster_in(JobState.BASELINE)
    cluster.iterate(8)
    run = _broken(cluster, steps, FaultyPart.VIEW)
    for event in (
        RegisteredAgain(Registration("third", "fingerprint")),
        EpochRenewed("another"),
        FinishRequested(),
        FinishRequested(),
    ):
        _reported(cluster, run, steps, event)
