"""Clusters in a state, emulated clusters whose iterations take time, and helpers to compare commands."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from statistics import median, pstdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perseus.service.domain.commands import Announce, Command, Refine, SendOffer, Solve
from perseus.service.domain.inputs import Input, OfferAnswered, StragglerReported, TelemetryArrived, Tick
from perseus.service.domain.model import HoldClocks, JobState, Offer, PlannedClocks, RefusalReason, Straggler
from perseus.service.domain.specification import Coordinates, JobSpec
from perseus.service.domain.telemetry import ComputationColumns, EnergyEstimate, EnergySample
from perseus.service.job.rules import Rules
from perseus.solver import Computation, Kind, Measurement, Pipeline, Refinement, replay, with_lag
from perseus.v1 import event_pb2
from tests.service.service_fakes import CLOCKS_MHZ, EPOCH, Cluster, FakeRank, energy_j, make_spec, time_s

FIRST, SECOND = Coordinates(0, 0, 0), Coordinates(0, 1, 0)
THIRD, FOURTH = Coordinates(1, 0, 0), Coordinates(1, 1, 0)


def actions(commands: list[Command]) -> list[Command]:
    """Return the commands without the events."""
    return [command for command in commands if not isinstance(command, Announce)]


def events(commands: list[Command]) -> list[event_pb2.JobEventType.ValueType]:
    return [command.event.type for command in commands if isinstance(command, Announce)]


def offers(commands: list[Command]) -> dict[Coordinates, Offer]:
    return {command.rank: command.offer for command in commands if isinstance(command, SendOffer)}


def measured_clocks_mhz(cluster: Cluster, stage: int = 0) -> list[int]:
    profiles = cluster.machine.run.profiler.profiles
    return sorted((profile.clock_mhz for profile in profiles if profile.stage == stage), reverse=True)


def cluster_in(state: JobState, rules: Rules | None = None, **spec: Any) -> Cluster:
    """Return a cluster whose ranks have all joined and run until a state."""
    cluster = Cluster(make_spec(**spec), rules)
    cluster.join_all()
    cluster.iterate_until(state)
    return cluster


def planned(**spec: Any) -> Cluster:
    """Return a cluster whose plans are in force everywhere."""
    cluster = cluster_in(JobState.PLANNED, **spec)
    cluster.iterate(3)
    return cluster


def straggler(slowdown_factor: float = 1.2, pipeline: int = 0) -> Input:
    """Return a report that changes the plans of the other pipelines."""
    return StragglerReported(Straggler(pipeline, slowdown_factor=slowdown_factor))


def answer(
    cluster: Cluster,
    rank: Coordinates,
    version: int,
    refusal: RefusalReason | None,
    iteration: int = 30,
    epoch: str = EPOCH,
) -> OfferAnswered:
    return OfferAnswered(rank, cluster.ranks[rank].instance_id, epoch, version, refusal, "", iteration)


class PatientCluster(Cluster):
    """A cluster whose problems, and plans to be made, wait in `waiting`; while that is None, none waits."""

    waiting: list[Solve | Refine] | None = None

    def carry_out(self, commands: Iterable[Command]) -> None:
        rest = list(commands)
        if self.waiting is not None:
            self.waiting += [command for command in rest if isinstance(command, Solve | Refine)]
            rest = [command for command in rest if not isinstance(command, Solve | Refine)]
        super().carry_out(rest)

    def refinements(self) -> list[Refinement]:
        """Return the plans that wait to be made."""
        return [command.refinement for command in self.waiting or () if isinstance(command, Refine)]

    def problems(self) -> list[Solve]:
        return [command for command in self.waiting or () if isinstance(command, Solve)]


class EmulatedCluster(PatientCluster):
    """All ranks run iterations in step; `silent` ones report nothing."""

    has_ticks = False
    """Whether ticks come while time passes, when they are due."""
    silent: Collection[Coordinates] = ()

    def iteration_time_s(self) -> float:
        """Return how long the iteration that has begun takes."""
        return 0.8

    def end(self, rank: FakeRank, duration_s: float) -> TelemetryArrived:
        """End a rank's iteration, and return its report."""
        return rank.end(duration_s)

    def run(self, count: int = 1) -> None:
        for _ in range(count):
            for rank in self.ranks.values():
                if (in_force := rank.begin()) is not None:
                    self.send(in_force)
            duration_s = self.iteration_time_s()
            self.pass_time(duration_s)
            for rank in self.ranks.values():
                reported = self.end(rank, duration_s)
                if rank.place not in self.silent:
                    self.send(reported)

    def run_until(self, state: JobState, limit: int = 200) -> None:
        for _ in range(limit):
            if self.machine.record.state is state:
                return
            self.run()
        raise AssertionError(f"{self.machine.record.state} after {limit} iterations, expected {state}")

    def pass_time(self, time_s: float) -> None:
        """Let time pass, with a tick every second in which one is due, as in a coordinator."""
        end_s = self.now_s + time_s
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + (1.0 if self.has_ticks else time_s))
            deadline_s = self.machine.run.next_deadline_s() if self.has_ticks else None
            if deadline_s is not None and deadline_s <= self.now_s:
                self.send(Tick())


