"""A session at a simulated time; its invariants are checked after every event."""

from dataclasses import dataclass
from typing import cast

import pytest

from perseus.agent.clocks.sets import ClockSet, ScheduleClock
from perseus.agent.energy.counter import CounterChange
from perseus.agent.link.computation import Computation, Kind, Rank
from perseus.agent.link.packets import ComputationMark, Edge, IterationMark, WaitMark
from perseus.agent.rank.commands import AllowPacking, Command, EstimateEnergy, Send
from perseus.agent.rank.events import Connected, Event, Tick, TrainerJoined
from perseus.agent.rank.messages import (
    NO_PLAN,
    GpuDescription,
    GpuLimits,
    Hold,
    MaxClock,
    PlanId,
    PlanOffer,
    PlanRefusal,
    PlanRefusalReason,
    RankAccepted,
    RankMaxClock,
    StageClocks,
    Stock,
    Telemetry,
    coordinates,
    plan_answer,
)
from perseus.agent.rank.sampling import estimate
from perseus.agent.rank.session import Session
from perseus.v1 import agent_service_pb2 as wire

RANK = Rank("job", 0, 1, 0)
GPU = GpuDescription("GPU-1", "A100", (1400, 1200, 1000, 800))
F0, F1 = Computation(Kind.FORWARD, 0), Computation(Kind.FORWARD, 1)
B0, B1 = Computation(Kind.BACKWARD, 0), Computation(Kind.BACKWARD, 1)
STEP = Computation(Kind.FIXED, 0)
ORDER = (F0, F1, B0, B1)
LEASE_S = 3.0
TICK, NO_LIMITS = Tick(), GpuLimits()


@dataclass(frozen=True)
class Mark:
    """A mark that the trainer makes now: of an iteration, or in the latest one of a computation or a wait."""

    edge: Edge
    of: int | Computation | None = None
    ordinal: int | None = None
    iteration: int | None = None


@dataclass(frozen=True)
class Run:
    """A whole iteration: each computation lasts `duration_s`, with an equal wait before it."""

    iteration: int
    duration_s: float = 0.1


@dataclass(frozen=True)
class After:
    """An event after a while."""

    duration_s: float
    event: Event = TICK


Step = Event | Mark | Run | After
Script = list[Step | tuple[Step, list[Command]]]
"""Steps, and the exact commands that follow those of interest."""


class Bench:
    """A session and its time; `do` checks the invariants after every event."""

    def __init__(
        self,
        order: tuple[Computation, ...] = ORDER,
        *,
        observe: bool = False,
        is_registered: bool = True,
        lease_s: float = LEASE_S,
    ) -> None:
        self.session = Session(
            RANK, GPU, observe=observe, is_registered=is_registered, owner="ada", after_sequence=7
        )
        self.order = order
        self.lease_s = lease_s
        self.now_s = 100.0
        self.iteration = -1
        self.is_packing_allowed = False
        self._energy_j = 0.0
        self._drawn = 0

    def do(self, *steps: Step) -> list[Command]:
        """Return the session's commands."""
        return [command for step in steps for command in self._do(step)]

    def follow(self, script: Script) -> None:
        """Do the steps of a script and compare the commands."""
        for number, each in enumerate(script):
            if isinstance(each, tuple):
                step, expected = each
                assert self.do(step) == expected, f"step {number}: {step}"
            else:
                self.do(each)

    def _do(self, step: Step) -> list[Command]:
        match step:
            case After(duration_s, event):
                self.now_s += duration_s
                return self._handle(event)
            case Run():
                return self._run(step)
            case Mark(edge, int(number)):
                self.iteration = max(self.iteration, number)
                return self._handle(IterationMark(edge, number, self.now_ns))
            case Mark(edge, None):
                return self._handle(WaitMark(edge, self.iteration, self.now_ns))
            case Mark(edge, Computation() as computation, ordinal, iteration):
                ordinal = self.order.index(computation) if ordinal is None else ordinal
                iteration = self.iteration if iteration is None else iteration
                return self._handle(ComputationMark(edge, iteration, ordinal, computation, self.now_ns))
            case _:
                return self._handle(cast(Event, step))

    @property
    def now_ns(self) -> int:
        return int(self.now_s * 1e9)

    def _handle(self, event: Event) -> list[Command]:
        """Compute energy estimates at once, and note packing."""
        commands: list[Command] = []
        for command in self.session.handle(event, self.now_s):
            if isinstance(command, EstimateEnergy):
                estimated = estimate(command.request)
                commands += self.session.handle(estimated, self.now_s) if estimated else []
            elif isinstance(command, AllowPacking):
                assert command.is_allowed != self.is_packing_allowed
                self.is_packing_allowed = command.is_allowed
            else:
                commands.append(command)
        self.session.validate()
        return commands

    def _run(self, run: Run) -> list[Command]:
        commands = self.do(begin(run.iteration))
        for computation in self.order:
            for edge in Edge:
                self.now_s += run.duration_s
                commands += self.do(Mark(edge, computation))
        return commands + self.do(end(run.iteration))

    def accepted(self) -> "Bench":
        self.do(TrainerJoined(), Connected(self.lease_s), RankAccepted(RANK, self.order))
        return self

    def draw(self, duration_s: float, power_w: float) -> list[Telemetry]:
        """Let time pass, while the counter moves every 70 ms; return what is reported."""
        commands: list[Command] = []
        for _ in range(round(duration_s * 100)):
            self.now_s += 0.01
            self._energy_j += power_w * 0.01
            self._drawn += 1
            if self._drawn % 7 == 0:
                commands += counted(self, self._energy_j)
        return telemetry(commands)


