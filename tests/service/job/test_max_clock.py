"""A power budget's maximum clock over a job's run: its messages, postponed work, and valid measurements."""

import pytest

from perseus.service.domain.commands import AcceptRank, Command, RefuseRank, SendMaxClock, SendOffer
from perseus.service.domain.inputs import FinishRequested, MaxClockSet
from perseus.service.domain.model import STOCK, FaultyPart, HoldClocks, JobState, MaxClock, StockClocks
from perseus.service.domain.snapshot import Fault
from perseus.service.domain.stall import MAX_CLOCK_STEP
from perseus.service.job.quarantine import handle, quarantine
from tests.service.job.machine_bench import (
    FIRST,
    FOURTH,
    SECOND,
    THIRD,
    actions,
    cluster_in,
    measured_clocks_mhz,
    planned,
)
from tests.service.service_fakes import CLOCKS_MHZ, EPOCH, START_S, Cluster

RANKS = (FIRST, SECOND, THIRD, FOURTH)


def holding() -> tuple[Cluster, HoldClocks]:
    """Return a cluster in which all ranks hold the first clocks to be measured."""
    cluster = cluster_in(JobState.PROFILING)
    while not isinstance(held := cluster.ranks[FIRST].in_force.clocks, HoldClocks):
        cluster.iterate()
    return cluster, held


def max_clocks(commands: list[Command]) -> dict[object, MaxClock | None]:
    return {command.rank: command.max_clock for command in commands if isinstance(command, SendMaxClock)}


def test_all_ranks_get_the_max_clock_before_stock_is_offered_as_urgent() -> None:
    cluster = cluster_in(JobState.BASELINE)
    commands = actions(cluster.handle(MaxClockSet(1000)))

    assert commands[:4] == [SendMaxClock(place, f"agent-{place.pipeline}", MaxClock(1000)) for place in RANKS]
    offers = [command.offer for command in commands[4:] if isinstance(command, SendOffer)]
    assert [(offer.clocks, offer.is_urgent) for offer in offers] == [(StockClocks(1000), True)] * 4


def test_another_end_of_the_lease_is_sent_and_nothing_is_offered() -> None:
    cluster = cluster_in(JobState.BASELINE)
    cluster.send(MaxClockSet(1000))
    commands = cluster.handle(MaxClockSet(1000, outlasts_lease=True))
    assert max_clocks(commands) == dict.fromkeys(RANKS, MaxClock(1000, outlasts_lease=True))
    assert len(commands) == 4


def test_the_baseline_is_only_measured_without_a_max_clock() -> None:
    cluster = cluster_in(JobState.BASELINE)
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


def test_a_round_above_it_waits_and_is_held_once_it_is_lifted() -> None:
    cluster, held = holding()
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
    cluster, held = holding()
    commands = cluster.handle(MaxClockSet(max(held.clocks_mhz)))
    assert set(max_clocks(commands).values()) == {MaxClock(max(held.clocks_mhz))}
    assert not [command for command in commands if isinstance(command, SendOffer)]


def test_plans_stay_as_they_are_and_a_restart_keeps_it() -> None:
    cluster = planned()
    max_clock = MaxClock(CLOCKS_MHZ[-1], outlasts_lease=True)
    commands = actions(cluster.handle(MaxClockSet(CLOCKS_MHZ[-1], outlasts_lease=True)))
    assert commands == [SendMaxClock(place, f"agent-{place.pipeline}", max_clock) for place in RANKS]
    cluster.iterate(30)
    cluster.expect(JobState.PLANNED)
    cluster.restart()
    assert cluster.machine.record.max_clock == max_clock
    accepted, *_ = actions(cluster.handle(cluster.ranks[FIRST].joined()))
    assert accepted == AcceptRank(FIRST, "agent-0", max_clock)


def test_a_finished_job_keeps_it() -> None:
    cluster = planned()
    cluster.send(MaxClockSet(1000))
    cluster.send(FinishRequested())
    cluster.iterate(3)
    assert all(rank.in_force.clocks == StockClocks(1000) for rank in cluster.ranks.values())
    cluster.send(MaxClockSet(None))
    assert all(rank.in_force.clocks == STOCK for rank in cluster.ranks.values())


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
