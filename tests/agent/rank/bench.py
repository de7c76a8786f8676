"""A session at a simulated time; its invariants are checked after every event."""

import pytest

from perseus.agent.clocks.sets import ClockSet, ScheduleClock
from perseus.agent.energy.counter import CounterChange
from perseus.agent.link.computation import Computation, Kind, Rank
from perseus.agent.link.packets import ComputationMark, Edge, IterationMark
from perseus.agent.rank.commands import AllowPacking, Command, EstimateEnergy, Send
from perseus.agent.rank.events import Connected, Event, Tick, TrainerJoined
from perseus.agent.rank.messages import (
    NO_PLAN,
    GpuDescription,
    Hold,
    MaxClock,
    PlanId,
    PlanOffer,
    PlanRefusalReason,
    RankAccepted,
    RankMaxClock,
    RankRefused,
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


class Bench:
    """A session and its time; `do` checks the invariants after every event."""

    def __init__(
        self, order: tuple[Computation, ...] = ORDER, *, observe: bool = False, is_registered: bool = True
    ) -> None:
        self.session = Session(RANK, GPU, observe=observe, is_registered=is_registered)
        self.order = order
        self.now_s = 100.0
        self.is_packing_allowed = False

    def do(self, event: Event) -> list[Command]:
        """Return the session's commands; energy estimates are computed at once, packing is noted."""
        commands: list[Command] = []
        for command in self.session.handle(event, self.now_s):
            if isinstance(command, EstimateEnergy):
                found = estimate(command.request)
                commands += self.session.handle(found, self.now_s) if found else []
            elif isinstance(command, AllowPacking):
                assert command.is_allowed != self.is_packing_allowed
                self.is_packing_allowed = command.is_allowed
            else:
                commands.append(command)
        self.session.validate()
        return commands

    def after(self, duration_s: float, event: Event) -> list[Command]:
        self.now_s += duration_s
        return self.do(event)

    def accepted(self) -> "Bench":
        self.do(TrainerJoined())
        self.do(Connected(LEASE_S))
        self.do(RankAccepted(RANK, self.order))
        return self

    def refused_for_s(self) -> float:
        """The time from a refusal to the next announcement."""
        self.do(RankRefused(RANK, "JOB_NOT_FOUND", ""))
        refused_at_s = self.now_s
        while not self.after(0.25, Tick()):
            assert self.now_s < refused_at_s + 60.0, "it is not announced again"
        return self.now_s - refused_at_s

    def iteration(self, edge: Edge, number: int) -> list[Command]:
        return self.do(IterationMark(edge, number, int(self.now_s * 1e9)))

    def mark(
        self, edge: Edge, iteration: int, computation: Computation, *, ordinal: int | None = None
    ) -> list[Command]:
        if ordinal is None:
            ordinal = self.order.index(computation)
        return self.do(ComputationMark(edge, iteration, ordinal, computation, int(self.now_s * 1e9)))

    def offer(
        self,
        version: int,
        start: int,
        clocks: Stock | Hold | StageClocks,
        *,
        epoch: str = "e",
        is_urgent: bool = False,
    ) -> list[Command]:
        return self.do(PlanOffer(RANK, PlanId(epoch, version), start, LEASE_S, clocks, is_urgent))

    def limit(self, clock_mhz: int | None, *, outlasts_lease: bool = False) -> list[Command]:
        max_clock = None if clock_mhz is None else MaxClock(clock_mhz, outlasts_lease)
        return self.do(RankMaxClock(RANK, max_clock))

    def run(self, number: int, *, duration_s: float = 0.1) -> list[Command]:
        """A whole iteration: each computation lasts `duration_s`, with an equal wait before it."""
        commands = self.iteration(Edge.BEGIN, number)
        for computation in self.order:
            self.now_s += duration_s
            commands += self.mark(Edge.BEGIN, number, computation)
            self.now_s += duration_s
            commands += self.mark(Edge.END, number, computation)
        return commands + self.iteration(Edge.END, number)


def stage(*clocks_mhz: int, order: tuple[Computation, ...] = ORDER) -> StageClocks:
    return StageClocks(order, clocks_mhz)


def accepted(version: int, iteration: int) -> Send:
    return Send(plan_answer(RANK, PlanId("e", version), None, iteration))


def in_force(version: int, iteration: int) -> Send:
    plan = PlanId("e", version) if version else NO_PLAN
    return Send(
        wire.PlanInForce(
            job_id="job",
            rank=coordinates(RANK),
            epoch=plan.epoch,
            version=plan.version,
            iteration=iteration,
        )
    )


def joined(iteration: int, plan: PlanId = NO_PLAN, spec_fingerprint: str = "") -> Send:
    gpu = wire.Gpu(uuid=GPU.uuid, model=GPU.model, supported_clocks_mhz=GPU.supported_clocks_mhz)
    return Send(
        wire.RankJoined(
            job_id="job",
            rank=coordinates(RANK),
            gpu=gpu,
            iteration=iteration,
            in_force_epoch=plan.epoch,
            in_force_version=plan.version,
            spec_fingerprint=spec_fingerprint,
        )
    )


def clock_set(clock_mhz: int | None, time_s: float) -> ClockSet:
    return ClockSet(clock_mhz, time_s, time_s - 0.010, time_s - 0.010)


def refusal(commands: list[Command]) -> tuple[PlanRefusalReason, str]:
    (command,) = commands
    assert isinstance(command, Send)
    assert isinstance(command.message, wire.PlanAnswer)
    assert not command.message.accepted
    return PlanRefusalReason(command.message.refusal_reason), command.message.message


def idle_from(bench: Bench) -> ScheduleClock:
    """When a gap that has just begun turns out to be long, while no latency is known."""
    return ScheduleClock(None, pytest.approx(bench.now_s + 0.08))  # type: ignore[arg-type]


def telemetry(commands: list[Command]) -> list[Telemetry]:
    return [
        command.message
        for command in commands
        if isinstance(command, Send) and isinstance(command.message, Telemetry)
    ]


def counted(bench: Bench, energy_j: float) -> list[Command]:
    return bench.do(CounterChange(bench.now_s, energy_j, 0.002))
