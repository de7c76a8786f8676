"""Offers and lasting refusals by their exact commands: which ranks get new clocks, and when.

After refusals, the job ends up with plans that all ranks can follow.
"""

from dataclasses import replace

import pytest

from perseus.service.domain.commands import Announce, Command, SendOffer, Solve
from perseus.service.domain.inputs import RankJoined, Solved
from perseus.service.domain.model import (
    NO_VERSION,
    STOCK_MHZ,
    HoldClocks,
    JobState,
    Offer,
    PlannedClocks,
    RefusalReason,
    stage_clocks,
)
from perseus.service.domain.records import JobRecord
from perseus.service.domain.specification import Coordinates
from perseus.service.job import views
from perseus.service.job.command_buffer import CommandBuffer
from perseus.service.job.planning.offers import OfferBoard
from perseus.service.job.ranks.rank_table import RankTable
from perseus.service.job.rules import Rules
from perseus.solver import Computation, Kind, Plan, PlannedComputation, solve
from perseus.v1 import event_pb2
from tests.service.job.clusters import (
    FIRST,
    FOURTH,
    SECOND,
    THIRD,
    answer,
    events,
    measured_clocks_mhz,
    offers,
    planned,
    straggler,
)
from tests.service.service_fakes import CLOCKS_MHZ, Cluster, make_gpu, make_spec

ALL = (FIRST, SECOND, THIRD, FOURTH)


def plan(first_mhz: int, second_mhz: int, time_s: float = 1.0) -> PlannedClocks:
    """Return a plan with a forward on each of two stages."""
    stages = tuple(
        (PlannedComputation(Computation(stage, Kind.FORWARD, 0), mhz, 0.0, time_s),)
        for stage, mhz in enumerate((first_mhz, second_mhz))
    )
    return PlannedClocks(Plan(time_s, 100.0, 0.0, stages))


class Bench:
    """A board and its ranks; `reconcile` returns the sent offers and the types of events."""

    def __init__(self, *joined: Coordinates) -> None:
        spec = make_spec()
        self.buffer = CommandBuffer()
        self.ranks = RankTable(spec, 30.0, self.buffer)
        self.record = JobRecord(spec.policy)
        self.board = OfferBoard(self.record, spec.parallelism, self.ranks, self.buffer)
        self.events: list[event_pb2.JobEventType.ValueType] = []
        for place in joined:
            self.join(place)

    def join(self, place: Coordinates, in_force_version: int = NO_VERSION, iteration: int = 7) -> None:
        event = RankJoined(place, "agent", "host", make_gpu(place), iteration, "", 0, 0)
        self.ranks.join(event, in_force_version, 0.0)
        self.board.forget_sent(place)

    def follow(self, *places: Coordinates) -> None:
        """Put the offered clocks in force."""
        for place in places:
            version = self.board.of_rank(place).version
            self.ranks.change(replace(self.ranks[place], in_force_version=version))

    def reconcile(self) -> list[Command]:
        self.board.reconcile()
        self.board.validate()
        commands = self.buffer.take()
        self.events = [command.event.type for command in commands if isinstance(command, Announce)]
        return [command for command in commands if isinstance(command, SendOffer)]


def under(clocks: PlannedClocks) -> Bench:
    """Return a bench in which all ranks have their share of a plan in force, as version 1."""
    bench = Bench(*ALL)
    bench.board.set_desired(range(2), clocks)
    bench.reconcile()
    bench.follow(*ALL)
    bench.reconcile()
    return bench


def test_a_stage_with_the_same_share_of_a_new_plan_gets_no_offer() -> None:
    bench = under(plan(1400, 1000))
    newer = plan(1200, 1000, time_s=1.1)
    bench.board.set_desired([0], newer)
    assert bench.reconcile() == [SendOffer(FIRST, "agent", Offer(2, 9, newer))]
    assert bench.events.count(event_pb2.JOB_EVENT_TYPE_PLAN_OFFERED) == 1
    assert bench.board[0].stage_versions == (2, 1)
    assert bench.board[0].version == 2
    assert bench.board[1].stage_versions == (1, 1)
    bench.follow(FIRST)
    assert bench.reconcile() == []
    assert bench.events == [event_pb2.JOB_EVENT_TYPE_PLAN_IN_FORCE]


