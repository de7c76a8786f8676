"""Job states, ranks and offers as plain values.

The state machine keeps them, the store persists them and the adapters translate them.
"""

import enum
from collections.abc import Collection
from dataclasses import dataclass

from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import ClockStatistics, ForeignClock
from perseus.solver import Plan
from perseus.v1 import event_pb2


class JobState(enum.Enum):
    """The state of a job; `perseus.service.job.states` holds the transitions."""

    WAITING = "waiting"
    BASELINE = "baseline"
    PROFILING = "profiling"
    SOLVING = "solving"
    PLANNED = "planned"
    STOCK = "stock"
    FINISHED = "finished"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is ten times slower


class RankState(enum.Enum):
    """Whether an agent serves a rank."""

    EXPECTED = "expected"
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    LOST = "lost"
    FINISHED = "finished"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is ten times slower


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
    """Why a GPU can't be used."""

    NOT_FOUND = "not found"
    DRIVER_FAILED = "driver failed"
    NO_PERMISSION = "no permission"
    LOST = "lost"
    NOT_SUPPORTED = "not supported"
    IN_USE = "in use"
    NOT_RECORDED = "not recorded"


class FaultyPart(enum.Enum):
    """The step at which the coordinator failed for a job."""

    MACHINE = "handling an input"
    SOLVING = "solving"
    ACTION = "executing commands"
    VIEW = "showing the job"
    STORED_STATE = "restoring the stored state"
    STORING = "storing records"


GpuKind = tuple[str, float, *tuple[int, ...]]
"""A GPU's model, power limit in watts, and workload power profiles."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its agent sees it, with its clocks highest first. A power limit of 0 means unknown.

    `power_profiles`: NVIDIA's workload power profiles in force, by NVML's numbers.
    """

    uuid: str
    model: str
    supported_clocks_mhz: tuple[int, ...]
    power_limit_w: float = 0.0
    power_profiles: tuple[int, ...] = ()

    @property
    def kind(self) -> GpuKind:
        """What the time and energy of its work depend on."""
        return self.model, self.power_limit_w, *self.power_profiles


@dataclass(frozen=True, slots=True)
class MaxClock:
    """The maximum clock that a power budget sets for a job's GPUs while they compute under no plan.

    `outlasts_lease`: plans and the maximum clock stay in force when the lease expires in silence; otherwise
    the GPUs go back to stock.
    """

    clock_mhz: int
    outlasts_lease: bool = False


@dataclass(frozen=True, slots=True)
class StockClocks:
    """The GPU's own clocks, without Perseus, up to the maximum clock if there is one."""

    max_clock_mhz: int | None = None

    def __str__(self) -> str:
        return "stock" if self.max_clock_mhz is None else f"stock, at most {self.max_clock_mhz} MHz"


STOCK_MHZ = 0
"""The clock value that means stock."""


@dataclass(frozen=True, slots=True)
class HoldClocks:
    """One clock per stage, or STOCK_MHZ, for all computations of that stage; used for profiling."""

    clocks_mhz: tuple[int, ...]

    def __str__(self) -> str:
        different_mhz = [mhz for mhz in dict.fromkeys(self.clocks_mhz) if mhz != STOCK_MHZ]
        return f"hold {', '.join(str(mhz) for mhz in different_mhz)} MHz"


@dataclass(frozen=True, slots=True)
class PlannedClocks:
    """A clock for each computation of the pipeline; STOCK_MHZ throughout a stage that stays at stock."""

    plan: Plan
    latency_cost_percent: float = 0.0
    """Predicted energy that the GPUs' set latency adds."""

    def __str__(self) -> str:
        return f"plan of {self.plan.iteration_time_s:.4g} s without overhead"


Clocks = StockClocks | HoldClocks | PlannedClocks
STOCK = StockClocks()


