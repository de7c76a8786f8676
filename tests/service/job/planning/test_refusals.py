"""Lasting refusals: the job ends up with plans that all ranks can follow, by its exact commands."""

import pytest

from perseus.service.domain.commands import Announce, Command, Solve
from perseus.service.domain.inputs import AgentLeft, Solved
from perseus.service.domain.model import (
    STOCK,
    STOCK_MHZ,
    HoldClocks,
    JobState,
    Offer,
    PlannedClocks,
    RefusalReason,
    stage_clocks,
)
from perseus.service.domain.specification import Coordinates
from perseus.service.job import views
from perseus.service.job.rules import Rules
from perseus.solver import solve
from perseus.v1 import event_pb2
from tests.service.job.machine_bench import (
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
from tests.service.service_fakes import CLOCKS_MHZ, Cluster, make_spec

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
    assert events(commands)[:2] == [
        event_pb2.JOB_EVENT_TYPE_PLAN_REFUSED,
        event_pb2.JOB_EVENT_TYPE_STATE_CHANGED,
    ]
    assert messages(commands)[1] == (
        f"planned → solving: {FOURTH} and its stage stay at stock: {reason.value}"
    )
    # Until there is a plan for the remaining stages, everything is at stock.
    assert {(some.version, some.clocks) for some in offers(commands).values()} == {(offer.version + 1, STOCK)}
    assert offers(commands).keys() == {FIRST, SECOND, THIRD, FOURTH}
    (problem,) = problems(commands)
    assert {len(some) for (stage, _, _), some in problem.problem.profiles.items() if stage == 1} == {1}
    cluster.carry_out(commands)
    cluster.expect(JobState.PLANNED)
    cluster.iterate(4)
    cluster.expect_in_force()
    assert planned_mhz(cluster, stage=1) == {STOCK_MHZ}
    assert STOCK_MHZ not in planned_mhz(cluster, stage=0)
    # From now on the stage at stock gets no offers, as nothing changes for it.
    commands = cluster.handle(straggler(1.4))
    assert offers(commands).keys() == {THIRD}
    assert cluster.machine.run.offers[1].stage_versions[1] == offer.version + 1


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


def test_refusals_survive_a_restart_of_the_coordinator_but_not_of_the_agent() -> None:
    cluster = planned()
    cluster.send(cluster.ranks[FOURTH].lose_permission())
    cluster.iterate_until(JobState.PLANNED)
    cluster.restart()
    cluster.join_all()
    cluster.iterate(3)
    assert cluster.machine.run.ranks[FOURTH].is_stock_only
    cluster.expect_in_force()

    cluster.send(AgentLeft("agent-1"))
    for place in (THIRD, FOURTH):
        rank = cluster.ranks[place]
        rank.instance_id, rank.is_permitted = "another", True
        rank.start_trainer(rank.iteration)
        cluster.send(rank.joined())
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(4)
    cluster.expect_in_force()
    assert STOCK_MHZ not in planned_mhz(cluster, stage=1)


def test_answers_to_a_replaced_offer_of_another_epoch_or_for_an_unknown_rank_change_nothing() -> None:
    cluster = planned()
    old = offers(cluster.handle(straggler()))[THIRD]
    new = offers(cluster.handle(straggler(1.4)))[THIRD]
    refusal = RefusalReason.NOT_PERMITTED
    assert cluster.handle(answer(cluster, THIRD, old.version, refusal)) == []
    assert cluster.handle(answer(cluster, THIRD, new.version, refusal, epoch="another")) == []
    unknown = answer(cluster, THIRD, new.version, RefusalReason.UNKNOWN_RANK, -1)
    assert events(cluster.handle(unknown)) == [event_pb2.JOB_EVENT_TYPE_PLAN_REFUSED]
    cluster.expect(JobState.PLANNED)
