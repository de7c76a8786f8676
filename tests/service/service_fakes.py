"""A small emulated cluster for the coordinator's tests: physics, and ranks that follow offers."""

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
from google.protobuf.message import Message

from perseus.schedule_name import ScheduleName
from perseus.service.domain.commands import (
    AcceptRank,
    Announce,
    Command,
    EndStream,
    Refine,
    SendMaxClock,
    SendOffer,
    Solve,
    Store,
)
from perseus.service.domain.errors import RankNotServedError
from perseus.service.domain.inputs import (
    Input,
    LagNotFound,
    OfferAnswered,
    PlanInForce,
    RankJoined,
    Refined,
    Solved,
    SolveFailed,
    TelemetryArrived,
)
from perseus.service.domain.ledger import EnergyHour
from perseus.service.domain.measured import Period, StageProfile
from perseus.service.domain.model import (
    STOCK,
    STOCK_MHZ,
    Gpu,
    JobState,
    MaxClock,
    Offer,
    PlannedClocks,
    Rank,
    RankFilter,
    RankState,
    RefusalReason,
    stage_clocks,
)
from perseus.service.domain.records import (
    Counters,
    ForgetIterations,
    ForgetProfile,
    IterationRows,
    JobRecord,
    OfferRecord,
    Registrations,
    StoredJob,
)
from perseus.service.domain.specification import (
    Coordinates,
    JobSpec,
    NamedSchedule,
    OperatingPolicy,
    Parallelism,
    Registration,
)
from perseus.service.domain.telemetry import (
    KINDS,
    ClockStatistics,
    ComputationColumns,
    EnergyEstimate,
    EnergySample,
    ForeignClock,
    GpuLimits,
    IterationColumns,
    TelemetryBatch,
)
from perseus.service.job import views
from perseus.service.job.machine import JobMachine
from perseus.service.job.rules import Rules
from perseus.service.job.run import Run
from perseus.service.solving.work import solve_explaining
from perseus.solver import Computation, Kind, LagError, Plan, Refinement, Schedule, SolverError
from perseus.v1 import event_pb2, job_pb2

EPOCH = "epoch-of-the-tests"
REGISTRATION = Registration("request", "fingerprint")
CLOCKS_MHZ = (1400, 1300, 1200, 1100, 1000, 900)
BLOCKING_POWER_W = 60.0
START_S = 1_000_000.0
"""Wall-clock time at which a cluster's own clock is 0."""


def make_spec(
    job_id: str = "job",
    pipelines: int = 2,
    stages: int = 2,
    tensors: int = 1,
    microbatches: int = 3,
    policy: OperatingPolicy | None = None,
) -> JobSpec:
    return JobSpec(
        job_id,
        Parallelism(pipelines, stages, tensors),
        NamedSchedule(ScheduleName.ONE_FORWARD_ONE_BACKWARD, microbatches),
        policy or OperatingPolicy(),
    )


def make_gpu(rank: Coordinates, clocks_mhz: Sequence[int] = CLOCKS_MHZ) -> Gpu:
    return Gpu(f"GPU-{rank.pipeline}-{rank.stage}-{rank.tensor}", "Emulated", tuple(clocks_mhz))


def time_s(stage: int, kind: Kind, clock_mhz: int) -> float:
    """Part of the time scales with the clock, part does not; later stages are lighter."""
    base_s = (0.05 if kind is Kind.FORWARD else 0.1) / (1 + 0.3 * stage)
    return base_s * (0.3 + 0.7 * CLOCKS_MHZ[0] / clock_mhz)


def energy_j(stage: int, kind: Kind, clock_mhz: int) -> float:
    """Static power plus one that grows steeply with the clock; the least effective energy is in between."""
    return time_s(stage, kind, clock_mhz) * (110.0 + 150.0 * (clock_mhz / CLOCKS_MHZ[0]) ** 3)


