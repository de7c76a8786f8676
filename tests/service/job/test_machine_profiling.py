"""The job's state machine by its exact commands: from the baseline to the frontier."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from perseus.service.domain.commands import Command, SendOffer, Solve
from perseus.service.domain.inputs import SolveFailed, TelemetryArrived
from perseus.service.domain.model import STOCK, HoldClocks, JobState, Offer
from perseus.service.job.rules import Rules
from perseus.solver import Computation, Kind
from perseus.v1 import event_pb2
from tests.service.job.machine_bench import FIRST, FOURTH, SECOND, THIRD, events, measured_clocks_mhz, offers
from tests.service.service_fakes import (
    CLOCKS_MHZ,
    Cluster,
    FakeRank,
    batch,
    energy_j,
    estimate,
    make_gpu,
    make_spec,
)


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
        assert not offers(cluster.handle(cluster.ranks[place].end(0.8)))
    commands = cluster.handle(cluster.ranks[FOURTH].end(0.8))
    expected = Offer(1, 3, HoldClocks((CLOCKS_MHZ[0],) * 2))
    assert offers(commands) == dict.fromkeys((FIRST, SECOND, THIRD, FOURTH), expected)
    assert events(commands) == [
        event_pb2.JOB_EVENT_TYPE_STATE_CHANGED,
        event_pb2.JOB_EVENT_TYPE_PLAN_OFFERED,
        event_pb2.JOB_EVENT_TYPE_PLAN_OFFERED,
    ]


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


def test_a_clock_is_measured_once_every_rank_has_enough_of_every_computation() -> None:
    cluster = Cluster(make_spec(pipelines=1), Rules(baseline_iterations=1, profile_iterations=3))
    cluster.join_all()
    cluster.iterate(4)
    version = cluster.machine.record.version
    assert {rank.in_force.version for rank in cluster.ranks.values()} == {version}
    machine, first, second = cluster.machine, cluster.ranks[FIRST], cluster.ranks[SECOND]

    def report(rank: FakeRank, count: int, order: Sequence[Computation] | None = None) -> list[Command]:
        rank.sequence += 1
        energy = estimate(order or rank.order, version, count, 1400)
        some = batch(rank.sequence, [], version, 0.8, energy=energy)
        return cluster.handle(TelemetryArrived(rank.place, rank.instance_id, some))

    assert event_pb2.JOB_EVENT_TYPE_CLOCK_PROFILED not in events(report(first, 3))
    assert event_pb2.JOB_EVENT_TYPE_CLOCK_PROFILED not in events(report(second, 2))
    forwards = [computation for computation in second.order if computation.kind is Kind.FORWARD]
    assert event_pb2.JOB_EVENT_TYPE_CLOCK_PROFILED not in events(report(second, 3, forwards))
    assert machine.run.profiler.profiles == ()
    commands = report(second, 3)
    assert events(commands) == [
        event_pb2.JOB_EVENT_TYPE_CLOCK_PROFILED,
        event_pb2.JOB_EVENT_TYPE_PLAN_OFFERED,
    ]
    assert offers(commands)[FIRST].clocks == HoldClocks((900,) * 2)


def test_an_estimate_of_an_older_version_does_not_count() -> None:
    cluster = Cluster(make_spec(pipelines=1), Rules(baseline_iterations=1, profile_iterations=1))
    cluster.join_all()
    cluster.iterate(5)
    held = cluster.machine.run.offers[0]
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
    profile = cluster.machine.run.profiler.profiles[0]
    measured = profile.measurements[0, Kind.FORWARD]
    assert measured.energy_j == pytest.approx(2 * energy_j(0, Kind.FORWARD, profile.clock_mhz))
    assert measured.energy_se_j == pytest.approx(1e-2 * math.sqrt(4) / 2)
    assert profile.blocking_power_w == 120.0


def test_solving_runs_at_stock_with_one_request() -> None:
    cluster = Cluster(make_spec())
    cluster.join_all()
    cluster.iterate_until(JobState.PROFILING)
    solves = []
    while cluster.machine.record.state is JobState.PROFILING:
        for rank in cluster.ranks.values():
            in_force = rank.begin()
            if in_force:
                cluster.send(in_force)
        for rank in cluster.ranks.values():
            commands = cluster.handle(rank.end(0.8))
            solves += [command for command in commands if isinstance(command, Solve)]
            for command in commands:
                if isinstance(command, SendOffer):
                    cluster.handle(cluster.ranks[command.rank].answer(command.offer))
    assert len(solves) == 1
    assert set(solves[0].problem.profiles) == {
        (s, 0, kind) for s in range(2) for kind in (Kind.FORWARD, Kind.BACKWARD)
    }
    assert {offer.clocks for offer in cluster.machine.run.offers} == {STOCK}
    commands = cluster.handle(SolveFailed("no luck"))
    assert events(commands) == [event_pb2.JOB_EVENT_TYPE_SOLVE_FAILED, event_pb2.JOB_EVENT_TYPE_STATE_CHANGED]
    cluster.expect(JobState.STOCK)
