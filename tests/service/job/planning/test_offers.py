"""Offers by their exact commands: which ranks get new clocks, under which version, from which iteration."""

from dataclasses import replace

import pytest

from perseus.service.domain.commands import Announce, Command, SendOffer
from perseus.service.domain.inputs import RankJoined
from perseus.service.domain.model import (
    NO_VERSION,
    STOCK,
    STOCK_MHZ,
    HoldClocks,
    Offer,
    PlannedClocks,
    StockClocks,
    stage_clocks,
)
from perseus.service.domain.records import JobRecord
from perseus.service.domain.specification import Coordinates
from perseus.service.job.command_buffer import CommandBuffer
from perseus.service.job.planning.offers import OfferBoard
from perseus.service.job.ranks.rank_table import RankTable
from perseus.solver import Computation, Kind, Plan, PlannedComputation
from perseus.v1 import event_pb2
from tests.service.job.machine_bench import FIRST, FOURTH, SECOND, THIRD
from tests.service.service_fakes import make_gpu, make_spec

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
    bench.follow(FIRST)
    bench.board.postpone(SECOND, 7)
    assert bench.reconcile() == [SendOffer(SECOND, "agent", Offer(2, 11, newer))]


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


def test_shares_of_the_same_clocks_are_equal() -> None:
    assert stage_clocks(plan(1400, 1000), 1) == stage_clocks(plan(900, 1000, time_s=2.0), 1)
    assert stage_clocks(plan(1400, 1000), 1) != stage_clocks(plan(1400, 900), 1)
    assert stage_clocks(plan(1400, 0), 1) == stage_clocks(STOCK, 0) == stage_clocks(HoldClocks((900, 0)), 1)


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


def test_stock_under_a_max_clock_differs_from_stock() -> None:
    bench = under(plan(1400, 1000))
    bench.board.set_desired([0], STOCK)
    bench.reconcile()
    limited = StockClocks(900)
    bench.board.set_desired([0], limited)

    assert bench.reconcile() == [
        SendOffer(FIRST, "agent", Offer(3, 9, limited)),
        SendOffer(SECOND, "agent", Offer(3, 9, limited)),
    ]
