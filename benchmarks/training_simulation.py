"""One pipeline trains on emulated GPUs under the agent's real sessions, in simulated time.

Nothing sleeps: each stage's trainer, GPU (`perseus.emulation.dynamics`), session and clock worker advance
from event to event. The simulation adds a real machine's imperfections: durations vary, marks arrive a little
late, threads wake up a little late, and the latency of sets varies. Every draw comes from one seed.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from perseus.agent.clocks.sets import ClockSet, ResetClock, ScheduleClock, SetClock
from perseus.agent.link.computation import Computation, Kind, Rank
from perseus.agent.link.packets import ComputationMark, Edge, IterationMark
from perseus.agent.rank.commands import Send
from perseus.agent.rank.events import Connected, Event, Tick
from perseus.agent.rank.messages import (
    ClockStatistics,
    GpuDescription,
    PlanId,
    PlanOffer,
    RankAccepted,
    StageClocks,
    Telemetry,
)
from perseus.agent.rank.session import Session
from perseus.emulation.dynamics import GpuState
from perseus.emulation.physics import GpuModel, Work

_LEASE_S = 1e9

_DesiredClock = tuple[int | None, float]
"""A clock (None for stock), and the time of its request."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Imperfections of a machine: means and standard deviations."""

    duration_noise: float = 0.01
    mark_delay_s: float = 0.0002
    wake_up_delay_s: float = 0.0002
    latency_noise: float = 0.05
    synchronisation_s: float = 0.015


