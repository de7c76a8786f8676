"""The ranks of one job: their agents, leases and iterations. Part of the state machine."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import astuple, replace

from perseus.service.domain.bounds import MAX_COUNT
from perseus.service.domain.errors import InvalidFieldError, RankAlreadyServedError, TelemetryOutdatedError
from perseus.service.domain.inputs import GpuErrorReported, RankJoined
from perseus.service.domain.messages import NUMBERS, coordinates_to_proto, foreign_clock_to_proto
from perseus.service.domain.model import NO_VERSION, GpuKind, Rank, RankFilter, RankState, RefusalReason
from perseus.service.domain.specification import Coordinates, JobSpec, Parallelism
from perseus.service.domain.telemetry import ClockStatistics, ForeignClock, GpuLimits
from perseus.service.job.command_buffer import CommandBuffer
from perseus.service.job.ranks.counts import IterationCounts, move
from perseus.service.job.ranks.leases import Leases
from perseus.service.job.ranks.missing import MissingRanks
from perseus.service.job.ranks.usable_clocks import ClockCounts, UsableClocks
from perseus.v1 import event_pb2

_MAX_GPU_ERRORS = 1024
"""GPU errors remembered to recognise repeats; an error can have any text."""

_SAME_POWER_W = 1.0
"""Power limits that differ by less are the same."""

AHEAD_LIMIT = 128
"""Iterations that a rank may be ahead of most others. They end iterations together, but may report late."""

LIVE = (RankState.CONNECTED, RankState.DISCONNECTED)


class RankTable:
    """All ranks of a job, connected or not. Changes are stored and announced through the command buffer.

    Attributes:
        counts: how many ranks are in each state.
        missing: the ranks that are not connected and have not finished.
        placement_count: how often a rank joined from another host, or with another GPU, than before.
        capped: the ranks that do without higher clocks.
        foreign: the ranks whose GPU's clock another client of the driver holds.
        plausible_through: `plausible_iteration` as last computed; it only rises until ranks come or go.
    """

    def __init__(self, spec: JobSpec, lease_s: float, buffer: CommandBuffer, now_s: float = 0.0) -> None:
        self._spec = spec
        self._buffer = buffer
        self._ranks = {place: Rank(place) for place in spec.parallelism.all_coordinates()}
        self.counts = Counter({RankState.EXPECTED: len(self._ranks)})
        self.missing = MissingRanks(self._ranks, now_s)
        # By agent instance: any message renews the leases of all its ranks.
        self._leases = Leases(lease_s)
        self.placement_count = 0
        self._live: dict[str, set[Coordinates]] = {}
        # Of connected ranks; and the highest plausible of them, None after they have changed.
        self._iterations = IterationCounts()
        self._highest_iteration: int | None = None
        self.plausible_through = -1
        # Telemetry up to this sequence is of an earlier trainer. Not stored: every stream reports it anew.
        self._after_sequence: dict[Coordinates, int] = {}
        self._changed: set[Coordinates] = set()
        self.capped: set[Coordinates] = set()
        self.foreign: set[Coordinates] = set()
        self._clocks = ClockCounts(spec.parallelism.stage_count)
        # By stage: how many of its GPUs are of each kind; and these kinds, None after they have changed.
        self._gpus: list[Counter[GpuKind]] = [Counter() for _ in range(spec.parallelism.stage_count)]
        self._gpu_kinds: tuple[frozenset[GpuKind], ...] | None = None
        # The latest announced ones, oldest first.
        self._gpu_errors: dict[GpuErrorReported, None] = {}

    def __getitem__(self, place: Coordinates) -> Rank:
        return self._ranks[place]

    def __contains__(self, place: Coordinates) -> bool:
        return place in self._ranks

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._ranks.values())

    def __len__(self) -> int:
        return len(self._ranks)

    def restore(self, ranks: Iterable[Rank], now_s: float) -> None:
        """Take stored ranks; ranks that were connected have a whole lease to return."""
        for rank in ranks:
            state = RankState.DISCONNECTED if rank.state in LIVE else rank.state
            self._put(replace(rank, state=state))
            if state in LIVE:
                self._leases.hear(rank.instance_id, now_s)
            if state is not RankState.EXPECTED:
                self.missing.find(rank.coordinates)
            if state not in (RankState.EXPECTED, RankState.FINISHED):
                self.missing.miss(rank.coordinates, now_s)

    def are_all(self, state: RankState) -> bool:
        """Tell whether every rank is in a state."""
        return self.counts[state] == len(self)

    def select(self, wanted: RankFilter, first_index: int = 0) -> Iterator[tuple[int, Rank]]:
        """Yield the ranks that match the filter, from an index on, each with its index."""
        return select(self._spec, self._ranks, wanted, first_index)

    def of_instance(self, instance_id: str, *states: RankState) -> list[Rank]:
        """Return the live ranks of an agent that are in one of these states."""
        places = sorted(self._live.get(instance_id, ()), key=astuple)
        return [rank for place in places if (rank := self._ranks[place]).state in states]

    def highest_iteration(self) -> int:
        """Return the highest plausible iteration that a connected rank reported, -1 if none."""
        if self._highest_iteration is None:
            plausible = self.plausible_iteration()
            self._highest_iteration = self._iterations.highest(MAX_COUNT if plausible < 0 else plausible)
        return self._highest_iteration

    def plausible_iteration(self) -> int:
        """Return the highest iteration where a rank can be beside the others.

        It is -1 until more than half of the ranks are connected and have begun: the first can be anywhere,
        and so can one that has no others.
        """
        reached = self._iterations.reached_by(len(self) // 2 + 1) if len(self) > 1 else -1
        self.plausible_through = -1 if reached < 0 else reached + AHEAD_LIMIT
        return self.plausible_through

    def is_plausible(self, iteration: int) -> bool:
        """Tell whether a rank can be at an iteration; False if that is unknown."""
        return iteration <= self.plausible_through or iteration <= self.plausible_iteration()

    def is_ahead(self, rank: Rank) -> bool:
        """Tell whether a rank claims an iteration where it can't be beside the others."""
        return 0 <= self.plausible_iteration() < rank.iteration

    def next_deadline_s(self) -> float | None:
        """Return when the next lease runs out; None if there is none."""
        return self._leases.next_deadline_s()

    def expired(self, now_s: float) -> list[Rank]:
        """Return the live ranks whose lease has run out; each lease is returned once."""
        return [
            rank
            for instance_id in self._leases.expired(now_s)
            for rank in self.of_instance(instance_id, *LIVE)
        ]

    def usable_clocks_mhz(self) -> UsableClocks:
        """Return the usable clocks of each stage."""
        return self._clocks.usable_mhz()

    def gpu_kinds(self) -> tuple[frozenset[GpuKind], ...]:
        """Return the kinds of each stage's known GPUs; the same object until they change."""
        if self._gpu_kinds is None:
            self._gpu_kinds = tuple(frozenset(counts) for counts in self._gpus)
        return self._gpu_kinds

    def refuse_clocks(self, place: Coordinates, clocks_mhz: Iterable[int]) -> str:
        """Record the clocks that a rank does not have; return that as part of a sentence."""
        rank = self._ranks[place]
        refused_mhz = tuple(sorted({*rank.refused_clocks_mhz, *clocks_mhz}))
        self.change(replace(rank, refused_clocks_mhz=refused_mhz))
        return f"{place} has no {', '.join(str(mhz) for mhz in refused_mhz)} MHz"

    def cap_clock(self, place: Coordinates, clock_mhz: int) -> None:
        """Record the highest clock that a rank reaches."""
        self.change(replace(self._ranks[place], capped_clock_mhz=clock_mhz))

    def lift_caps(self) -> bool:
        """Assume that ranks reach all clocks again; return whether any was capped."""
        capped = sorted(self.capped, key=astuple)
        for place in capped:
            self.change(replace(self._ranks[place], capped_clock_mhz=0))
        return bool(capped)

    def note_limits(self, place: Coordinates, limits: GpuLimits) -> bool:
        """Record the limits of a rank's GPU; announce them and return True if they have changed."""
        rank = self._ranks[place]
        gpu = rank.gpu
        if gpu is None or limits == (gpu.power_limit_w, gpu.power_profiles):
            return False
        is_same_power = abs(limits.power_limit_w - gpu.power_limit_w) < _SAME_POWER_W
        if is_same_power and limits.power_profiles == gpu.power_profiles:
            return False
        self.change(
            replace(
                rank,
                gpu=replace(gpu, power_limit_w=limits.power_limit_w, power_profiles=limits.power_profiles),
            )
        )
        self._buffer.announce(
            event_pb2.JOB_EVENT_TYPE_GPU_LIMITS_CHANGED,
            f"{place}: its GPU's power limit is {_limits(limits)}, was "
            f"{_limits(GpuLimits(gpu.power_limit_w, gpu.power_profiles))}",
            event_pb2.GpuLimitsChanged(
                rank=coordinates_to_proto(place),
                before_power_limit_w=gpu.power_limit_w,
                power_limit_w=limits.power_limit_w,
                before_workload_power_profiles=gpu.power_profiles,
                workload_power_profiles=limits.power_profiles,
            ),
        )
        return True

    def note_foreign_clock(self, place: Coordinates, clock: ForeignClock | None) -> bool:
        """Record and announce that another client holds the clock of a rank's GPU, or is not known to.

        Return whether that is news.
        """
        rank = self._ranks[place]
        if rank.gpu is None or clock == rank.foreign_clock:
            return False
        self.change(replace(rank, foreign_clock=clock))
        message = (
            f"{place}: no other client of the driver is known to hold the clock of {rank.gpu.uuid} any more"
        )
        if clock is not None:
            wanted = f"{clock.wanted_mhz} MHz" if clock.wanted_mhz else "stock"
            message = (
                f"{place}: {rank.gpu.uuid} runs at {clock.clock_mhz} MHz, wanted {wanted}: "
                "another client of the driver holds it"
            )
        self._buffer.announce(
            event_pb2.JOB_EVENT_TYPE_FOREIGN_CLOCK,
            message,
            event_pb2.ForeignClockChanged(
                rank=coordinates_to_proto(place),
                gpu_uuid=rank.gpu.uuid,
                foreign_clock=foreign_clock_to_proto(clock),
            ),
        )
        return True

    def leave_at_stock(self, place: Coordinates, reason: RefusalReason) -> str:
        """Record that a rank can have no clock but stock; return that as part of a sentence."""
        self.change(replace(self._ranks[place], is_stock_only=True))
        return f"{place} and its stage stay at stock: {reason.value}"

    def join(self, event: RankJoined, in_force_version: int, now_s: float) -> None:
        """Take a rank that an agent announces.

        Raises:
            RankAlreadyServedError: another agent serves it, or its lease still runs.
        """
        rank = self._ranks[event.rank]
        if rank.state in LIVE and rank.instance_id != event.instance_id:
            raise RankAlreadyServedError(
                job_id=self._spec.job_id,
                pipeline=event.rank.pipeline,
                stage=event.rank.stage,
                tensor=event.rank.tensor,
                instance_id=rank.instance_id,
                hostname=rank.hostname,
                lease_left_s=self._leases.left_s(rank.instance_id, now_s),
            )
        self._leases.hear(event.instance_id, now_s)
        self.placement_count += (rank.hostname, rank.gpu) != (event.hostname, event.gpu)
        self._after_sequence[event.rank] = event.after_sequence
        if rank.instance_id != event.instance_id:
            # Another agent may be able to set these clocks.
            self.note_foreign_clock(event.rank, None)
            rank = replace(
                rank, refused_clocks_mhz=(), is_stock_only=False, capped_clock_mhz=0, foreign_clock=None
            )
        joined = replace(
            rank,
            state=RankState.CONNECTED,
            instance_id=event.instance_id,
            hostname=event.hostname,
            gpu=event.gpu,
            in_force_version=in_force_version,
            iteration=event.iteration,
        )
        self.change(joined, why="")
        self.missing.find(event.rank)

    def lease_left_s(self, place: Coordinates, now_s: float) -> float:
        """Return how much of the lease of a live rank is left, s."""
        return self._leases.left_s(self._ranks[place].instance_id, now_s)

    def hear(self, place: Coordinates, instance_id: str, now_s: float) -> bool:
        """Renew the leases of a rank's agent; return False if it does not serve the rank (a stale message).

        Raises:
            RankOutOfRangeError: the job has no such rank.
        """
        rank = self._ranks.get(place)
        if rank is None:
            self._spec.check_rank(place)
            return False
        if rank.state is not RankState.CONNECTED or rank.instance_id != instance_id:
            return False
        self._leases.hear(instance_id, now_s)
        return True

    def check_trainer(self, place: Coordinates, sequence: int) -> None:
        """Refuse telemetry of a connected rank from a trainer before the current one.

        Raises:
            TelemetryOutdatedError: quotes where the current trainer's telemetry begins.
        """
        after_sequence = self._after_sequence[place]
        if sequence <= after_sequence:
            raise TelemetryOutdatedError(sequence=sequence, after_sequence=after_sequence)

    def hear_agent(self, instance_id: str, now_s: float) -> None:
        """Renew the leases of an agent, if it serves any of the ranks."""
        if instance_id in self._leases:
            self._leases.hear(instance_id, now_s)

    def disconnect(self, instance_id: str, now_s: float) -> None:
        """Record that an agent's stream has ended; the leases of its ranks run from now."""
        self.hear_agent(instance_id, now_s)
        for rank in self.of_instance(instance_id, RankState.CONNECTED):
            self.change(replace(rank, state=RankState.DISCONNECTED), why="its agent's stream ended")
            self.missing.miss(rank.coordinates, now_s)

    def lose(self, place: Coordinates, why: str, now_s: float) -> None:
        """Record that a rank is lost; its GPU is at stock, or will be when the lease runs out."""
        self._end(place, RankState.LOST, why)
        self.missing.miss(place, now_s)

    def finish(self, place: Coordinates, why: str) -> None:
        """Record that a rank's trainer is done; its GPU is at stock."""
        self._end(place, RankState.FINISHED, why)
        self.missing.find(place)

    def _end(self, place: Coordinates, state: RankState, why: str) -> None:
        self.note_foreign_clock(place, None)
        self.change(replace(self._ranks[place], state=state, in_force_version=NO_VERSION), why)

    def note_iteration(self, place: Coordinates, iteration: int, clock_event_reasons: int = 0) -> None:
        """Record a rank's iteration and clock event reasons; a lower iteration only if it was too far ahead.

        They are not stored, as ranks report them again after a restart.
        """
        rank = self._ranks[place]
        is_correction = iteration < rank.iteration and self.is_ahead(rank)
        if iteration > rank.iteration or is_correction:
            self._ranks[place] = rank.at(iteration, clock_event_reasons)
            if rank.state is RankState.CONNECTED:
                self._iterations.move((rank.iteration,), (iteration,))
                self._highest_iteration = None
                if is_correction:
                    self.plausible_through = -1

    def note_offered(self, place: Coordinates, version: int) -> None:
        """Record the version offered to a rank.

        It is not stored, as its pipeline's offer is: a new plan for all ranks would be a record for each.
        """
        self._ranks[place] = self._ranks[place].offered(version)

    def note_clocks(self, place: Coordinates, clocks: ClockStatistics) -> None:
        """Record how well a rank's clocks follow its plan.

        That is not stored, as it is reported again and again.
        """
        self._put(replace(self._ranks[place], clocks=clocks))

    def note_gpu_error(self, event: GpuErrorReported) -> None:
        """Announce an error of a rank's GPU once: agents report it again on every stream."""
        if event not in self._gpu_errors:
            self._gpu_errors[event] = None
            if len(self._gpu_errors) > _MAX_GPU_ERRORS:
                del self._gpu_errors[next(iter(self._gpu_errors))]
            self._buffer.announce(
                event_pb2.JOB_EVENT_TYPE_GPU_ERROR,
                f"{event.rank}: {event.reason.value}: {event.message}",
                event_pb2.RankGpuError(
                    rank=coordinates_to_proto(event.rank),
                    gpu_uuid=event.gpu_uuid,
                    reason=NUMBERS[event.reason],
                    agent_message=event.message,
                ),
            )

    def change(self, rank: Rank, why: str | None = None) -> None:
        """Replace a rank, and announce that if there is a `why`, even an empty one."""
        before = self._ranks[rank.coordinates]
        if rank == before:
            return
        self._put(rank)
        self._changed.add(rank.coordinates)
        self._buffer.store(rank)
        if why is not None:
            self._buffer.announce(
                event_pb2.JOB_EVENT_TYPE_RANK_CHANGED,
                f"{rank.coordinates} is {rank.state.value}{f': {why}' if why else ''}",
                event_pb2.RankChanged(
                    rank=coordinates_to_proto(rank.coordinates),
                    state=NUMBERS[rank.state],
                    instance_id=rank.instance_id,
                    hostname=rank.hostname,
                    gpu_uuid=rank.gpu.uuid if rank.gpu else "",
                    reason=why,
                ),
            )

    def _put(self, rank: Rank) -> None:
        """Replace a rank, and update the figures over all ranks."""
        place = rank.coordinates
        before, self._ranks[place] = self._ranks[place], rank
        if before.state is not rank.state:
            self.counts[before.state] -= 1
            self.counts[rank.state] += 1
        was_live, is_live = before.state in LIVE, rank.state in LIVE
        was_at, is_at = (
            (each.iteration,) if each.state is RankState.CONNECTED else () for each in (before, rank)
        )
        if was_at != is_at:
            self._iterations.move(was_at, is_at)
            self.plausible_through, self._highest_iteration = -1, None
        if was_live and not (is_live and before.instance_id == rank.instance_id):
            served = self._live[before.instance_id]
            served.discard(place)
            if not served:
                del self._live[before.instance_id]
                self._leases.end(before.instance_id)
        if is_live:
            self._live.setdefault(rank.instance_id, set()).add(place)
        if rank.capped_clock_mhz != before.capped_clock_mhz:
            (self.capped.add if rank.capped_clock_mhz else self.capped.discard)(place)
        if rank.foreign_clock != before.foreign_clock:
            (self.foreign.add if rank.foreign_clock else self.foreign.discard)(place)
        self._clocks.move(before, rank)
        if before.gpu is not rank.gpu:
            kinds = ([] if gpu is None else [gpu.kind] for gpu in (before.gpu, rank.gpu))
            if move(self._gpus[place.stage], *kinds):
                self._gpu_kinds = None

    def take_changed(self) -> Collection[Coordinates]:
        """Return the ranks that have changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def validate(self) -> None:
        """Check the invariants."""
        assert +self.counts == Counter(rank.state for rank in self)
        live = [rank for rank in self if rank.state in LIVE]
        assert sum(map(len, self._live.values())) == len(live)
        assert len(self._leases) == len(self._live)
        at = sorted((rank.iteration for rank in live if rank.state is RankState.CONNECTED), reverse=True)
        reached = at[len(self) // 2] if len(at) > len(self) // 2 > 0 else -1
        assert self.plausible_through <= (-1 if reached < 0 else reached + AHEAD_LIMIT)
        believed = [iteration for iteration in at if reached < 0 or iteration <= reached + AHEAD_LIMIT]
        assert self._highest_iteration in (None, max(believed, default=-1))
        self._leases.validate()
        counted = RankTable(self._spec, 0.0, self._buffer)
        for rank in self:
            counted._put(rank)
        assert self.usable_clocks_mhz() == counted.usable_clocks_mhz()
        assert self.gpu_kinds() == counted.gpu_kinds()
        assert self.capped == {rank.coordinates for rank in self if rank.capped_clock_mhz}
        assert self.foreign == {rank.coordinates for rank in self if rank.foreign_clock}
        absent = [
            rank.coordinates for rank in self if rank.state not in (RankState.CONNECTED, RankState.FINISHED)
        ]
        assert len(self.missing) == len(absent)
        first = self.missing.first()
        assert (first[0] if first else None) == min(absent, default=None)
        for place, rank in self._ranks.items():
            assert rank.coordinates == place
            if rank.state in LIVE:
                assert rank.instance_id
                assert rank.gpu is not None
                assert rank.instance_id in self._leases
                assert place in self._live[rank.instance_id]
            elif rank.state is RankState.EXPECTED:
                assert not rank.instance_id
            else:
                assert rank.in_force_version == NO_VERSION


def select(
    spec: JobSpec, ranks: Mapping[Coordinates, Rank], wanted: RankFilter, first_index: int
) -> Iterator[tuple[int, Rank]]:
    """Yield the ranks that match the filter, from an index on, each with its index in the order of all ranks.

    A rank that is not in `ranks` has never joined.

    Raises:
        PipelineOutOfRangeError, InvalidFieldError: the job has no such pipeline or stage.
    """
    counts = spec.parallelism
    if wanted.pipeline is not None:
        spec.check_pipeline(wanted.pipeline)
    if wanted.stage is not None and not 0 <= wanted.stage < counts.stage_count:
        expected = f"0 to {counts.stage_count - 1}"
        raise InvalidFieldError(field="stage", expected=expected, found=wanted.stage)
    return _select(counts, ranks, wanted, first_index)


def _select(
    counts: Parallelism, ranks: Mapping[Coordinates, Rank], wanted: RankFilter, first_index: int
) -> Iterator[tuple[int, Rank]]:
    stages, tensors = counts.stage_count, counts.tensor_count
    first_pipeline = first_index // (stages * tensors)
    for pipeline in range(first_pipeline, counts.pipeline_count):
        if wanted.pipeline not in (None, pipeline):
            continue
        for stage in range(stages) if wanted.stage is None else (wanted.stage,):
            for tensor in range(tensors):
                index = (pipeline * stages + stage) * tensors + tensor
                place = Coordinates(pipeline, stage, tensor)
                rank = ranks.get(place) or Rank(place)
                if index >= first_index and (not wanted.states or rank.state in wanted.states):
                    yield index, rank


def _limits(limits: GpuLimits) -> str:
    """Format limits for a message."""
    power = f"{limits.power_limit_w:g} W" if limits.power_limit_w else "unknown"
    if not limits.power_profiles:
        return power
    return f"{power} under workload power profiles {', '.join(map(str, limits.power_profiles))}"
