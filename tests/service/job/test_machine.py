"""The job's state machine by its exact commands, on a clock of the tests' own."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from perseus.service.domain.commands import AcceptRank, Announce, Command, EndStream, SendOffer, Solve
from perseus.service.domain.errors import (
    InvalidFieldError,
    JobFinishedError,
    PipelineOutOfRangeError,
    RankAlreadyServedError,
    RankNotServedError,
    RankOutOfRangeError,
    TelemetryOutdatedError,
)
from perseus.service.domain.evidence import ClockProfiled, PipelineClocks
from perseus.service.domain.inputs import (
    AgentDisconnected,
    AgentHeard,
    AgentLeft,
    EpochRenewed,
    FinishRequested,
    OfferAnswered,
    PlanInForce,
    PolicySet,
    RankJoined,
    RankLeft,
    SolveFailed,
    StragglerCleared,
    StragglerReported,
    TelemetryArrived,
    Tick,
)
from perseus.service.domain.model import (
    LOST_VERSIONS,
    STOCK,
    EventType,
    HoldClocks,
    JobState,
    Offer,
    PlannedClocks,
    RankLeftReason,
    RankState,
    RefusalReason,
    Straggler,
)
from perseus.service.domain.specification import Coordinates, OperatingPolicy
from perseus.service.job.profiling.profiler import ProfilingRules
from perseus.service.job.rules import Rules
from perseus.solver import Computation, Kind
from tests.service.service_fakes import (
    CLOCKS_MHZ,
    EPOCH,
    Cluster,
    FakeRank,
    batch,
    energy_j,
    estimate,
    make_gpu,
    make_spec,
)

FIRST, SECOND = Coordinates(0, 0, 0), Coordinates(0, 1, 0)
THIRD, FOURTH = Coordinates(1, 0, 0), Coordinates(1, 1, 0)


def actions(commands: list[Command]) -> list[Command]:
    """Commands without the events."""
    return [command for command in commands if not isinstance(command, Announce)]


def events(commands: list[Command]) -> list[EventType]:
    return [command.happening.type for command in commands if isinstance(command, Announce)]


def offers(commands: list[Command]) -> dict[Coordinates, Offer]:
    return {command.rank: command.offer for command in commands if isinstance(command, SendOffer)}


def measured_clocks_mhz(cluster: Cluster, stage: int = 0) -> list[int]:
    profiles = cluster.machine.profiler.profiles
    return sorted((profile.clock_mhz for profile in profiles if profile.stage == stage), reverse=True)


def planned(policy: OperatingPolicy | None = None, pipelines: int = 2) -> Cluster:
    cluster = Cluster(make_spec(policy=policy, pipelines=pipelines))
    cluster.join_all()
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(3)
    return cluster


# ---------------------------------------------------------------------- joining and the baseline


def test_a_rank_that_joins_is_accepted_and_offered_nothing() -> None:
    cluster = Cluster(make_spec())
    commands = cluster.tell(cluster.ranks[FIRST].joined())
    assert actions(commands) == [AcceptRank(FIRST, "agent-0")]
    assert events(commands) == [EventType.RANK_CHANGED]
    cluster.expect(JobState.WAITING)


def test_the_last_rank_to_join_begins_the_baseline() -> None:
    cluster = Cluster(make_spec())
    for place in (FIRST, SECOND, THIRD):
        cluster.tell(cluster.ranks[place].joined())
    commands = cluster.tell(cluster.ranks[FOURTH].joined())
    assert actions(commands) == [AcceptRank(FOURTH, "agent-1")]
    assert events(commands) == [EventType.RANK_CHANGED, EventType.STATE_CHANGED]
    cluster.expect(JobState.BASELINE)


def test_a_rank_with_a_plan_of_another_epoch_is_put_back_to_stock() -> None:
    cluster = Cluster(make_spec())
    rank = cluster.ranks[FIRST]
    rank.in_force, rank.iteration = Offer(41, 0, STOCK), 10
    commands = cluster.tell(rank.joined(in_force_epoch="another"))
    assert actions(commands) == [
        AcceptRank(FIRST, "agent-0"),
        SendOffer(FIRST, "agent-0", Offer(1, 12, STOCK)),
    ]
    commands = cluster.tell(cluster.ranks[SECOND].joined())
    assert actions(commands) == [AcceptRank(SECOND, "agent-0")]


def test_a_version_above_all_that_are_known_was_lost_and_is_never_used_again() -> None:
    cluster = Cluster(make_spec())
    rank = cluster.ranks[FIRST]
    rank.in_force, rank.iteration = Offer(41, 0, STOCK), 10
    commands = cluster.tell(rank.joined())
    assert actions(commands) == [
        AcceptRank(FIRST, "agent-0"),
        SendOffer(FIRST, "agent-0", Offer(42, 12, STOCK)),
    ]


def test_a_version_that_can_not_have_been_offered_is_put_back_and_costs_no_versions() -> None:
    cluster = Cluster(make_spec())
    rank = cluster.ranks[FIRST]
    rank.in_force, rank.iteration = Offer(2**53, 0, STOCK), 10
    commands = cluster.tell(rank.joined())
    assert actions(commands)[1:] == [SendOffer(FIRST, "agent-0", Offer(1, 12, STOCK))]


def test_a_new_epoch_leaves_out_the_versions_that_may_be_lost() -> None:
    cluster = Cluster(make_spec())
    cluster.join_all()
    cluster.iterate_until(JobState.PROFILING)
    before = cluster.machine.version
    commands = cluster.tell(EpochRenewed("new"))
    assert actions(commands) == []  # they are offered when they join again
    assert cluster.machine.version == before + LOST_VERSIONS
    cluster.tell(AgentDisconnected("agent-0"))
    (_, *offers) = actions(cluster.tell(cluster.ranks[FIRST].joined()))
    assert [offer.offer.version for offer in offers if isinstance(offer, SendOffer)] != []
    assert cluster.machine.summary().epoch == "new"


def test_the_baseline_drops_the_first_iteration_and_irregular_ones() -> None:
    cluster = Cluster(make_spec(), Rules(baseline_iterations=2))
    cluster.join_all()
    cluster.iterate(1, duration_s=7.0)
    for rank in cluster.ranks.values():
        rank.begin()
        rank.sequence += 1
        odd = batch(rank.sequence, [rank.iteration], 0, 5.0, is_regular=False)
        cluster.send(TelemetryArrived(rank.place, rank.instance_id, odd))
    cluster.iterate(1, duration_s=1.0)
    cluster.expect(JobState.BASELINE)
    cluster.iterate(1, duration_s=2.0)
    cluster.expect(JobState.PROFILING)
    record = cluster.stored().record
    assert record is not None
    assert record.baseline is not None
    assert record.baseline.time_s == 1.5


def test_profiling_begins_with_the_highest_clock_two_iterations_ahead() -> None:
    cluster = Cluster(make_spec(), Rules(baseline_iterations=1))
    cluster.join_all()
    cluster.iterate(1)
    for rank in cluster.ranks.values():
        rank.begin()
    for place in (FIRST, SECOND, THIRD):
        assert not offers(cluster.tell(cluster.ranks[place].end(0.8)))
    commands = cluster.tell(cluster.ranks[FOURTH].end(0.8))
    expected = Offer(1, 3, HoldClocks((CLOCKS_MHZ[0],) * 2))
    assert offers(commands) == dict.fromkeys((FIRST, SECOND, THIRD, FOURTH), expected)
    assert events(commands) == [EventType.STATE_CHANGED, EventType.PLAN_OFFERED, EventType.PLAN_OFFERED]


def test_short_iterations_get_a_margin_that_covers_half_a_second() -> None:
    cluster = Cluster(make_spec(), Rules(baseline_iterations=1))
    cluster.join_all()
    cluster.iterate(2, duration_s=0.05)
    pending = cluster.ranks[FIRST].pending
    assert pending is not None
    assert pending.start_iteration == 1 + 1 + 10


def test_only_clocks_that_all_gpus_have_are_tried() -> None:
    cluster = Cluster(make_spec(), Rules(baseline_iterations=1))
    for place, rank in cluster.ranks.items():
        clocks_mhz = (1500, 1400, 1200) if place == FIRST else CLOCKS_MHZ
        cluster.send(replace(rank.joined(), gpu=make_gpu(place, clocks_mhz)))
    cluster.iterate(30)
    assert measured_clocks_mhz(cluster) == [1400, 1200]
    cluster.expect(JobState.PLANNED)


def test_gpus_without_a_common_clock_stay_at_stock() -> None:
    cluster = Cluster(make_spec(), Rules(baseline_iterations=1))
    for place, rank in cluster.ranks.items():
        cluster.send(replace(rank.joined(), gpu=make_gpu(place, (1410,) if place == FIRST else (1300,))))
    cluster.iterate(3)
    cluster.expect(JobState.STOCK)
    assert cluster.offered_versions == []


# ---------------------------------------------------------------------- profiling


def test_a_clock_is_measured_when_every_rank_has_every_computation_often_enough() -> None:
    cluster = Cluster(
        make_spec(pipelines=1), Rules(baseline_iterations=1, profiling=ProfilingRules(iterations=3))
    )
    cluster.join_all()
    cluster.iterate(4)
    version = cluster.machine._offers.version
    assert {rank.in_force.version for rank in cluster.ranks.values()} == {version}
    machine, first, second = cluster.machine, cluster.ranks[FIRST], cluster.ranks[SECOND]

    def report(rank: FakeRank, count: int, order: Sequence[Computation] | None = None) -> list[Command]:
        rank.sequence += 1
        energy = estimate(order or rank.order, version, count, 1400)
        some = batch(rank.sequence, [], version, 0.8, energy=energy)
        return cluster.tell(TelemetryArrived(rank.place, rank.instance_id, some))

    assert EventType.CLOCK_PROFILED not in events(report(first, 3))
    assert EventType.CLOCK_PROFILED not in events(report(second, 2))
    forwards = [computation for computation in second.order if computation.kind is Kind.FORWARD]
    assert EventType.CLOCK_PROFILED not in events(report(second, 3, forwards))
    assert machine.profiler.profiles == ()
    commands = report(second, 3)
    assert events(commands) == [EventType.CLOCK_PROFILED, EventType.PLAN_OFFERED]
    assert offers(commands)[FIRST].clocks == HoldClocks((900,) * 2)


def test_an_estimate_of_an_older_version_does_not_count() -> None:
    cluster = Cluster(
        make_spec(pipelines=1), Rules(baseline_iterations=1, profiling=ProfilingRules(iterations=1))
    )
    cluster.join_all()
    cluster.iterate(5)
    held = cluster.machine._offers[0]
    assert (held.version, held.clocks) == (2, HoldClocks((900,) * 2))
    for rank in cluster.ranks.values():
        rank.sequence += 1
        stale = batch(rank.sequence, [], 1, 0.8, energy=estimate(rank.order, 1, 9, 900))
        cluster.send(TelemetryArrived(rank.place, rank.instance_id, stale))
    assert measured_clocks_mhz(cluster) == [1400]


def test_the_profile_is_the_slowest_time_and_summed_energy_of_tensor_ranks() -> None:
    cluster = Cluster(make_spec(pipelines=2, tensors=2))
    cluster.join_all()
    cluster.iterate_until(JobState.PLANNED)
    profile = cluster.machine.profiler.profiles[0]
    measured = profile.measurements[0, Kind.FORWARD]
    assert measured.energy_j == pytest.approx(2 * energy_j(0, Kind.FORWARD, profile.clock_mhz))
    assert measured.energy_se_j == pytest.approx(1e-2 * math.sqrt(4) / 2)
    assert profile.blocking_power_w == 120.0


def test_solving_runs_at_stock_and_asks_once() -> None:
    cluster = Cluster(make_spec())
    cluster.join_all()
    cluster.iterate_until(JobState.PROFILING)
    solves = []
    while cluster.machine.state is JobState.PROFILING:
        for rank in cluster.ranks.values():
            in_force = rank.begin()
            if in_force:
                cluster.send(in_force)
        for rank in cluster.ranks.values():
            commands = cluster.tell(rank.end(0.8))
            solves += [command for command in commands if isinstance(command, Solve)]
            for command in commands:
                if isinstance(command, SendOffer):
                    cluster.tell(cluster.ranks[command.rank].answer(command.offer))
    assert len(solves) == 1
    assert set(solves[0].problem.profiles) == {
        (s, 0, kind) for s in range(2) for kind in (Kind.FORWARD, Kind.BACKWARD)
    }
    assert {offer.clocks for offer in cluster.machine._offers} == {STOCK}
    commands = cluster.tell(SolveFailed("no luck"))
    assert events(commands) == [EventType.SOLVE_FAILED, EventType.STATE_CHANGED]
    cluster.expect(JobState.STOCK)


# ---------------------------------------------------------------------- plans


def test_all_pipelines_get_the_plan_of_t_min_under_one_version() -> None:
    cluster = planned()
    frontier = cluster.machine.solved_frontier()
    assert cluster.planned_times_s() == [frontier.t_min_s, frontier.t_min_s]
    assert len({rank.in_force.version for rank in cluster.ranks.values()}) == 1


def test_a_policy_stretches_the_plan() -> None:
    cluster = planned(OperatingPolicy(max_slowdown_percent=10))
    t_min_s = cluster.machine.solved_frontier().t_min_s
    (time_s,) = set(cluster.planned_times_s())
    assert t_min_s < time_s <= 1.1 * t_min_s
    commands = cluster.tell(PolicySet(OperatingPolicy()))
    assert events(commands) == [EventType.POLICY_SET, EventType.PLAN_OFFERED, EventType.PLAN_OFFERED]
    cluster.carry_out(commands)
    cluster.iterate(3)
    assert set(cluster.planned_times_s()) == {t_min_s}
    assert cluster.tell(PolicySet(OperatingPolicy())) == []


def test_a_straggler_moves_the_other_pipelines_only_and_its_end_moves_them_back() -> None:
    cluster = planned(pipelines=3)
    t_min_s = cluster.machine.solved_frontier().t_min_s
    commands = cluster.tell(StragglerReported(Straggler(0, slowdown_factor=1.2)))
    assert {rank.pipeline for rank in offers(commands)} == {1, 2}
    assert len({offer.version for offer in offers(commands).values()}) == 1
    cluster.carry_out(commands)
    cluster.iterate(3)
    own_s, *others_s = cluster.planned_times_s()
    assert own_s == t_min_s
    assert t_min_s < others_s[0] == others_s[1] <= 1.2 * t_min_s
    assert cluster.tell(StragglerReported(Straggler(0, slowdown_factor=1.2))) == []
    cluster.send(StragglerCleared(0))
    cluster.iterate(3)
    assert set(cluster.planned_times_s()) == {t_min_s}
    assert cluster.tell(StragglerCleared(0)) == []


def test_of_several_stragglers_the_slowest_counts_and_a_second_report_replaces_the_first() -> None:
    cluster = planned(pipelines=3)
    t_min_s = cluster.machine.solved_frontier().t_min_s
    cluster.send(StragglerReported(Straggler(0, slowdown_factor=1.1)))
    cluster.send(StragglerReported(Straggler(1, slowdown_factor=1.3)))
    cluster.iterate(3)
    slow_s = cluster.planned_times_s()
    assert slow_s[0] == slow_s[1] == t_min_s
    assert 1.1 * t_min_s < slow_s[2] <= 1.3 * t_min_s
    cluster.send(StragglerReported(Straggler(1, slowdown_factor=1.0)))
    cluster.iterate(3)
    assert cluster.planned_times_s()[2] <= 1.1 * t_min_s


def test_no_pipeline_is_planned_slower_than_t_slow() -> None:
    cluster = planned()
    cluster.send(StragglerReported(Straggler(0, slowdown_factor=50.0)))
    cluster.iterate(3)
    assert cluster.planned_times_s()[1] <= cluster.machine.solved_frontier().t_slow_s


def test_seconds_are_put_on_the_frontiers_scale() -> None:
    cluster = planned()
    frontier = cluster.machine.solved_frontier()
    # The measured stock iteration takes 0.8 s, the all-max prediction less: the rest is overhead.
    overhead_s = 0.8 - frontier.baseline.iteration_time_s
    assert overhead_s > 0
    cluster.send(StragglerReported(Straggler(0, iteration_time_s=0.9)))
    assert cluster.machine.details().straggler_times_s == {0: pytest.approx(0.9 - overhead_s)}
    cluster.send(StragglerReported(Straggler(0, iteration_time_s=0.1)))
    assert cluster.machine.details().straggler_times_s == {0: frontier.t_min_s}


def test_a_straggler_known_before_the_frontier_counts_from_the_first_plan() -> None:
    cluster = Cluster(make_spec())
    cluster.join_all()
    cluster.send(StragglerReported(Straggler(0, slowdown_factor=1.2)))
    assert cluster.machine.details().straggler_times_s == {0: 0.0}
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(3)
    own_s, other_s = cluster.planned_times_s()
    assert own_s < other_s


@pytest.mark.parametrize(
    "straggler",
    [
        Straggler(0),
        Straggler(0, slowdown_factor=0.99),
        Straggler(0, slowdown_factor=math.nan),
        Straggler(0, slowdown_factor=math.inf),
        Straggler(0, iteration_time_s=math.nan),
        Straggler(0, iteration_time_s=0.0),
        Straggler(0, iteration_time_s=-1.0),
    ],
)
def test_an_impossible_straggler_is_refused_and_changes_nothing(straggler: Straggler) -> None:
    cluster = planned()
    with pytest.raises(InvalidFieldError):
        cluster.tell(StragglerReported(straggler))
    assert cluster.machine.details().straggler_times_s == {}


def test_a_pipeline_that_is_not_there_is_refused() -> None:
    cluster = planned()
    for event in (StragglerReported(Straggler(2, slowdown_factor=1.5)), StragglerCleared(-1)):
        with pytest.raises(PipelineOutOfRangeError):
            cluster.tell(event)


# ---------------------------------------------------------------------- refusals


def test_an_offer_that_came_too_late_is_offered_anew_under_the_same_version() -> None:
    cluster = planned()
    commands = cluster.tell(StragglerReported(Straggler(0, slowdown_factor=1.2)))
    late = offers(commands)[THIRD]
    for rank in (cluster.ranks[THIRD], cluster.ranks[FOURTH]):
        rank.iteration = late.start_iteration
    refused = cluster.ranks[THIRD].answer(late)
    assert refused.refusal is RefusalReason.PAST_START
    commands = cluster.tell(refused)
    assert events(commands) == [EventType.PLAN_REFUSED]
    again = Offer(late.version, late.start_iteration + 4, late.clocks)
    assert actions(commands) == [SendOffer(THIRD, "agent-1", again), SendOffer(FOURTH, "agent-1", again)]
    # The other rank's answer to the first offer is older than the new one: nothing more happens.
    assert cluster.tell(cluster.ranks[FOURTH].answer(late)) == []
    cluster.carry_out(commands)
    cluster.iterate(6)
    assert {cluster.ranks[place].in_force.version for place in (THIRD, FOURTH)} == {late.version}


def test_a_refusal_of_stock_is_told_and_not_repeated() -> None:
    cluster = planned()
    stock = offers(cluster.tell(SolveFailed("made up")))[FIRST]
    commands = cluster.tell(
        OfferAnswered(FIRST, "agent-0", EPOCH, stock.version, RefusalReason.NOT_PERMITTED, "", 30)
    )
    assert events(commands) == [EventType.PLAN_REFUSED]
    assert actions(commands) == []


def test_answers_to_older_versions_and_other_epochs_are_ignored() -> None:
    cluster = planned()
    version = cluster.machine._offers.version
    for epoch, number in ((EPOCH, version - 1), ("another", version)):
        answer = OfferAnswered(FIRST, "agent-0", epoch, number, RefusalReason.NOT_PERMITTED, "", 1)
        assert cluster.tell(answer) == []


def test_a_rank_that_gave_an_accepted_offer_back_is_offered_it_again() -> None:
    """Its clocks were to come at an iteration that it never began with them; nobody waits for that."""
    cluster = Cluster(make_spec())
    cluster.join_all()
    cluster.iterate_until(JobState.PROFILING)
    rank = cluster.ranks[FIRST]
    assert rank.pending is not None
    assert rank.in_force.version != rank.pending.version
    rank.pending = None
    commands = cluster.tell(PlanInForce(FIRST, rank.instance_id, "", 0, rank.iteration + 1))
    assert [command.rank for command in commands if isinstance(command, SendOffer)][:1] == [FIRST]
    cluster.carry_out(commands)
    cluster.iterate_until(JobState.PLANNED)


def test_a_rank_that_fell_back_to_stock_is_offered_its_plan_again() -> None:
    cluster = planned()
    rank = cluster.ranks[FIRST]
    fallen = PlanInForce(FIRST, "agent-0", "", 0, rank.iteration)
    commands = cluster.tell(fallen)
    offer = cluster.machine._offers.of_rank(FIRST)
    assert actions(commands) == [SendOffer(FIRST, "agent-0", offer)]
    assert offer.version == rank.in_force.version
    assert offer.start_iteration == rank.iteration + 2


# ---------------------------------------------------------------------- leases and losses


def test_a_rank_that_comes_back_with_its_plan_is_offered_nothing() -> None:
    cluster = planned()
    commands = cluster.tell(AgentDisconnected("agent-0"))
    assert actions(commands) == []
    assert cluster.rank_states() == [RankState.DISCONNECTED] * 2 + [RankState.CONNECTED] * 2
    cluster.expect(JobState.PLANNED)
    for place in (FIRST, SECOND):
        commands = cluster.tell(cluster.ranks[place].joined())
        assert actions(commands) == [AcceptRank(place, "agent-0")]


def test_offers_wait_for_a_disconnected_rank() -> None:
    cluster = planned()
    cluster.tell(AgentDisconnected("agent-1"))
    commands = cluster.tell(StragglerReported(Straggler(0, slowdown_factor=1.2)))
    assert offers(commands) == {}
    commands = cluster.tell(cluster.ranks[THIRD].joined())
    (accepted, sent) = actions(commands)
    assert accepted == AcceptRank(THIRD, "agent-1")
    assert isinstance(sent, SendOffer)
    assert isinstance(sent.offer.clocks, PlannedClocks)


def test_another_instance_is_refused_until_the_lease_has_run_out() -> None:
    cluster = planned()
    cluster.tell(AgentDisconnected("agent-0"))
    other = replace(cluster.ranks[FIRST].joined(), instance_id="other")
    deadline_s = cluster.now_s + cluster.rules.lease_s
    cluster.now_s = deadline_s - 0.001
    cluster.tell(Tick())
    with pytest.raises(RankAlreadyServedError) as caught:
        cluster.tell(other)
    assert caught.value.metadata["instance_id"] == "agent-0"
    cluster.now_s = deadline_s
    cluster.tell(Tick())
    assert AcceptRank(FIRST, "other") in cluster.tell(other)


def test_a_lost_rank_puts_the_others_to_stock_and_its_return_back_to_the_plan() -> None:
    cluster = planned()
    plan = cluster.ranks[FIRST].in_force
    left = RankLeft(FIRST, "agent-0", RankLeftReason.TRAINER_GONE)
    commands = cluster.tell(left)
    cluster.expect(JobState.WAITING)
    assert set(offers(commands)) == {SECOND, THIRD, FOURTH}
    assert {offer.clocks for offer in offers(commands).values()} == {STOCK}
    cluster.carry_out(commands)

    for rank in cluster.ranks.values():
        rank.iteration, rank.in_force, rank.pending = 5, Offer(0, 0, STOCK), None
        cluster.carry_out(cluster.tell(rank.joined()))
    cluster.expect(JobState.PLANNED)
    cluster.iterate(4)
    assert cluster.ranks[FIRST].in_force.clocks == plan.clocks
    assert cluster.ranks[FIRST].in_force.version > plan.version
    assert [period.state for period in cluster.machine.log.periods][-1] is JobState.PLANNED


def test_a_rank_lost_while_profiling_keeps_the_clocks_measured_so_far() -> None:
    cluster = Cluster(make_spec())
    cluster.join_all()
    cluster.iterate(12)
    measured = measured_clocks_mhz(cluster)
    held = cluster.machine._offers[0].clocks
    assert 0 < len(measured) < len(CLOCKS_MHZ)
    cluster.send(RankLeft(FOURTH, "agent-1", RankLeftReason.TRAINER_GONE))
    cluster.expect(JobState.WAITING)
    cluster.iterate(3)
    cluster.ranks[FOURTH].in_force = Offer(0, 0, STOCK)
    commands = cluster.tell(cluster.ranks[FOURTH].joined())
    cluster.expect(JobState.PROFILING)
    assert measured_clocks_mhz(cluster) == measured
    assert offers(commands)[FIRST].clocks == held


def test_a_silent_agent_is_lost_and_its_stream_ended() -> None:
    cluster = planned()
    lease_end_s = cluster.now_s + cluster.rules.lease_s
    cluster.now_s = lease_end_s - 1
    cluster.tell(AgentHeard("agent-1"))
    assert cluster.machine.next_deadline_s() == lease_end_s
    cluster.now_s = lease_end_s
    commands = cluster.tell(Tick())
    assert EndStream("agent-0") in commands
    assert EndStream("agent-1") not in commands
    assert cluster.rank_states() == [RankState.LOST] * 2 + [RankState.CONNECTED] * 2


def test_what_a_replaced_agent_still_says_is_ignored_and_its_telemetry_refused() -> None:
    cluster = planned()
    cluster.send(AgentLeft("agent-0"))
    with pytest.raises(RankNotServedError, match="expected a rank of job 'job' that this agent has joined"):
        cluster.tell(cluster.ranks[FIRST].end(0.8))
    assert cluster.tell(PlanInForce(FIRST, "agent-0", EPOCH, 1, 99)) == []
    assert cluster.tell(RankLeft(FIRST, "agent-0", RankLeftReason.FINISHED)) == []


def test_telemetry_of_an_earlier_trainer_says_nothing_of_the_one_that_came_after() -> None:
    cluster = planned()
    late = cluster.ranks[FIRST].end(0.8)
    late = replace(late, batch=batch(late.batch.sequence, [500], 1, 0.8))
    cluster.tell(RankLeft(FIRST, "agent-0", RankLeftReason.TRAINER_GONE))
    for rank in cluster.ranks.values():
        rank.start_trainer()
        cluster.tell(rank.joined())
    with pytest.raises(TelemetryOutdatedError):
        cluster.tell(late)
    commands = cluster.tell(StragglerReported(Straggler(0, slowdown_factor=1.2)))
    assert {offer.start_iteration for offer in offers(commands).values()} == {1}


# ---------------------------------------------------------------------- the end


def test_the_job_ends_when_all_ranks_are_done() -> None:
    cluster = planned()
    for place, rank in cluster.ranks.items():
        cluster.expect(JobState.PLANNED)
        commands = cluster.tell(RankLeft(place, rank.instance_id, RankLeftReason.FINISHED))
        assert offers(commands) == {}
    cluster.expect(JobState.FINISHED)
    assert events(commands) == [EventType.RANK_CHANGED, EventType.STATE_CHANGED], "nobody is left to tell"


def test_ending_a_job_puts_every_rank_to_stock_and_refuses_what_comes_after() -> None:
    cluster = planned()
    version = cluster.machine._offers.version
    commands = cluster.tell(FinishRequested())
    assert {(offer.version, offer.clocks) for offer in offers(commands).values()} == {(version + 1, STOCK)}
    assert len(offers(commands)) == 4
    assert cluster.tell(FinishRequested()) == []
    refused: list[RankJoined | StragglerReported | PolicySet] = [
        cluster.ranks[FIRST].joined(),
        StragglerReported(Straggler(0, slowdown_factor=2.0)),
        PolicySet(OperatingPolicy(5)),
    ]
    for event in refused:
        with pytest.raises(JobFinishedError):
            cluster.tell(event)


# ---------------------------------------------------------------------- bad telemetry


def test_a_rank_that_is_not_in_the_job_is_refused() -> None:
    cluster = Cluster(make_spec())
    event = replace(cluster.ranks[FIRST].joined(), rank=Coordinates(0, 2, 0))
    with pytest.raises(RankOutOfRangeError):
        cluster.tell(event)


def test_telemetry_at_an_unknown_clock_is_refused_and_not_counted() -> None:
    cluster = planned()
    rank = cluster.ranks[FIRST]
    before = cluster.machine.view()
    odd = batch(99, [rank.iteration + 1], 1, 0.8, order=rank.order, clock_mhz=1234)
    with pytest.raises(InvalidFieldError, match="1234"):
        cluster.tell(TelemetryArrived(FIRST, "agent-0", odd))
    assert cluster.machine.view() == before


def test_energy_of_an_unknown_chunk_is_refused() -> None:
    cluster = planned()
    sample = estimate(cluster.ranks[FIRST].order, 1, 3, 1400)
    odd = replace(sample, samples=(replace(sample.samples[0], chunk=7),))
    with pytest.raises(InvalidFieldError, match="chunk 7"):
        cluster.tell(TelemetryArrived(FIRST, "agent-0", batch(99, [], 1, 0.8, energy=odd)))


# ---------------------------------------------------------------------- restarts


def test_a_restarted_coordinator_goes_on_with_the_same_versions_and_offers_nothing() -> None:
    cluster = planned()
    cluster.send(StragglerReported(Straggler(0, slowdown_factor=1.2)))
    cluster.iterate(3)
    before, sent = cluster.machine, list(cluster.offered_versions)
    cluster.restart()
    assert cluster.machine is not before
    cluster.expect(JobState.PLANNED)
    cluster.join_all()
    cluster.iterate(3)
    assert cluster.offered_versions == sent
    cluster.send(StragglerCleared(0))
    assert cluster.offered_versions[-1] > max(sent)


def test_a_coordinator_restarted_while_profiling_keeps_what_was_measured() -> None:
    cluster = Cluster(make_spec())
    cluster.join_all()
    cluster.iterate(12)
    measured = measured_clocks_mhz(cluster)
    assert measured
    cluster.restart()
    cluster.join_all()
    assert measured_clocks_mhz(cluster) == measured
    cluster.iterate_until(JobState.PLANNED)
    profiled = [
        command.happening.evidence.clocks_mhz
        for command in cluster.history
        if isinstance(command, Announce) and isinstance(command.happening.evidence, ClockProfiled)
    ]
    assert len(profiled) == len(set(profiled)) == len(measured_clocks_mhz(cluster))


def told_in_force(cluster: Cluster) -> list[int]:
    """The versions of which was said that they are in force on a pipeline."""
    return [
        command.happening.evidence.version
        for command in cluster.history
        if isinstance(command, Announce)
        and command.happening.type is EventType.PLAN_IN_FORCE
        and isinstance(command.happening.evidence, PipelineClocks)
    ]


def test_clocks_offered_before_a_restart_and_in_force_after_it_are_told_of_once() -> None:
    cluster = Cluster(make_spec())
    cluster.join_all()
    cluster.iterate_until(JobState.PLANNED)
    version = max(cluster.offered_versions)
    assert version not in told_in_force(cluster)
    cluster.restart()
    cluster.join_all()
    cluster.iterate(4)
    cluster.restart()
    cluster.join_all()
    cluster.iterate(2)
    cluster.expect_in_force()
    assert told_in_force(cluster).count(version) == cluster.spec.parallelism.pipeline_count


def test_events_are_numbered_without_gaps_across_restarts() -> None:
    cluster = planned()
    cluster.restart()
    cluster.join_all()
    sequences = [command.happening.sequence for command in cluster.history if isinstance(command, Announce)]
    assert sequences == list(range(1, len(sequences) + 1))
