"""The words of a job's life: states, ranks and offers, as plain values.

They are what the state machine keeps, what the store writes down and what the adapters translate.
"""

import enum
from collections.abc import Collection
from dataclasses import dataclass

from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import ClockStatistics
from perseus.solver import Plan
from perseus.v1 import event_pb2


class JobState(enum.Enum):
    """The state of a job; `perseus.service.job.states` says how it moves."""

    WAITING = "waiting"
    BASELINE = "baseline"
    PROFILING = "profiling"
    SOLVING = "solving"
    PLANNED = "planned"
    STOCK = "stock"
    FINISHED = "finished"

    __hash__ = object.__hash__  # members are single; what an enumeration has costs ten times as much


class RankState(enum.Enum):
    """Whether an agent serves a rank."""

    EXPECTED = "expected"
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    LOST = "lost"
    FINISHED = "finished"

    __hash__ = object.__hash__  # members are single; what an enumeration has costs ten times as much


class RankLeftReason(enum.Enum):
    """Why a rank is no longer served."""

    FINISHED = "finished"
    TRAINER_GONE = "trainer gone"
    GPU_FAILED = "GPU failed"


class RefusalReason(enum.Enum):
    """Why a plan offer was refused."""

    PAST_START = "past start"
    CLOCK_NOT_SUPPORTED = "clock not supported"
    NOT_PERMITTED = "not permitted"
    ORDER_MISMATCH = "order mismatch"
    UNKNOWN_RANK = "unknown rank"
    GPU_FAILED = "GPU failed"


class GpuErrorReason(enum.Enum):
    """What it was that went wrong with a GPU."""

    NOT_FOUND = "not found"
    DRIVER_FAILED = "driver failed"
    NO_PERMISSION = "no permission"
    LOST = "lost"
    NOT_SUPPORTED = "not supported"
    IN_USE = "in use"
    NOT_RECORDED = "not recorded"


class FaultyPart(enum.Enum):
    """What of a job the coordinator failed at."""

    MACHINE = "taking an input"
    SOLVING = "solving"
    ACTION = "carrying out what follows from an input"
    VIEW = "showing the job"
    STORED_STATE = "going on from what is stored"
    STORING = "storing what follows from an input"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its agent sees it; its clocks highest first. The power limit is 0 where it is not known.

    `power_profiles`: NVIDIA's workload power profiles in force, by NVML's numbers.
    """

    uuid: str
    model: str
    supported_clocks_mhz: tuple[int, ...]
    power_limit_w: float = 0.0
    power_profiles: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MaxClock:
    """The highest clock of a job's GPUs while they compute under no plan, as a power budget wants it.

    `outlasts_lease`: when the coordinator has been silent for the lease, plans and ceiling stay as they are;
    else that ends at stock.
    """

    clock_mhz: int
    outlasts_lease: bool = False


@dataclass(frozen=True, slots=True)
class StockClocks:
    """The GPU's own clocks, without Perseus; while there is a ceiling, none above it."""

    max_clock_mhz: int | None = None

    def __str__(self) -> str:
        return "stock" if self.max_clock_mhz is None else f"stock, at most {self.max_clock_mhz} MHz"


STOCK_MHZ = 0
"""Stands for stock where others have a clock."""


@dataclass(frozen=True, slots=True)
class HoldClocks:
    """One clock for all computations of a stage, or STOCK_MHZ, for each stage, for profiling."""

    clocks_mhz: tuple[int, ...]

    def __str__(self) -> str:
        different_mhz = [mhz for mhz in dict.fromkeys(self.clocks_mhz) if mhz != STOCK_MHZ]
        return f"hold {', '.join(str(mhz) for mhz in different_mhz)} MHz"


@dataclass(frozen=True, slots=True)
class PlannedClocks:
    """A clock for each computation of the pipeline; STOCK_MHZ for those of a stage that stays at stock."""

    plan: Plan
    latency_cost_percent: float = 0.0
    """What the GPUs' set latency adds to the energy, by prediction."""

    def __str__(self) -> str:
        return f"plan of {self.plan.iteration_time_s:.6f} s"


Clocks = StockClocks | HoldClocks | PlannedClocks
STOCK = StockClocks()


def stage_clocks(clocks: Clocks, stage: int) -> tuple[int, ...] | int:
    """Return a stage's share, to compare: one for each of its computations, or one for all of them.

    Whatever sets no clock in the stage is STOCK_MHZ for all.
    """
    match clocks:
        case PlannedClocks(plan):
            clocks_mhz = tuple(planned.clock_mhz for planned in plan.stages[stage])
            return clocks_mhz if any(clocks_mhz) else STOCK_MHZ
        case HoldClocks(clocks_mhz):
            return clocks_mhz[stage]
        case StockClocks():
            return STOCK_MHZ


