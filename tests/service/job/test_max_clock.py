"""A power budget's maximum clock over a job's run: its messages, postponed work, and valid measurements."""

import pytest

from perseus.service.domain.commands import AcceptRank, Command, RefuseRank, SendMaxClock, SendOffer
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.inputs import BaselineRequested, FinishRequested, MaxClockSet
from perseus.service.domain.model import (
    STOCK,
    FaultyPart,
    HoldClocks,
    JobState,
    MaxClock,
    PlannedClocks,
    StockClocks,
)
from perseus.service.domain.snapshot import Fault
from perseus.service.domain.stall import MAX_CLOCK_STEP
from perseus.service.job.iterations.iteration_log import report
from perseus.service.job.quarantine import handle, quarantine
from tests.service.job.machine_bench import (
    FIRST,
    FOURTH,
    SECOND,
    THIRD,
    actions,
    measured_clocks_mhz,
    planned,
)
from tests.service.service_fakes import CLOCKS_MHZ, EPOCH, START_S, Cluster, make_spec

RANKS = (FIRST, SECOND, THIRD, FOURTH)


def joined() -> Cluster:
    cluster = Cluster(make_spec())
    cluster.join_all()
    return cluster


def profiling() -> Cluster:
    """Return a cluster in which all ranks hold the first clocks to be measured."""
    cluster = joined()
    cluster.iterate_until(JobState.PROFILING)
    while not isinstance(cluster.ranks[FIRST].in_force.clocks, HoldClocks):
        cluster.iterate()
    return cluster


def max_clocks(commands: list[Command]) -> dict[object, MaxClock | None]:
    return {command.rank: command.max_clock for command in commands if isinstance(command, SendMaxClock)}


def test_all_ranks_get_the_max_clock_before_stock_is_offered_as_urgent() -> None:
    cluster = joined()
    commands = actions(cluster.handle(MaxClockSet(1000)))

    assert commands[:4] == [SendMaxClock(place, f"agent-{place.pipeline}", MaxClock(1000)) for place in RANKS]
    offers = [command.offer for command in commands[4:] if isinstance(command, SendOffer)]
    assert [(offer.clocks, offer.is_urgent) for offer in offers] == [(StockClocks(1000), True)] * 4


def test_the_same_max_clock_again_changes_nothing() -> None:
    cluster = joined()
    cluster.send(MaxClockSet(1000))
    assert cluster.handle(MaxClockSet(1000)) == []


def test_another_end_of_the_lease_is_sent_and_nothing_is_offered() -> None:
    cluster = joined()
    cluster.send(MaxClockSet(1000))
    commands = cluster.handle(MaxClockSet(1000, outlasts_lease=True))
    assert max_clocks(commands) == dict.fromkeys(RANKS, MaxClock(1000, outlasts_lease=True))
    assert len(commands) == 4


@pytest.mark.parametrize("clock_mhz", [0, -900])
def test_an_invalid_max_clock_is_refused(clock_mhz: int) -> None:
    with pytest.raises(InvalidFieldError, match="max_clock_mhz"):
        joined().handle(MaxClockSet(clock_mhz))


def test_the_baseline_is_only_measured_without_a_max_clock() -> None:
    cluster = joined()
    cluster.send(MaxClockSet(1000))
    cluster.iterate(20, duration_s=1.1)
    cluster.expect(JobState.BASELINE)
    assert "once the maximum clock of 1000 MHz is lifted" in cluster.job().state_reason
    assert cluster.job().next_step == MAX_CLOCK_STEP

    cluster.send(MaxClockSet(None))
    assert cluster.job().state_reason == "the maximum clock no longer delays it"
    assert cluster.job().next_step == ""
    cluster.iterate_until(JobState.PROFILING)
    baseline = cluster.machine.record.baseline
    assert baseline is not None
    assert baseline.time_s == pytest.approx(0.8)


def test_iterations_under_a_max_clock_are_no_baseline_in_the_report() -> None:
    cluster = joined()
    cluster.send(MaxClockSet(1000))
    cluster.iterate(6, duration_s=1.1)
    periods = [period for period, _ in report(cluster.machine.run.log.periods, 0)]
    assert [period.state for period in periods] == [JobState.STOCK]


def test_a_round_above_it_waits_and_is_held_once_it_is_lifted() -> None:
    cluster = profiling()
    held = cluster.ranks[FIRST].in_force.clocks
    assert isinstance(held, HoldClocks)
    highest_mhz = max(held.clocks_mhz)
    measured = measured_clocks_mhz(cluster)

    cluster.send(MaxClockSet(highest_mhz - 1))
    assert all(rank.in_force.clocks == StockClocks(highest_mhz - 1) for rank in cluster.ranks.values())
    cluster.iterate(30)
    cluster.expect(JobState.PROFILING)
    assert measured_clocks_mhz(cluster) == measured

    cluster.send(MaxClockSet(None))
    cluster.iterate(3)
    assert cluster.ranks[FIRST].in_force.clocks == held
    cluster.iterate_until(JobState.PLANNED)


