"""An emulated cluster whose computations take the time that clock, slowness and noise make them."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from perseus.service.domain.commands import SendOffer
from perseus.service.domain.inputs import TelemetryArrived
from perseus.service.domain.model import HoldClocks, JobState, PlannedClocks
from perseus.service.domain.specification import Coordinates, JobSpec
from perseus.solver import Computation
from perseus.v1 import event_pb2
from tests.service.job.emulated_cluster import EmulatedCluster
from tests.service.service_fakes import CLOCKS_MHZ, FakeRank, time_s

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
        clocks = rank.in_force.clocks
        planned_mhz = clocks.plan.clocks_mhz if isinstance(clocks, PlannedClocks) else {}

        def clock_mhz(computation: Computation) -> int:
            if computation in planned_mhz:
                return planned_mhz[computation]
            return clocks.clocks_mhz[computation.stage] if isinstance(clocks, HoldClocks) else CLOCKS_MHZ[0]

        times_s = np.array([time_s(c.stage, c.kind, clock_mhz(c)) for c in rank.order])
        noise = self._noise * self._rng.standard_normal(len(times_s))
        return times_s * self.slowdowns[rank.place.pipeline] * (1 + noise)