def estimate(
    order: Iterable[Computation],
    version: int,
    iteration_count: int,
    clock_mhz: int,
    slowness: float = 1.0,
) -> EnergyEstimate:
    """Return a rank's estimate; stock is the highest clock."""
    real_mhz = clock_mhz or CLOCKS_MHZ[0]
    keys = sorted({(c.stage, c.kind, c.chunk) for c in order})
    return EnergyEstimate(
        plan_version=version,
        iteration_count=iteration_count,
        samples=tuple(
            EnergySample(
                kind,
                chunk,
                clock_mhz,
                iteration_count,
                slowness * time_s(stage, kind, real_mhz),
                1e-4,
                energy_j(stage, kind, real_mhz),
                1e-2,
            )
            for stage, kind, chunk in keys
        ),
        blocking_power_w=BLOCKING_POWER_W,
        blocking_power_se_w=0.5,
    )


def batch(
    sequence: int,
    iterations: Sequence[int],
    version: int,
    duration_s: float,
    *,
    energy: EnergyEstimate | None = None,
    order: Sequence[Computation] = (),
    clock_mhz: int = 0,
    is_regular: bool = True,
) -> TelemetryBatch:
    count, computations = len(iterations), len(order) * len(iterations)
    return TelemetryBatch(
        sequence=sequence,
        iterations=IterationColumns(
            list(iterations),
            [version] * count,
            [duration_s] * count,
            [100.0 * duration_s] * count,
            [is_regular] * count,
            [0] * count,
        ),
        computations=ComputationColumns(
            [iteration for iteration in iterations for _ in order],
            [KINDS.index(c.kind) for c in order] * count,
            [c.microbatch for c in order] * count,
            [c.chunk for c in order] * count,
            np.linspace(0.0, duration_s, computations).tolist(),
            [0.01] * computations,
            [clock_mhz] * computations,
        ),
        energy=energy,
        dropped_batch_count=0,
    )


def clock_statistics(version: int, set_latency_s: float, set_latency_count: int = 64) -> ClockStatistics:
    """Return the statistics of clocks that follow their plan."""
    return ClockStatistics(version, 10, 100, 0, 0, 10.0, 9.5, set_latency_s, 0.001, 0.0001, set_latency_count)


Details = TypeVar("Details", bound=Message)


def solved(command: Solve) -> Solved | SolveFailed | LagNotFound:
    """Return the answer to a problem."""
    return _solved(pickle.dumps(command))


def refined(refinement: Refinement) -> Refined:
    """Return the answer to a request for an exact plan."""
    return Refined(refinement, _plan(pickle.dumps(refinement)))


# Many tests emulate identical jobs with identical problems, so each is solved only once.
@lru_cache(maxsize=256)
def _plan(refinement: bytes) -> Plan:
    made: Refinement = pickle.loads(refinement)
    return made.plan()


@lru_cache(maxsize=256)
def _solved(pickled: bytes) -> Solved | SolveFailed | LagNotFound:
    command: Solve = pickle.loads(pickled)
    try:
        return Solved(solve_explaining(command.problem, 8, command.slow, command.set_latency_s))
    except LagError as error:
        return LagNotFound(event_pb2.MeasurementsUnexplained(**error.times_s))
    except SolverError as error:
        return SolveFailed(str(error))