def test_the_same_clocks_with_other_times_are_not_offered() -> None:
    bench = under(plan(1400, 1000))
    newer = plan(1400, 1000, time_s=1.1)
    bench.board.set_desired([0, 1], newer)
    assert bench.reconcile() == []
    assert [offer.clocks for offer in bench.board] == [newer, newer]
    assert bench.record.version == 1


def test_a_rank_that_lost_its_unchanged_share_gets_it_back_under_the_stages_version() -> None:
    bench = under(plan(1400, 1000))
    newer = plan(1200, 1000)
    bench.board.set_desired([0], newer)
    bench.reconcile()
    bench.follow(FIRST)
    bench.join(SECOND, iteration=20)
    assert bench.reconcile() == [SendOffer(SECOND, "agent", Offer(1, 22, newer))]


def test_stages_that_change_one_after_the_other_start_together() -> None:
    bench = under(plan(1400, 1000))
    bench.board.set_desired([0], plan(1200, 1000))
    bench.reconcile()
    bench.ranks.note_iteration(THIRD, 12)
    newer = plan(1200, 900)
    bench.board.set_desired([0], newer)
    assert bench.reconcile() == [
        SendOffer(FIRST, "agent", Offer(2, 14, newer)),
        SendOffer(SECOND, "agent", Offer(3, 14, newer)),
    ]


def test_a_late_offer_is_postponed_for_the_ranks_without_it() -> None:
    bench = under(plan(1400, 1000))
    newer = plan(1200, 900)
    bench.board.set_desired([0], newer)
    bench.reconcile()
    bench.board.postpone(SECOND, 7)
    later = Offer(2, 11, newer)
    assert bench.reconcile() == [SendOffer(rank, "agent", later) for rank in (FIRST, SECOND)]
    bench.follow(FIRST)
    bench.board.postpone(SECOND, 7)
    assert bench.reconcile() == [SendOffer(SECOND, "agent", Offer(2, 15, newer))]


def test_a_stage_that_stays_at_stock_gets_an_offer_only_if_other_clocks_are_in_force() -> None:
    bench = Bench(*ALL)
    held = HoldClocks((1400, STOCK_MHZ))
    bench.board.set_desired([0], held)
    assert bench.reconcile() == [SendOffer(FIRST, "agent", Offer(1, 9, held))]
    bench.follow(FIRST)
    bench.join(SECOND, in_force_version=-1)
    assert bench.reconcile() == [SendOffer(SECOND, "agent", Offer(2, 9, held))]


def test_offers_that_are_not_sent_are_not_announced() -> None:
    bench = Bench()
    bench.board.set_desired([0, 1], plan(1400, 1000))
    assert bench.reconcile() == []
    assert bench.events == []
    bench.join(SECOND)
    assert [command.rank for command in bench.reconcile() if isinstance(command, SendOffer)] == [SECOND]
    assert bench.events.count(event_pb2.JOB_EVENT_TYPE_PLAN_OFFERED) == 1


FASTER, SLOWER, OTHER = plan(1400, 1000), plan(900, 1000, 2.0), plan(1100, 1000, 1.5)
Wanted = tuple[PlannedClocks, bool]
"""Clocks, and whether they are urgent."""


@pytest.mark.parametrize(
    ("earlier", "wanted", "offer"),
    [
        pytest.param(
            [], (SLOWER, True), Offer(2, 9, SLOWER, is_urgent=True), id="for the stage that changes"
        ),
        pytest.param(
            [(SLOWER, True)],
            (OTHER, False),
            Offer(3, 9, OTHER, is_urgent=True),
            id="as it replaces an urgent one that is not in force",
        ),
        pytest.param(
            [(SLOWER, False)],
            (SLOWER, True),
            Offer(2, 9, SLOWER, is_urgent=True),
            id="as it became urgent",
        ),
        pytest.param([], (FASTER, True), None, id="but not for the clocks in force"),
    ],
)
def test_an_offer_is_urgent(earlier: list[Wanted], wanted: Wanted, offer: Offer | None) -> None:
    bench = under(FASTER)
    for clocks, is_urgent in earlier:
        bench.board.set_desired([0], clocks, is_urgent=is_urgent)
        bench.reconcile()
    bench.board.set_desired([0], wanted[0], is_urgent=wanted[1])
    assert bench.reconcile() == ([] if offer is None else [SendOffer(FIRST, "agent", offer)])
    assert bench.board.is_urgent is (offer is not None)
    bench.follow(FIRST)
    bench.reconcile()
    assert not bench.board.is_urgent
    following = plan(1200, 1000)
    bench.board.set_desired([0], following)
    (sent,) = bench.reconcile()
    assert isinstance(sent, SendOffer)
    assert (sent.offer.clocks, sent.offer.is_urgent) == (following, False)