# ---------------------------------------------------------------------- computations take time


def clocks_of(rank: FakeRank, computations: Iterable[Computation]) -> dict[Computation, int]:
    """Return the clocks of the rank's pipeline; stock is the highest one."""
    clocks = rank.in_force.clocks
    match clocks:
        case PlannedClocks():
            own_mhz = clocks.plan.clocks_mhz
            return {c: own_mhz.get(c, CLOCKS_MHZ[0]) for c in computations}
        case HoldClocks():
            return {c: clocks.clocks_mhz[c.stage] for c in computations}
    return dict.fromkeys(computations, CLOCKS_MHZ[0])


OVERHEAD_S = 0.02
Slowness = Callable[[int, int], float]
"""By stage and clock: how much longer computations really take than they were profiled."""


def never(_stage: int, _clock_mhz: int) -> float:
    return 1.0


def slower_below_the_highest_clock(stage: int, clock_mhz: int) -> float:
    """Stage 1 is slower than profiled, as in a plan that violates its prediction."""
    return 1.3 if stage == 1 and clock_mhz < CLOCKS_MHZ[0] else 1.0


class TruthfulCluster(EmulatedCluster):
    """Iterations take as long as their computations and transfers; agents keep estimating under plans.

    `plan_delay_s`: what iterations take longer under plans, for no known reason. `work`: by stage, the factor
    by which the work has grown since the beginning, at every clock. `caps_mhz`:
    by rank, the highest clock that its GPU reaches, whatever is set, for `capping_reasons`.
    """

    def __init__(
        self,
        slowness: Slowness = never,
        rules: Rules | None = None,
        lag_s: float = 0.0,
        *,
        reports_timelines: bool = False,
    ) -> None:
        super().__init__(make_spec(microbatches=8), rules)
        self.slowness = slowness
        self.lag_s = lag_s
        self.plan_delay_s = 0.0
        self.work: Callable[[int], float] = lambda _stage: 1.0
        self.caps_mhz: dict[Coordinates, int] = {}
        self.capping_reasons = 0x4
        self._reports_timelines = reports_timelines
        # By rank: the version of its clocks, and how much work there was in each iteration since.
        self._worked: dict[Coordinates, tuple[int, list[float]]] = {}

    def iteration_time_s(self) -> float:
        computing_s = max(self._computing_time_s(rank) for rank in self.ranks.values())
        is_planned = any(isinstance(rank.in_force.clocks, PlannedClocks) for rank in self.ranks.values())
        return computing_s + OVERHEAD_S + self.plan_delay_s * is_planned

    def end(self, rank: FakeRank, duration_s: float) -> TelemetryArrived:
        clocks = rank.in_force.clocks
        rank.capped_mhz = self.caps_mhz.get(rank.place, 0)
        rank.reasons = self.capping_reasons if rank.capped_mhz else 0
        version, worked = self._worked.get(rank.place, (-1, []))
        if version != rank.in_force.version:
            worked = []
        worked.append(self.work(rank.place.stage))
        self._worked[rank.place] = rank.in_force.version, worked
        event = rank.end(duration_s)
        batch = event.batch
        if isinstance(clocks, PlannedClocks):
            batch = batch._replace(energy=self._estimate(rank, clocks))
        if self._is_above_cap(rank) and batch.energy is not None:
            batch = batch._replace(energy=replace(batch.energy, samples=()))  # windows are discarded
        if batch.energy is not None:
            batch = batch._replace(energy=_scaled(batch.energy, worked))
        if self._reports_timelines:
            batch = batch._replace(computations=self._timeline(rank, batch.computations))
        return replace(event, batch=batch)

    def plan(self) -> "TruthfulCluster":
        """Bring the job to its first plans, in force everywhere."""
        self.join_all()
        self.run_until(JobState.PLANNED)
        while not all(isinstance(rank.in_force.clocks, PlannedClocks) for rank in self.ranks.values()):
            self.run(1)
        return self

    def _is_above_cap(self, rank: FakeRank) -> bool:
        """Tell whether a rank holds a clock that it does not reach."""
        clocks = rank.in_force.clocks
        return isinstance(clocks, HoldClocks) and 0 < rank.capped_mhz < clocks.clocks_mhz[rank.place.stage]

    def _computing_time_s(self, rank: FakeRank) -> float:
        clocks = rank.in_force.clocks

        def time_now_s(stage: int, kind: Kind, mhz: int) -> float:
            cap_mhz = self.caps_mhz.get(replace(rank.place, stage=stage), mhz)
            slowness = self.slowness(stage, mhz) if isinstance(clocks, PlannedClocks) else 1.0
            return time_s(stage, kind, min(mhz, cap_mhz)) * slowness * self.work(stage)

        profiles = {
            (stage, 0, kind): tuple(
                Measurement(mhz, time_now_s(stage, kind, mhz), energy_j(stage, kind, mhz))
                for mhz in CLOCKS_MHZ
            )
            for stage in range(2)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        }
        pipeline = with_lag(Pipeline(self.schedule, profiles, (60.0, 60.0)), self.lag_s)
        return replay(pipeline, clocks_of(rank, self.schedule.computations)).iteration_time_s

    def _timeline(self, rank: FakeRank, rows: ComputationColumns) -> ComputationColumns:
        """Return each computation's time and clock under plans."""
        if not isinstance(rank.in_force.clocks, PlannedClocks):
            return rows
        stage = rank.place.stage
        own = rank.in_force.clocks.plan.stages[stage]
        return rows._replace(
            duration_s=[
                time_s(stage, each.computation.kind, each.clock_mhz) * self.work(stage) for each in own
            ],
            clock_mhz=[each.clock_mhz for each in own],
        )

    def _estimate(self, rank: FakeRank, clocks: PlannedClocks) -> EnergyEstimate:
        iterations = rank.iteration - rank.in_force_since + 1
        own = clocks.plan.stages[rank.place.stage]
        counts = Counter((each.computation.kind, each.clock_mhz) for each in own)
        return EnergyEstimate(
            rank.in_force.version,
            iterations,
            tuple(
                EnergySample(
                    kind,
                    0,
                    mhz,
                    count * iterations,
                    time_s(rank.place.stage, kind, mhz) * self.slowness(rank.place.stage, mhz),
                    1e-5,
                    energy_j(rank.place.stage, kind, mhz),
                    1e-2,
                )
                for (kind, mhz), count in counts.items()
            ),
            60.0,
            0.5,
        )