def stage_clocks(clocks: Clocks, stage: int) -> tuple[int, ...] | int:
    """Return a stage's clocks for comparison: one for each of its computations, or one for all of them.

    The result is STOCK_MHZ if no clock is set in the stage.
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
"""The plan in force is of another epoch: the coordinator has lost its state since."""

LOST_VERSIONS = 2**20
"""Upper bound on the versions of clocks that lost state can have used."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A rank's share of its pipeline's clocks, in force from the beginning of the start iteration.

    `is_urgent`: in force at once, regardless of the start iteration.
    """

    version: int
    start_iteration: int
    clocks: Clocks
    is_urgent: bool = False


@dataclass(frozen=True, slots=True)
class PipelineOffer:
    """Clocks for one pipeline. `stage_versions`: the version that gave each stage its current share.

    `is_urgent`: in force at once, regardless of the start iteration. It is not stored.
    """

    stage_versions: tuple[int, ...]
    start_iteration: int
    clocks: Clocks
    is_urgent: bool = False

    @property
    def version(self) -> int:
        """The version of the pipeline's clocks: the latest of its stages'."""
        return max(self.stage_versions)

    def to_stage(self, stage: int) -> Offer:
        """Return the offer to the ranks of a stage."""
        return Offer(self.stage_versions[stage], self.start_iteration, self.clocks, self.is_urgent)


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank: the agent that serves it, the clocks offered to it and the clocks that it reports in force.

    Attributes:
        in_force_version: may be FOREIGN_VERSION.
        iteration: the highest that it reported, -1 if none.
        clocks: how well its clocks follow the plan, as reported last.
        refused_clocks_mhz: clocks that its agent refused for good.
        is_stock_only: whether its agent refused everything but stock for good.
        capped_clock_mhz: the highest clock that it is assumed to reach, 0 if no cap is known.
        clock_event_reasons: why its clock was capped in its latest iteration, as NVML's bits.
        foreign_clock: at which another client of the driver holds its GPU; None if none does.
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
    foreign_clock: ForeignClock | None = None

    def at(self, iteration: int, clock_event_reasons: int) -> "Rank":
        """Return the rank at another iteration."""
        return self._but(self.offered_version, iteration, clock_event_reasons)

    def offered(self, version: int) -> "Rank":
        """Return the rank with another offer."""
        return self._but(version, self.iteration, self.clock_event_reasons)

    def _but(self, offered_version: int, iteration: int, clock_event_reasons: int) -> "Rank":
        """Like `replace`, but faster, as this runs for every batch and every offer."""
        return Rank(
            self.coordinates,
            self.state,
            self.instance_id,
            self.hostname,
            self.gpu,
            offered_version,
            self.in_force_version,
            iteration,
            self.clocks,
            self.refused_clocks_mhz,
            self.is_stock_only,
            self.capped_clock_mhz,
            clock_event_reasons,
            self.foreign_clock,
        )

    @property
    def has_refused(self) -> bool:
        """Whether its agent has refused any clocks for good."""
        return self.is_stock_only or bool(self.refused_clocks_mhz)


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Which events to return, and in which order; all by default, the earliest first.

    Attributes:
        types: only these types; all if empty.
        start_time_s: at or after this time.
        end_time_s: before this time.
        is_latest_first: pages go from the latest event back.
    """

    types: Collection[event_pb2.JobEventType.ValueType] = ()
    start_time_s: float | None = None
    end_time_s: float | None = None
    is_latest_first: bool = False


ALL_EVENTS = EventFilter()


@dataclass(frozen=True, slots=True)
class Straggler:
    """A slow pipeline: its measured iteration time, or its factor of T_min.

    A client reported it, or the coordinator detected it in the telemetry.
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
    """An iteration at stock: time of the slowest pipeline, energy of all GPUs (0 if unknown).

    `gap_time_s`: the usual time until the next iteration begins; None if unknown.
    """

    time_s: float
    energy_j: float
    gap_time_s: float | None = None


class NoSlowdownBasis(enum.Enum):
    """The source of the iteration time that counts as no slowdown."""

    ALL_MAX = "all-max, as planned with"
    BASELINE = "measured baseline"


@dataclass(frozen=True, slots=True)
class NoSlowdown:
    """The longest iteration time, on the frontier's scale, that counts as no slowdown, and its source."""

    time_s: float
    basis: NoSlowdownBasis


@dataclass(frozen=True, slots=True)
class RankFilter:
    """Which ranks to return: in one of these states (all if empty), of this pipeline, of this stage."""

    states: frozenset[RankState] = frozenset()
    pipeline: int | None = None
    stage: int | None = None