@dataclass
class FakeRank:
    """One rank and its agent, which follows offers and reports.

    It may lack the permission to set clocks (`is_permitted`), its GPU may lack some (`missing_mhz`), and it
    may report no energy (`reports_energy`) or no blocking power (`reports_power`). Its GPU may have a set
    latency (0: not reported), limits (`limits`), or be held below its clock (`reasons`) at `capped_mhz`.
    `begun_version` is the version under which the current iteration began.
    """

    place: Coordinates
    instance_id: str
    order: Sequence[Computation]
    iteration: int = -1
    in_force: Offer = field(default_factory=lambda: Offer(0, 0, STOCK))
    in_force_since: int = 0
    pending: Offer | None = None
    sequence: int = 0
    after_sequence: int = 0
    is_permitted: bool = True
    reports_energy: bool = True
    reports_power: bool = True
    missing_mhz: frozenset[int] = frozenset()
    set_latency_s: float = 0.0
    limits: GpuLimits | None = None
    foreign_clock: ForeignClock | None = None
    reasons: int = 0
    capped_mhz: int = 0
    relative_work: float = 0.0
    work: int = 0
    max_clock: MaxClock | None = None
    begun_version: int | None = None
    has_clock_change: bool = False

    def joined(self, in_force_epoch: str | None = None) -> RankJoined:
        epoch = EPOCH if self.in_force.version else ""
        return RankJoined(
            self.place,
            self.instance_id,
            "host",
            make_gpu(self.place),
            self.iteration,
            epoch if in_force_epoch is None else in_force_epoch,
            self.in_force.version,
            self.after_sequence,
        )

    def start_trainer(self, iteration: int = -1) -> None:
        """Start a new trainer after this iteration, at stock."""
        self.iteration, self.in_force, self.pending = iteration, Offer(0, 0, STOCK), None
        self.in_force_since = iteration + 1
        self.begun_version, self.has_clock_change = None, False
        self.after_sequence = self.sequence

    def answer(self, offer: Offer) -> OfferAnswered:
        """Accept an offer unless it is impossible or its start has begun; `apply` has to follow."""
        refusal = None
        wanted = stage_clocks(offer.clocks, self.place.stage)
        wanted_mhz = {wanted} if isinstance(wanted, int) else set(wanted)
        missing_mhz = tuple(sorted(self.missing_mhz & wanted_mhz))
        if wanted != STOCK_MHZ and not self.is_permitted:
            refusal = RefusalReason.NOT_PERMITTED
        elif missing_mhz:
            refusal = RefusalReason.CLOCK_NOT_SUPPORTED
        elif (
            offer.start_iteration <= self.iteration
            and offer.version != self.in_force.version
            and not offer.is_urgent
        ):
            refusal = RefusalReason.PAST_START
        else:
            self.pending = offer
        return OfferAnswered(
            self.place,
            self.instance_id,
            EPOCH,
            offer.version,
            refusal,
            "",
            self.iteration,
            missing_mhz if refusal is RefusalReason.CLOCK_NOT_SUPPORTED else (),
        )

    def apply(self) -> PlanInForce | None:
        """Put an urgent offer in force, if one was accepted."""
        if self.pending is None or not self.pending.is_urgent:
            return None
        changes = self.pending.version != self.in_force.version
        self.in_force, self.pending = self.pending, None
        if not changes:
            return None
        self.has_clock_change = self.begun_version is not None
        self.in_force_since = self.iteration + 1
        return PlanInForce(self.place, self.instance_id, EPOCH, self.in_force.version, self.iteration)

    def limit(self, max_clock: MaxClock | None) -> None:
        """Take a maximum clock, which changes the clocks of the current iteration unless there is a plan."""
        is_planned = isinstance(self.in_force.clocks, PlannedClocks)
        if max_clock != self.max_clock and self.begun_version is not None and not is_planned:
            self.has_clock_change = True
        self.max_clock = max_clock

    def lose_permission(self) -> PlanInForce:
        """Lose the permission to set clocks: stock from now on."""
        self.is_permitted = False
        self.in_force, self.pending = Offer(0, 0, STOCK), None
        return PlanInForce(self.place, self.instance_id, "", 0, self.iteration + 1)

    def begin(self) -> PlanInForce | None:
        """Begin the next iteration, with the offer that starts here."""
        self.iteration += 1
        in_force = self._begin_pending()
        self.begun_version, self.has_clock_change = self.in_force.version, False
        return in_force

    def _begin_pending(self) -> PlanInForce | None:
        if self.pending is not None and self.pending.start_iteration <= self.iteration:
            changes = self.pending.version != self.in_force.version
            self.in_force, self.pending = self.pending, None
            if changes:
                self.in_force_since = self.iteration
                return PlanInForce(self.place, self.instance_id, EPOCH, self.in_force.version, self.iteration)
        return None

    def end(self, duration_s: float, *, is_regular: bool = True) -> TelemetryArrived:
        """End the iteration and report it."""
        self.sequence += 1
        held_mhz = stage_clocks(self.in_force.clocks, self.place.stage)
        version = self.in_force.version if self.begun_version is None else self.begun_version
        self.begun_version = None
        is_regular = is_regular and not self.has_clock_change
        energy = None
        if isinstance(held_mhz, int) and not self.has_clock_change:
            count = self.iteration - self.in_force_since + 1
            energy = estimate(self.order, self.in_force.version, count, held_mhz)
            if not self.reports_energy:
                energy = replace(energy, samples=())
            if not self.reports_power:
                energy = replace(energy, blocking_power_w=None, blocking_power_se_w=0.0)
        telemetry = batch(
            self.sequence,
            [self.iteration],
            version,
            duration_s,
            energy=energy,
            order=self.order if is_regular else (),
            is_regular=is_regular,
        )
        telemetry = telemetry._replace(
            iterations=telemetry.iterations._replace(
                clock_event_reasons=[self.reasons],
                capped_clock_mhz=[self.capped_mhz],
                has_clock_change=[self.has_clock_change],
                relative_work=[self.relative_work] if self.relative_work else (),
                work=[self.work] if self.work else (),
            ),
            clocks=clock_statistics(self.in_force.version, self.set_latency_s)
            if self.set_latency_s
            else None,
            gpu_limits=self.limits,
            foreign_clock=self.foreign_clock,
        )
        return TelemetryArrived(self.place, self.instance_id, telemetry)