@dataclass(frozen=True, slots=True)
class Job:
    """One pipeline: each stage's order and the work of its computations, by kind."""

    model: GpuModel
    orders: Sequence[Sequence[Computation]]
    works: Sequence[dict[Kind, Work]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The simulated iterations, and the final clock statistics of each stage."""

    iteration_times_s: tuple[float, ...]
    energies_j: tuple[float, ...]
    statistics: tuple[ClockStatistics, ...]


def train(
    job: Job,
    clocks_mhz: Sequence[Sequence[int]],
    *,
    latency_s: float | None,
    iteration_count: int,
    seed: int,
    machine: Machine = Machine(),
    slowdowns: Sequence[float] = (),
) -> Outcome:
    """Train for some iterations; the plan (each stage's clocks, in order) is in force from the first.

    Without latency, no session sets clocks: each clock is in force when its computation begins. `slowdowns`:
    of all GPUs, by iteration, if they are below full speed.
    """
    return _Simulation(job, clocks_mhz, latency_s, iteration_count, seed, machine, slowdowns).run()


@dataclass(slots=True)
class _Worker:
    """Like `perseus.agent.sidecar.clock_worker.ClockWorker`: one set at a time, the latest request."""

    wanted: _DesiredClock | None = None
    scheduled: _DesiredClock | None = None
    is_busy: bool = False
    in_force_mhz: int | None = None


@dataclass(slots=True)
class _Stage:
    index: int
    session: Session
    gpu: GpuState
    worker: _Worker
    position: int = 0
    is_computing: bool = False
    finish_number: int = 0
    ended_s: float = 0.0
    statistics: ClockStatistics | None = None
    done: set[Computation] = field(default_factory=set)


class _Simulation:
    def __init__(
        self,
        job: Job,
        clocks_mhz: Sequence[Sequence[int]],
        latency_s: float | None,
        iteration_count: int,
        seed: int,
        machine: Machine,
        slowdowns: Sequence[float],
    ) -> None:
        self._job, self._machine = job, machine
        self._clocks_mhz = clocks_mhz
        self._latency_s = latency_s
        self._slowdowns = slowdowns
        self._iteration_count = iteration_count
        self._random = np.random.default_rng(seed)
        # The computations are the same for every latency, so iterations of one seed can be compared.
        self._work_random = np.random.default_rng([seed, 1])
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self._now_s = 0.0
        self._iteration = -1
        self._times_s: list[float] = []
        self._energies_j: list[float] = []
        self._stages = [
            self._stage(index, order, clocks)
            for index, (order, clocks) in enumerate(zip(job.orders, clocks_mhz, strict=True))
        ]

    def run(self) -> Outcome:
        self._begin_iteration()
        while self._queue:
            self._now_s, _, action = heapq.heappop(self._queue)
            action()
        statistics = tuple(stage.statistics for stage in self._stages if stage.statistics is not None)
        return Outcome(tuple(self._times_s), tuple(self._energies_j), statistics)

    def _stage(self, index: int, order: Sequence[Computation], clocks_mhz: Sequence[int]) -> _Stage:
        model = self._job.model
        rank = Rank("job", 0, index, 0)
        gpu_description = GpuDescription("GPU", model.name, model.clocks_mhz)
        session = Session(rank, gpu_description, is_registered=True)
        gpu = GpuState(at_s=0.0, counter_origin_s=0.0, clock_mhz=model.highest_clock_mhz)
        stage = _Stage(index, session, gpu, _Worker())
        self._report(stage, Connected(_LEASE_S))
        self._report(stage, RankAccepted(rank, tuple(order)))
        clocks = StageClocks(tuple(order), tuple(clocks_mhz))
        self._report(stage, PlanOffer(rank, PlanId("e", 1), 0, _LEASE_S, clocks))
        return stage

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time_s, next(self._number), action))

    def _delay_s(self, mean_s: float) -> float:
        return float(self._random.exponential(mean_s)) if mean_s else 0.0

    # --- Trainers -------------------------------------------------------------------------------------------

    def _begin_iteration(self) -> None:
        self._iteration += 1
        self._begun_s = self._now_s
        self._energy_before_j = self._energy_j()
        for stage in self._stages:
            stage.position = 0
            if self._slowdowns:
                stage.gpu.slowdown = self._slowdowns[self._iteration]
            stage.done.clear()
            self._mark(stage, IterationMark(Edge.BEGIN, self._iteration, self._now_ns))
        self._scales = [
            1 + self._machine.duration_noise * self._work_random.standard_normal(len(order))
            for order in self._job.orders
        ]
        for stage in self._stages:
            self._go_on(stage)

    def _go_on(self, stage: _Stage) -> None:
        """Begin the stage's next computation if its inputs have arrived."""
        order = self._job.orders[stage.index]
        if stage.is_computing or stage.position == len(order):
            return
        computation = order[stage.position]
        source = stage.index + (-1 if computation.kind is Kind.FORWARD else 1)
        if 0 <= source < len(self._stages) and computation not in self._stages[source].done:
            return
        scale = float(self._scales[stage.index][stage.position])
        work = self._job.works[stage.index][computation.kind]
        stage.is_computing = True
        stage.gpu.advance(self._job.model, self._now_s)
        if self._latency_s is None:
            stage.gpu.clock_mhz = self._clocks_mhz[stage.index][stage.position]
        stage.gpu.begin(Work(work.compute_s * scale, work.memory_s * scale, work.activity))
        self._mark(
            stage, ComputationMark(Edge.BEGIN, self._iteration, stage.position, computation, self._now_ns)
        )
        self._expect_finish(stage)

    def _expect_finish(self, stage: _Stage) -> None:
        if stage.is_computing:
            stage.finish_number += 1
            number = stage.finish_number
            self._at(stage.gpu.finish_s(self._job.model), lambda: self._finish(stage, number))

    def _finish(self, stage: _Stage, number: int) -> None:
        if number != stage.finish_number:
            return  # the clock has changed in the meantime
        stage.gpu.advance(self._job.model, self._now_s)
        stage.gpu.remaining = 0.0  # up to rounding
        stage.is_computing = False
        order = self._job.orders[stage.index]
        computation = order[stage.position]
        self._mark(
            stage, ComputationMark(Edge.END, self._iteration, stage.position, computation, self._now_ns)
        )
        stage.done.add(computation)
        stage.position += 1
        for other in self._stages:
            self._go_on(other)
        if all(each.position == len(self._job.orders[each.index]) for each in self._stages):
            self._at(self._now_s + self._machine.synchronisation_s, self._end_iteration)

    def _end_iteration(self) -> None:
        for stage in self._stages:
            self._mark(stage, IterationMark(Edge.END, self._iteration, self._now_ns))
            self._report(stage, Tick())
        self._times_s.append(self._now_s - self._begun_s)
        self._energies_j.append(self._energy_j() - self._energy_before_j)
        if self._iteration + 1 < self._iteration_count:
            self._begin_iteration()

    def _energy_j(self) -> float:
        for stage in self._stages:
            stage.gpu.advance(self._job.model, self._now_s)
        return sum(stage.gpu.energy_j for stage in self._stages)

    @property
    def _now_ns(self) -> int:
        return int(self._now_s * 1e9)

    # --- Agent ----------------------------------------------------------------------------------------------

    def _mark(self, stage: _Stage, mark: IterationMark | ComputationMark) -> None:
        """Deliver a mark late, but in order."""
        arrives_s = max(self._now_s + self._delay_s(self._machine.mark_delay_s), stage.ended_s)
        stage.ended_s = arrives_s
        self._at(arrives_s, lambda: self._report(stage, mark))

    def _report(self, stage: _Stage, event: Event) -> None:
        if self._latency_s is None:
            return
        for command in stage.session.handle(event, self._now_s):
            match command:
                case SetClock(clock_mhz):
                    stage.worker.wanted, stage.worker.scheduled = (clock_mhz, self._now_s), None
                case ResetClock():
                    stage.worker.wanted, stage.worker.scheduled = (None, self._now_s), None
                case ScheduleClock(clock_mhz, at_s):
                    stage.worker.scheduled = (clock_mhz, at_s)
                case Send(Telemetry() as telemetry):
                    stage.statistics = telemetry.clocks
                case _:
                    pass
        self._work(stage)

    def _work(self, stage: _Stage) -> None:
        """Run the clock worker's thread, which is awake."""
        worker = stage.worker
        if worker.is_busy:
            return
        if worker.scheduled is not None and worker.scheduled[1] <= self._now_s:
            worker.wanted, worker.scheduled = worker.scheduled, None
        if worker.wanted is not None:
            (clock_mhz, due_s), worker.wanted = worker.wanted, None
            if clock_mhz != worker.in_force_mhz:
                worker.is_busy = True
                begun_s = self._now_s + self._delay_s(self._machine.wake_up_delay_s)
                self._at(begun_s, lambda: self._set(stage, clock_mhz, due_s))
                return
        if worker.scheduled is not None:
            self._at(worker.scheduled[1], lambda: self._work(stage))

    def _set(self, stage: _Stage, clock_mhz: int | None, due_s: float) -> None:
        begun_s = self._now_s
        assert self._latency_s is not None
        noise = float(self._random.standard_normal())
        latency_s = self._latency_s * max(0.5, 1 + self._machine.latency_noise * noise)
        stage.gpu.advance(self._job.model, begun_s)
        stage.gpu.set_clock(self._job.model, clock_mhz or self._job.model.highest_clock_mhz)
        stage.gpu.pending_at_s = begun_s + latency_s
        self._expect_finish(stage)

        def done() -> None:
            stage.worker.is_busy = False
            stage.worker.in_force_mhz = clock_mhz
            self._report(stage, ClockSet(clock_mhz, self._now_s, begun_s, due_s))

        self._at(begun_s + latency_s, done)