NO_VERSION = 0
"""The version of stock without a plan."""

FOREIGN_VERSION = -1
"""In force is a plan of another epoch: of a coordinator that has lost what it knew."""

LOST_VERSIONS = 2**20
"""More versions of clocks than a lost part of the state can have used."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A rank's share of its pipeline's clocks: whole, from the begin of the start iteration.

    `is_urgent`: at once, whatever the start iteration is.
    """

    version: int
    start_iteration: int
    clocks: Clocks
    is_urgent: bool = False


@dataclass(frozen=True, slots=True)
class PipelineOffer:
    """Clocks for one pipeline. `stage_versions`: when each stage got the share that it has.

    `is_urgent`: at once, whatever the start iteration is. It is not stored.
    """

    stage_versions: tuple[int, ...]
    start_iteration: int
    clocks: Clocks
    is_urgent: bool = False

    @property
    def version(self) -> int:
        """That of the pipeline's clocks: its latest stage's."""
        return max(self.stage_versions)

    def to_stage(self, stage: int) -> Offer:
        """What the ranks of a stage are offered."""
        return Offer(self.stage_versions[stage], self.start_iteration, self.clocks, self.is_urgent)


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank: who serves it, what it was offered and what it says is in force.

    `iteration` is the highest that it reported, -1 if none. `in_force_version` may be FOREIGN_VERSION.
    `clocks`: how well they follow the plan, as reported last. What its agent refused for good: some clocks
    (`refused_clocks_mhz`), or all but stock. `capped_clock_mhz`: the highest that it is taken to reach, 0 if
    nothing is known to hold it; `clock_event_reasons`: what held it in its latest iteration, as NVML's bits.
    """

    coordinates: Coordinates
    state: RankState = RankState.EXPECTED
    instance_id: str = ""
    hostname: str = ""
    gpu: Gpu | None = None
    offered_version: int = NO_VERSION
    in_force_version: int = NO_VERSION
    iteration: int = -1
    clocks: ClockStatistics | None = None
    refused_clocks_mhz: tuple[int, ...] = ()
    is_stock_only: bool = False
    capped_clock_mhz: int = 0
    clock_event_reasons: int = 0

    def at(self, iteration: int, clock_event_reasons: int) -> "Rank":
        """Return the rank at another iteration: every batch has one, and `replace` looks at every field."""
        return Rank(
            self.coordinates,
            self.state,
            self.instance_id,
            self.hostname,
            self.gpu,
            self.offered_version,
            self.in_force_version,
            iteration,
            self.clocks,
            self.refused_clocks_mhz,
            self.is_stock_only,
            self.capped_clock_mhz,
            clock_event_reasons,
        )

    @property
    def has_refused(self) -> bool:
        """Whether there is something that it does without."""
        return self.is_stock_only or bool(self.refused_clocks_mhz)


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Which events are wanted; all by default.

    Attributes:
        types: of these types only; of all if empty.
        start_time_s: at or after this time.
        end_time_s: before this time.
    """

    types: Collection[event_pb2.JobEventType.ValueType] = ()
    start_time_s: float | None = None
    end_time_s: float | None = None


ALL_EVENTS = EventFilter()


@dataclass(frozen=True, slots=True)
class Straggler:
    """A pipeline that is slow: its measured iteration time, or its factor of T_min.

    Somebody reported it, or it was detected in the telemetry.
    """

    pipeline: int
    iteration_time_s: float | None = None
    slowdown_factor: float | None = None
    is_detected: bool = False

    def __str__(self) -> str:
        if self.slowdown_factor is not None:
            return f"{self.slowdown_factor:g} × T_min"
        return f"{self.iteration_time_s:g} s"


@dataclass(frozen=True, slots=True)
class StockIteration:
    """An iteration at stock: time of the slowest pipeline, energy of all GPUs (0 where it is not known).

    `gap_time_s`: the usual time until the next begins; None where it is not known.
    """

    time_s: float
    energy_j: float
    gap_time_s: float | None = None


class NoSlowdownBasis(enum.Enum):
    """What says how long an iteration takes that is not slower than stock."""

    ALL_MAX = "all-max, as planned with"
    BASELINE = "measured baseline"


@dataclass(frozen=True, slots=True)
class NoSlowdown:
    """The longest iteration time, on the frontier's scale, that is no slowdown, and what says so."""

    time_s: float
    basis: NoSlowdownBasis


@dataclass(frozen=True, slots=True)
class RankFilter:
    """Which ranks are meant: in one of these states (all if empty), of this pipeline, of this stage."""

    states: frozenset[RankState] = frozenset()
    pipeline: int | None = None
    stage: int | None = None
