"""An emulated cluster whose computations take the time that clock, slowness and noise make them."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from perseus.service.domain.commands import Announce, SendOffer
from perseus.service.domain.inputs import TelemetryArrived
from perseus.service.domain.model import HoldClocks, JobState, PlannedClocks
from perseus.service.domain.specification import JobSpec
from perseus.solver import Computation
from perseus.v1 import event_pb2
from tests.service.service_fakes import CLOCKS_MHZ, Cluster, FakeRank, time_s

CHANGES = (event_pb2.JOB_EVENT_TYPE_STRAGGLER_DETECTED, event_pb2.JOB_EVENT_TYPE_STRAGGLER_WITHDRAWN)


class TimedCluster(Cluster):
    """All pipelines end an iteration together, after the longest of their computations."""

    def __init__(self, spec: JobSpec, *, noise: float = 0.01, seed: int = 0) -> None:
        super().__init__(spec)
        self.slowdowns = [1.0] * spec.parallelism.pipeline_count
        self.clock_event_reasons = [0] * spec.parallelism.pipeline_count
        self._noise = noise
        self._rng = np.random.default_rng(seed)

    def run(self, count: int = 1, slowdowns: Mapping[int, float] | None = None) -> list[event_pb2.JobEvent]:
        """Run iterations with some pipelines slower than others; return the findings."""
        for pipeline, slowdown in (slowdowns or {}).items():
            self.slowdowns[pipeline] = slowdown
        before = len(self.history)
        for _ in range(count):
            for rank in self.ranks.values():
                in_force = rank.begin()
                if in_force is not None:
                    self.send(in_force)
            ended = [self._end(rank) for rank in self.ranks.values()]
            self.now_s += max(float(event.batch.iterations.duration_s[0]) for event in ended)
            for event in ended:
                self.send(event)
        return [
            command.event
            for command in self.history[before:]
            if isinstance(command, Announce) and command.event.type in CHANGES
        ]

    def run_until(self, state: JobState) -> None:
        for _ in range(200):
            if self.machine.record.state is state:
                return
            self.run()
        raise AssertionError(f"expected {state}, found {self.machine.record.state}")

    def run_to_plan(self) -> None:
        """Run until the job is profiled and planned, and the plan is in force."""
        self.join_all()
        self.run_until(JobState.PLANNED)
        self.run(4)

    def run_until_offered(self, limit: int) -> tuple[int, set[int]]:
        """Return the number of iterations until an offer was made, and the pipelines that got it."""
        for count in range(1, limit + 1):
            before = len(self.history)
            self.run()
            offered = {
                command.rank.pipeline for command in self.history[before:] if isinstance(command, SendOffer)
            }
            if offered:
                return count, offered
        raise AssertionError(f"no offer within {limit} iterations")

    def _end(self, rank: FakeRank) -> TelemetryArrived:
        event = rank.end(1.0)
        clocks = rank.in_force.clocks
        planned_mhz = clocks.plan.clocks_mhz if isinstance(clocks, PlannedClocks) else {}

        def clock_mhz(computation: Computation) -> int:
            if computation in planned_mhz:
                return planned_mhz[computation]
            return clocks.clocks_mhz[computation.stage] if isinstance(clocks, HoldClocks) else CLOCKS_MHZ[0]

        used_mhz = [clock_mhz(computation) for computation in rank.order]
        durations_s = np.array(
            [time_s(c.stage, c.kind, mhz) for c, mhz in zip(rank.order, used_mhz, strict=True)]
        )
        durations_s *= self.slowdowns[rank.place.pipeline]
        durations_s *= 1 + self._noise * self._rng.standard_normal(len(durations_s))
        batch = event.batch
        reasons = self.clock_event_reasons[rank.place.pipeline]
        return replace(
            event,
            batch=batch._replace(
                iterations=batch.iterations._replace(
                    duration_s=[float(durations_s.sum())], clock_event_reasons=[reasons]
                ),
                computations=batch.computations._replace(duration_s=durations_s.tolist()),
            ),
        )