class Cluster:
    """All ranks of a job and its machine, on a clock of their own.

    Every input is followed by `validate`, and the machine's records are kept, as a store would keep them.
    """

    def __init__(self, spec: JobSpec, rules: Rules | None = None, run_number: int = 1) -> None:
        self.spec = spec
        self.rules = rules or Rules(lease_s=30.0, baseline_iterations=2, profile_iterations=2)
        self.machine = JobMachine(Run(spec, run_number, self.rules, EPOCH, START_S, created_s=0.0))
        self.schedule: Schedule = self.machine.run.schedule
        self.now_s = 0.0
        self.history: list[Command] = []
        self.offered_versions: list[int] = []
        self.ended_instances: list[str] = []
        self.history.extend(self.machine.register(REGISTRATION, 0))
        self.ranks = {
            place: FakeRank(place, f"agent-{place.pipeline}", self.schedule.orders[place.stage])
            for place in spec.parallelism.all_coordinates()
        }

    def handle(self, event: Input) -> list[Command]:
        """Give the machine one input; return the resulting commands without records."""
        commands = self.machine.handle(event, self.now_s, START_S + self.now_s)
        self.machine.validate()
        self.history.extend(commands)
        return [command for command in commands if not isinstance(command, Store)]

    def carry_out(self, commands: Iterable[Command]) -> None:
        """Deliver offers and solve problems, in order, and return the results to the machine."""
        waiting = deque(commands)
        while waiting:
            command = waiting.popleft()
            if isinstance(command, SendOffer):
                self.offered_versions.append(command.offer.version)
                rank = self.ranks[command.rank]
                waiting.extend(self.handle(rank.answer(command.offer)))
                if (in_force := rank.apply()) is not None:
                    waiting.extend(self.handle(in_force))
            elif isinstance(command, SendMaxClock | AcceptRank):
                self.ranks[command.rank].limit(command.max_clock)
            elif isinstance(command, Solve):
                if any(isinstance(other, SendOffer) for other in waiting):
                    waiting.append(command)  # Solving takes longer than delivering an offer.
                else:
                    waiting.extend(self.handle(solved(command)))
            elif isinstance(command, Refine):
                waiting.extend(self.handle(refined(command.refinement)))
            elif isinstance(command, EndStream):
                self.ended_instances.append(command.instance_id)

    def send(self, event: Input) -> None:
        self.carry_out(self.handle(event))

    def join_all(self) -> None:
        for rank in self.ranks.values():
            self.send(rank.joined())

    def iterate(self, count: int = 1, duration_s: float = 0.8, *, is_regular: bool = True) -> None:
        """Let all ranks run iterations in step."""
        for _ in range(count):
            for rank in self.ranks.values():
                in_force = rank.begin()
                if in_force is not None:
                    self.send(in_force)
            self.now_s += duration_s
            for rank in self.ranks.values():
                with suppress(RankNotServedError):  # its agent gets the error, and continues
                    self.send(rank.end(duration_s, is_regular=is_regular))

    def iterate_until(self, state: JobState, limit: int = 100, duration_s: float = 0.8) -> None:
        for _ in range(limit):
            if self.machine.record.state is state:
                return
            self.iterate(duration_s=duration_s)
        raise AssertionError(f"{self.machine.record.state} after {limit} iterations, expected {state}")

    def events(self) -> list[event_pb2.JobEvent]:
        """All events so far."""
        return [command.event for command in self.history if isinstance(command, Announce)]

    def announced(self, kind: type[Details]) -> list[Details]:
        """Return the details of this class in all events so far."""
        found = [getattr(event, field) for event in self.events() if (field := event.WhichOneof("details"))]
        return [details for details in found if isinstance(details, kind)]

    def rank_states(self) -> list[RankState]:
        """Return the states of all ranks, in their order."""
        return [rank.state for _, rank in self.machine.run.ranks.select(RankFilter(), 0)]

    def expect(self, state: JobState) -> None:
        assert self.machine.record.state is state

    def planned_times_s(self) -> list[float]:
        """Return each pipeline's planned iteration time; all its ranks must have their share in force."""
        self.expect_in_force()
        times_s = []
        for offer in self.machine.run.offers:
            assert isinstance(offer.clocks, PlannedClocks)
            times_s.append(offer.clocks.plan.iteration_time_s)
        return times_s

    def job(self, *, is_full: bool = False) -> job_pb2.Job:
        """Return the job as clients see it."""
        return views.job(self.machine.run, is_full=is_full)

    def expect_in_force(self) -> None:
        """Check that every rank has its share of its pipeline's offer in force."""
        for place, rank in self.ranks.items():
            offer = self.machine.run.offers.of_rank(place)
            assert rank.in_force.version == offer.version
            in_force, wanted = (stage_clocks(some.clocks, place.stage) for some in (rank.in_force, offer))
            assert in_force == wanted

    def stored(self) -> StoredJob:
        """Return the state that a store would return now."""
        record: JobRecord | None = None
        registrations = Registrations(())
        ranks: dict[Coordinates, Rank] = {}
        offers: dict[int, OfferRecord] = {}
        profiles: dict[tuple[int, int], StageProfile] = {}
        periods: dict[int, Period] = {}
        rows: list[IterationRows] = []
        sequence = 0
        latest_hour: EnergyHour | None = None
        counters = Counters()
        for command in self.history:
            if isinstance(command, Announce):
                sequence = command.event.sequence
            if not isinstance(command, Store):
                continue
            match command.record:
                case JobRecord() as found:
                    record = found
                case Counters() as counters:
                    pass
                case Registrations() as registrations:
                    pass
                case Rank() as found_rank:
                    ranks[found_rank.coordinates] = found_rank
                case OfferRecord() as offer:
                    offers[offer.pipeline] = offer
                case StageProfile() as profile:
                    profiles[profile.stage, profile.clock_mhz] = profile
                case Period() as period:
                    periods[period.number] = period
                case EnergyHour() as latest_hour:
                    pass
                case IterationRows() as some:
                    rows = [old for old in [*rows, some] if old.rows.iteration[0] > some.closed_through]
                case ForgetIterations():
                    rows = []
                case ForgetProfile():
                    profiles = {}
        return StoredJob(
            self.spec, 1, START_S, registrations, record, tuple(ranks.values()), tuple(offers.values()),
            tuple(profiles[place] for place in sorted(profiles)), tuple(periods.values()),
            tuple(rows), sequence, latest_hour, counters,
        )  # fmt: skip

    def restart(self) -> None:
        """Kill the coordinator and start it again from the stored state."""
        self.restart_with(self.carry_out)

    def restart_with(self, take: Callable[[list[Command]], None]) -> None:
        """Kill the coordinator and start it again; its first commands go to `take`."""
        self.machine, commands = JobMachine.restore(
            self.stored(), self.rules, EPOCH, self.now_s, START_S + self.now_s
        )
        self.machine.validate()
        self.history.extend(commands)
        take(commands)