def test_a_round_below_it_continues() -> None:
    cluster = profiling()
    held = cluster.ranks[FIRST].in_force.clocks
    assert isinstance(held, HoldClocks)
    commands = cluster.handle(MaxClockSet(max(held.clocks_mhz)))
    assert set(max_clocks(commands).values()) == {MaxClock(max(held.clocks_mhz))}
    assert not [command for command in commands if isinstance(command, SendOffer)]


def test_profiling_holds_no_clock_above_it() -> None:
    cluster = profiling()
    cluster.send(MaxClockSet(1000))
    for _ in range(40):
        cluster.iterate()
        for rank in cluster.ranks.values():
            clocks = rank.in_force.clocks
            assert not isinstance(clocks, HoldClocks) or max(clocks.clocks_mhz) <= 1000


def test_plans_stay_as_they_are() -> None:
    cluster = planned()
    commands = actions(cluster.handle(MaxClockSet(CLOCKS_MHZ[-1])))
    assert commands == [
        SendMaxClock(place, f"agent-{place.pipeline}", MaxClock(CLOCKS_MHZ[-1])) for place in RANKS
    ]
    cluster.iterate(30)
    cluster.expect(JobState.PLANNED)


def test_a_planned_job_that_measures_its_baseline_again_waits() -> None:
    cluster = planned()
    cluster.send(MaxClockSet(1000))
    cluster.send(BaselineRequested("again"))
    cluster.iterate(20)
    cluster.expect(JobState.BASELINE)
    assert all(rank.in_force.clocks == StockClocks(1000) for rank in cluster.ranks.values())
    cluster.send(MaxClockSet(None))
    cluster.iterate_until(JobState.PLANNED)


def test_a_finished_job_keeps_it() -> None:
    cluster = planned()
    cluster.send(MaxClockSet(1000))
    cluster.send(FinishRequested())
    cluster.iterate(3)
    assert all(rank.in_force.clocks == StockClocks(1000) for rank in cluster.ranks.values())
    cluster.send(MaxClockSet(None))
    assert all(rank.in_force.clocks == STOCK for rank in cluster.ranks.values())


def test_a_rank_that_joins_gets_it() -> None:
    cluster = Cluster(make_spec())
    cluster.send(MaxClockSet(1000))
    accepted, *_ = actions(cluster.handle(cluster.ranks[FIRST].joined()))
    assert accepted == AcceptRank(FIRST, "agent-0", MaxClock(1000))


def test_it_survives_the_coordinator() -> None:
    cluster = planned()
    cluster.send(MaxClockSet(1000, outlasts_lease=True))
    cluster.restart()
    assert cluster.machine.record.max_clock == MaxClock(1000, outlasts_lease=True)
    accepted, *_ = actions(cluster.handle(cluster.ranks[FIRST].joined()))
    assert accepted == AcceptRank(FIRST, "agent-0", MaxClock(1000, outlasts_lease=True))


def test_a_quarantined_job_has_it_too() -> None:
    cluster = planned()
    cluster.send(MaxClockSet(1000))
    fault = Fault(FaultyPart.MACHINE, "a test")
    snapshot, commands = quarantine(cluster.stored(), fault, cluster.rules, EPOCH, START_S)
    refused = [command for command in commands if isinstance(command, RefuseRank)]
    assert [command.max_clock for command in refused] == [MaxClock(1000)] * 4

    assert snapshot.record.max_clock == MaxClock(1000)
    snapshot, commands = handle(snapshot, MaxClockSet(None), 0.0, 0.0)
    assert max_clocks(commands) == dict.fromkeys(RANKS)
    assert snapshot.record.max_clock is None


def test_touched_iterations_are_marked_and_count_for_no_stall_and_no_prediction() -> None:
    cluster = planned()
    before = [
        period.iteration_count + period.irregular_count
        for period, _ in report(cluster.machine.run.log.periods, 0)
    ]
    for rank in cluster.ranks.values():
        rank.begin()
        rank.has_clock_change = True
    for rank in cluster.ranks.values():
        cluster.send(rank.end(10.0))

    latest = cluster.machine.run.log.latest
    assert latest is not None
    assert latest.has_clock_change
    after = [
        period.iteration_count + period.irregular_count
        for period, _ in report(cluster.machine.run.log.periods, 0)
    ]
    assert before == after
    assert isinstance(cluster.ranks[FIRST].in_force.clocks, PlannedClocks)