# ---------------------------------------------------------------------- refusals that last


LASTING = (RefusalReason.NOT_PERMITTED, RefusalReason.GPU_FAILED, RefusalReason.ORDER_MISMATCH)


def problems(commands: list[Command]) -> list[Solve]:
    return [command for command in commands if isinstance(command, Solve)]


def messages(commands: list[Command]) -> list[str]:
    return [command.event.message for command in commands if isinstance(command, Announce)]


def planned_mhz(cluster: Cluster, stage: int) -> set[int]:
    used_mhz: set[int] = set()
    for offer in cluster.machine.run.offers:
        assert isinstance(offer.clocks, PlannedClocks)
        used_mhz.update(planned.clock_mhz for planned in offer.clocks.plan.stages[stage])
    return used_mhz


def measuring_stock() -> Cluster:
    """Return a cluster that is profiled after its next iteration."""
    cluster = Cluster(make_spec(), Rules(baseline_iterations=1))
    cluster.join_all()
    cluster.iterate(1)
    return cluster


@pytest.mark.parametrize("reason", LASTING)
def test_a_stage_that_can_not_be_clocked_stays_at_stock_and_the_others_are_planned_around_it(
    reason: RefusalReason,
) -> None:
    cluster = planned()
    commands = cluster.handle(straggler())
    offer = offers(commands)[FOURTH]
    iteration = cluster.ranks[FOURTH].iteration
    commands = cluster.handle(answer(cluster, FOURTH, offer.version, reason, iteration))
    assert messages(commands)[1] == (
        f"planned → solving: {FOURTH} and its stage stay at stock: {reason.value}"
    )
    cluster.carry_out(commands)
    cluster.expect(JobState.PLANNED)
    cluster.iterate(4)
    cluster.expect_in_force()
    assert planned_mhz(cluster, stage=1) == {STOCK_MHZ}
    assert STOCK_MHZ not in planned_mhz(cluster, stage=0)
    assert offers(cluster.handle(straggler(1.4))).keys() == {THIRD}, "nothing changes for the stage at stock"


def test_with_tensor_parallelism_a_refusal_by_one_rank_reverts_its_whole_stage() -> None:
    cluster = planned(tensors=2)
    other = Coordinates(1, 1, 1)
    cluster.send(cluster.ranks[other].lose_permission())
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(4)
    cluster.expect_in_force()
    for place, rank in cluster.ranks.items():
        is_at_stock = stage_clocks(rank.in_force.clocks, place.stage) == STOCK_MHZ
        assert is_at_stock == (place.stage == 1)


def test_a_clock_that_is_not_available_is_left_out_of_its_stages_plans() -> None:
    cluster = planned()
    used_mhz = planned_mhz(cluster, stage=0)
    gone_mhz = min(used_mhz)
    cluster.ranks[THIRD].missing_mhz = frozenset({gone_mhz})
    cluster.send(straggler())
    cluster.iterate(6)
    cluster.expect(JobState.PLANNED)
    cluster.expect_in_force()
    assert gone_mhz not in planned_mhz(cluster, stage=0)
    assert STOCK_MHZ not in planned_mhz(cluster, stage=0)
    problem = views.solved_frontier(cluster.machine.run).pipeline
    for (stage, _, _), some in problem.profiles.items():
        assert (gone_mhz in {m.clock_mhz for m in some}) == (stage == 1)


def test_a_refusal_that_names_no_clock_excludes_all_clocks_of_the_offer() -> None:
    cluster = planned()
    offer = offers(cluster.handle(straggler()))[THIRD]
    assert isinstance(offer.clocks, PlannedClocks)
    asked_mhz = {planned.clock_mhz for planned in offer.clocks.plan.stages[0]}
    cluster.handle(answer(cluster, THIRD, offer.version, RefusalReason.CLOCK_NOT_SUPPORTED))
    assert set(cluster.machine.run.ranks[THIRD].refused_clocks_mhz) == asked_mhz