def begin(of: int | Computation, *, ordinal: int | None = None, iteration: int | None = None) -> Mark:
    return Mark(Edge.BEGIN, of, ordinal, iteration)


def end(of: int | Computation, *, ordinal: int | None = None, iteration: int | None = None) -> Mark:
    return Mark(Edge.END, of, ordinal, iteration)


def offer(
    version: int,
    start: int,
    clocks: Stock | Hold | StageClocks,
    *,
    epoch: str = "e",
    is_urgent: bool = False,
) -> PlanOffer:
    return PlanOffer(RANK, PlanId(epoch, version), start, LEASE_S, clocks, is_urgent)


def limit(clock_mhz: int | None, *, outlasts_lease: bool = False) -> RankMaxClock:
    return RankMaxClock(RANK, None if clock_mhz is None else MaxClock(clock_mhz, outlasts_lease))


def stage(*clocks_mhz: int, order: tuple[Computation, ...] = ORDER) -> StageClocks:
    return StageClocks(order, clocks_mhz)


def accepted(version: int, iteration: int, *, epoch: str = "e") -> Send:
    return Send(plan_answer(RANK, PlanId(epoch, version), None, iteration))


def in_force(version: int, iteration: int, *, epoch: str = "e") -> Send:
    plan = PlanId(epoch, version) if version else NO_PLAN
    return Send(
        wire.PlanInForce(
            job_id="job",
            rank=coordinates(RANK),
            epoch=plan.epoch,
            version=plan.version,
            iteration=iteration,
        )
    )


def joined(
    iteration: int, plan: PlanId = NO_PLAN, spec_fingerprint: str = "", limits: GpuLimits = NO_LIMITS
) -> Send:
    gpu = wire.Gpu(
        uuid=GPU.uuid,
        model=GPU.model,
        supported_clocks_mhz=GPU.supported_clocks_mhz,
        power_limit_w=limits.power_limit_w,
        workload_power_profiles=limits.power_profiles,
    )
    return Send(
        wire.RankJoined(
            job_id="job",
            rank=coordinates(RANK),
            gpu=gpu,
            iteration=iteration,
            in_force_epoch=plan.epoch,
            in_force_version=plan.version,
            spec_fingerprint=spec_fingerprint,
            owner="ada",
            after_sequence=7,
        )
    )


def clock_set(clock_mhz: int | None, time_s: float) -> ClockSet:
    return ClockSet(clock_mhz, time_s, time_s - 0.010, time_s - 0.010)


def refused(
    version: int, reason: PlanRefusalReason, message: str, iteration: int = -1, clocks: tuple[int, ...] = ()
) -> Send:
    refusal = PlanRefusal(reason, f"{RANK}: {message}", clocks)
    return Send(plan_answer(RANK, PlanId("e", version), refusal, iteration))


def idle_at(time_s: float, clock_mhz: int | None = None) -> ScheduleClock:
    """When a gap that has just begun turns out to be long, while no latency is known."""
    return ScheduleClock(clock_mhz, pytest.approx(time_s))  # type: ignore[arg-type]


def telemetry(commands: list[Command]) -> list[Telemetry]:
    return [
        command.message
        for command in commands
        if isinstance(command, Send) and isinstance(command.message, Telemetry)
    ]


def counted(bench: Bench, energy_j: float) -> list[Command]:
    return bench.do(CounterChange(bench.now_s, energy_j, 0.002))