def _scaled(reported: EnergyEstimate, worked: list[float]) -> EnergyEstimate:
    """Return an estimate for so much work in each iteration; what varies is in its errors."""
    factor, error = median(worked), pstdev(worked) / math.sqrt(len(worked))
    samples = (
        replace(
            some,
            time_s=some.time_s * factor,
            time_se_s=math.hypot(some.time_se_s, some.time_s * error),
            energy_j=some.energy_j * factor,
            energy_se_j=math.hypot(some.energy_se_j, some.energy_j * error),
        )
        for some in reported.samples
    )
    return replace(reported, samples=tuple(samples))


# ---------------------------------------------------------------------- with noise, and stragglers


CHANGES = (event_pb2.JOB_EVENT_TYPE_STRAGGLER_DETECTED, event_pb2.JOB_EVENT_TYPE_STRAGGLER_WITHDRAWN)


class TimedCluster(EmulatedCluster):
    """All pipelines end an iteration together, after the longest of their computations."""

    def __init__(self, spec: JobSpec, *, noise: float = 0.01, seed: int = 0) -> None:
        super().__init__(spec)
        self.slowdowns = [1.0] * spec.parallelism.pipeline_count
        self.clock_event_reasons = [0] * spec.parallelism.pipeline_count
        self._noise = noise
        self._rng = np.random.default_rng(seed)
        self._drawn_s: dict[Coordinates, NDArray[np.float64]] = {}

    def iteration_time_s(self) -> float:
        self._drawn_s = {place: self._draw_s(rank) for place, rank in self.ranks.items()}
        return float(max(drawn_s.sum() for drawn_s in self._drawn_s.values()))

    def end(self, rank: FakeRank, duration_s: float) -> TelemetryArrived:
        event, drawn_s = rank.end(duration_s), self._drawn_s[rank.place]
        reasons = self.clock_event_reasons[rank.place.pipeline]
        iterations = event.batch.iterations._replace(
            duration_s=[float(drawn_s.sum())], clock_event_reasons=[reasons]
        )
        computations = event.batch.computations._replace(duration_s=drawn_s.tolist())
        return replace(event, batch=event.batch._replace(iterations=iterations, computations=computations))

    def findings(
        self, count: int = 1, slowdowns: Mapping[int, float] | None = None
    ) -> list[event_pb2.JobEvent]:
        """Run iterations with some pipelines slower than others; return the findings."""
        for pipeline, slowdown in (slowdowns or {}).items():
            self.slowdowns[pipeline] = slowdown
        before = len(self.events())
        self.run(count)
        return [event for event in self.events()[before:] if event.type in CHANGES]

    def run_to_plan(self) -> None:
        """Run until the job is profiled and planned, and the plan is in force."""
        self.join_all()
        self.run_until(JobState.PLANNED)
        self.run(4)

    def offered_within(self, limit: int) -> set[int]:
        """Run until an offer is made, for some iterations at most; return the pipelines that get it."""
        for _ in range(limit):
            before = len(self.history)
            self.run()
            commands = self.history[before:]
            if offered := {c.rank.pipeline for c in commands if isinstance(c, SendOffer)}:
                return offered
        raise AssertionError(f"no offer within {limit} iterations")

    def _draw_s(self, rank: FakeRank) -> NDArray[np.float64]:
        """Return how long the computations of a rank's iteration take."""
        clocks_mhz = clocks_of(rank, rank.order)
        times_s = np.array([time_s(c.stage, c.kind, clocks_mhz[c]) for c in rank.order])
        noise = self._noise * self._rng.standard_normal(len(times_s))
        return times_s * self.slowdowns[rank.place.pipeline] * (1 + noise)