def test_a_refusal_while_profiling_leaves_the_clocks_of_the_other_stages() -> None:
    cluster = measuring_stock()
    cluster.ranks[FOURTH].is_permitted = False
    for rank in cluster.ranks.values():
        rank.begin()
    commands = [command for rank in cluster.ranks.values() for command in cluster.handle(rank.end(0.8))]
    first = offers(commands)
    assert first[FOURTH].clocks == HoldClocks((1400, 1400))
    commands = cluster.handle(cluster.ranks[FOURTH].answer(first[FOURTH]))
    # The ranks of its stage get new offers at once: none may begin clocks that the others can't set.
    assert offers(commands) == {
        place: Offer(first[FOURTH].version + 1, 3, HoldClocks((1400, STOCK_MHZ)))
        for place in (SECOND, FOURTH)
    }


def test_clocks_refused_while_profiling_are_not_measured_for_their_stage() -> None:
    cluster = measuring_stock()
    cluster.ranks[SECOND].missing_mhz = frozenset({1400, 900})
    cluster.iterate_until(JobState.PLANNED)
    assert not {1400, 900} & {*measured_clocks_mhz(cluster, stage=1)}
    assert {1400, 900} <= {*measured_clocks_mhz(cluster, stage=0)}


def test_a_stage_that_was_never_permitted_is_planned_at_stock_and_no_job_of_such_stages() -> None:
    cluster = measuring_stock()
    cluster.ranks[FOURTH].is_permitted = False
    cluster.iterate_until(JobState.PLANNED)
    assert measured_clocks_mhz(cluster, stage=1) == [1400], "stock counts as the highest clock"
    assert planned_mhz(cluster, stage=1) == {STOCK_MHZ}
    cluster.iterate(3)
    (again,) = offers(cluster.handle(cluster.ranks[FIRST].lose_permission())).values()
    commands = cluster.handle(cluster.ranks[FIRST].answer(again))
    assert "every stage has to stay at stock" in messages(commands)[1]


def test_a_frontier_for_clocks_that_are_gone_is_not_used() -> None:
    cluster = planned()
    commands = cluster.handle(cluster.ranks[FIRST].lose_permission())
    commands = cluster.handle(cluster.ranks[FIRST].answer(offers(commands)[FIRST]))
    (before,) = problems(commands)
    cluster.ranks[SECOND].missing_mhz = frozenset({CLOCKS_MHZ[-1]})
    cluster.machine.run.planner.drop_frontier()
    commands = cluster.handle(Solved(solve(before.problem, point_count=4)))
    cluster.expect(JobState.SOLVING)
    assert len(problems(commands)) == 1
    assert event_pb2.JOB_EVENT_TYPE_SOLVED not in events(commands)


def test_refusals_survive_a_restart_of_the_coordinator() -> None:
    cluster = planned()
    cluster.send(cluster.ranks[FOURTH].lose_permission())
    cluster.iterate_until(JobState.PLANNED)
    cluster.restart()
    cluster.join_all()
    cluster.iterate(3)
    assert cluster.machine.run.ranks[FOURTH].is_stock_only
    cluster.expect_in_force()


def test_answers_to_a_replaced_offer_of_another_epoch_or_for_an_unknown_rank_change_nothing() -> None:
    cluster = planned()
    old = offers(cluster.handle(straggler()))[THIRD]
    new = offers(cluster.handle(straggler(1.4)))[THIRD]
    refusal = RefusalReason.NOT_PERMITTED
    assert cluster.handle(answer(cluster, THIRD, old.version, refusal)) == []
    assert cluster.handle(answer(cluster, THIRD, new.version, refusal, epoch="another")) == []
    earlier = answer(cluster, THIRD, new.version, RefusalReason.PAST_START, new.start_iteration - 1)
    assert cluster.handle(earlier) == [], "it refuses an earlier start"
    unknown = answer(cluster, THIRD, new.version, RefusalReason.UNKNOWN_RANK, -1)
    assert events(cluster.handle(unknown)) == [event_pb2.JOB_EVENT_TYPE_PLAN_REFUSED]
    cluster.expect(JobState.PLANNED)
