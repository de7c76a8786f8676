"""The clocks offered to each pipeline of a job, and how they come into force. Part of the state machine.

A version identifies clocks, rises within the job and is never reused. A stage keeps its version if its share
of the new clocks is unchanged, and its ranks receive nothing; the pipeline's version is that of the stage
that changed last. All ranks of a pipeline that change get the same start iteration. A rank that has already
begun that iteration refuses; the pipeline then keeps its versions and is offered them again with a later
start.

The start lies a margin above the highest iteration that any rank reported. Telemetry arrives when an
iteration has ended and the next is running, so the margin is at least two; if iterations are short, it has to
cover the round trip (`TRANSIT_S`). It doubles with every refusal of the same version.

For a block at stock beside the plans (`stock_blocks`), the plans are suspended and stock is offered; the same
plans then come back under their versions. No event says so: the job remains planned.

Ranks take an urgent offer at once, in the middle of an iteration, so it is never too late. It carries a start
iteration all the same, for agents that do not know urgent offers. Until it is in force everywhere, its
replacement is urgent, too: the first offer may never have been sent.

`reconcile` sends offers. It depends on the current state only, not on the history: it sends the current offer
to every connected rank that neither has its stage's version in force nor was sent this offer. So a rank that
resumes with the right version gets nothing, and one that returns with another version or fell back to stock
gets the offer. It visits only ranks that have changed, or whose offer has: each pipeline has the set of its
ranks that lack their stage's version, so no message of one rank costs a pass over the others.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter

from perseus.service.domain.commands import SendOffer
from perseus.service.domain.model import (
    FOREIGN_VERSION,
    NO_VERSION,
    STOCK,
    Clocks,
    HoldClocks,
    Offer,
    PipelineOffer,
    PlannedClocks,
    Rank,
    RankState,
    StockClocks,
    stage_clocks,
)
from perseus.service.domain.records import JobRecord, OfferRecord
from perseus.service.domain.specification import Coordinates, Parallelism
from perseus.service.job.command_buffer import CommandBuffer
from perseus.service.job.ranks.counts import move
from perseus.service.job.ranks.rank_table import LIVE, RankTable
from perseus.v1 import event_pb2

TRANSIT_S = 0.5
"""Time for a report to arrive and an offer to get back, with room to spare."""

MIN_MARGIN = 2
MAX_MARGIN = 256


@dataclass(slots=True)
class _Pipeline:
    """A pipeline's offer, how often it came too late, and the versions last offered and last in force.

    `stages`: the ranks of each stage. `lacking`: the ranks that don't have their stage's version in force, as
    of the last `reconcile`. `suspended`: the plan's offer while stock is offered beside it.
    `announced_version`: the version that was last announced as in force.
    """

    offer: PipelineOffer
    stages: list[list[Coordinates]]
    late_count: int = 0
    offered_version: int = NO_VERSION
    in_force_version: int = NO_VERSION
    announced_version: int = NO_VERSION
    suspended: PipelineOffer | None = None
    lacking: set[Coordinates] = field(default_factory=set)

    @property
    def is_urgent(self) -> bool:
        """Whether the offer is urgent and not yet in force on all ranks."""
        return self.offer.is_urgent and self.in_force_version != self.offer.version


class OfferBoard:
    """One offer per pipeline, and which ranks it was sent to.

    Attributes:
        iteration_time_s: the latest iteration time, 0 if unknown; short iterations need a wider margin.
        switch_count: how often pipelines were given new plans since this object was created.
    """

    def __init__(
        self, record: JobRecord, parallelism: Parallelism, ranks: RankTable, buffer: CommandBuffer
    ) -> None:
        self._record = record
        self.iteration_time_s = 0.0
        self.switch_count = 0
        self._ranks = ranks
        self._buffer = buffer
        self._stages = range(parallelism.stage_count)
        nothing = PipelineOffer((NO_VERSION,) * parallelism.stage_count, 0, STOCK)
        self._pipelines = [
            _Pipeline(nothing, [[] for _ in self._stages]) for _ in range(parallelism.pipeline_count)
        ]
        # Cached; None after an offer has changed.
        self._all_versions: tuple[int, ...] | None = None
        # How many pipelines have each version.
        self._versions = Counter({NO_VERSION: parallelism.pipeline_count})
        # How many pipelines are planned with each iteration time.
        self._planned_times_s: Counter[float] = Counter()
        for rank in ranks:
            place = rank.coordinates
            self._pipelines[place.pipeline].stages[place.stage].append(place)
        # The (version, start iteration, urgency) sent to each rank on its present stream.
        self._sent: dict[Coordinates, tuple[int, int, bool]] = {}
        # Ranks that refused an offer at an iteration where no other is yet.
        self._ahead: dict[Coordinates, int] = {}
        # By pipeline: the ranks that `reconcile` visits, as they or their offer have changed.
        self._unreconciled: defaultdict[int, set[Coordinates]] = defaultdict(set)
        self._changed: set[int] = set()
        self._suspended_count = 0

    def __getitem__(self, pipeline: int) -> PipelineOffer:
        return self._pipelines[pipeline].offer

    def __iter__(self) -> Iterator[PipelineOffer]:
        return (pipeline.offer for pipeline in self._pipelines)

    def __len__(self) -> int:
        return len(self._pipelines)

    @property
    def versions(self) -> tuple[int, ...]:
        """Each pipeline's version."""
        if self._all_versions is None:
            self._all_versions = tuple(offer.version for offer in self)
        return self._all_versions

    @property
    def plan_versions(self) -> tuple[int, ...]:
        """Each pipeline's version, that of the plan where stock is offered beside it."""
        if not self.is_beside_plans:
            return self.versions
        return tuple((each.suspended or each.offer).version for each in self._pipelines)

    @property
    def plans(self) -> Iterator[Clocks]:
        """Each pipeline's clocks, those of the plan where stock is offered beside it."""
        return ((each.suspended or each.offer).clocks for each in self._pipelines)

    @property
    def is_beside_plans(self) -> bool:
        """Whether stock is offered for a block beside the plans."""
        return self._suspended_count > 0

    @property
    def versions_in_use(self) -> Collection[int]:
        """The versions that pipelines have, each once."""
        return self._versions.keys()

    @property
    def planned_times_s(self) -> tuple[float, ...]:
        """Predicted iteration time of each pipeline's plan; empty unless all have one."""
        times_s = tuple(time_s for each in self._pipelines for time_s in _planned_times_s(each))
        return times_s if len(times_s) == len(self) else ()

    @property
    def planned_range_s(self) -> tuple[float, float]:
        """The shortest and the longest planned iteration time; 0 unless all pipelines have a plan."""
        if self._planned_times_s.total() < len(self):
            return 0.0, 0.0
        return min(self._planned_times_s), max(self._planned_times_s)

    @property
    def is_urgent(self) -> bool:
        """Whether a pipeline has an urgent offer that is not in force on all its ranks."""
        return any(pipeline.is_urgent for pipeline in self._pipelines)

    def is_pending(self, iteration: int) -> bool:
        """Tell whether an iteration precedes the start of an offer that was never postponed."""
        return any(iteration < each.offer.start_iteration and not each.late_count for each in self._pipelines)

    def restore(self, offers: Iterable[OfferRecord], *, is_urgent: bool) -> None:
        """Take the stored offers, once the ranks are restored.

        An offer that some live rank does not have in force is announced again, and is urgent if `is_urgent`.
        """
        for stored in offers:
            pipeline, versions = self._pipelines[stored.pipeline], stored.offer.stage_versions
            self._put(pipeline, replace(stored.offer, is_urgent=is_urgent))
            pipeline.offered_version = stored.offer.version
            live = [
                place for place in chain.from_iterable(pipeline.stages) if self._ranks[place].state in LIVE
            ]
            for place in live:
                self._ranks.note_offered(place, versions[place.stage])
            if all(self._ranks[place].in_force_version == versions[place.stage] for place in live):
                pipeline.in_force_version = pipeline.announced_version = stored.offer.version
        for rank in self._ranks:
            pipeline = self._pipelines[rank.coordinates.pipeline]
            if rank.in_force_version != pipeline.offer.stage_versions[rank.coordinates.stage]:
                pipeline.lacking.add(rank.coordinates)

    def of_rank(self, place: Coordinates) -> Offer:
        """Return the latest offer for a rank."""
        return self._pipelines[place.pipeline].offer.to_stage(place.stage)

    def set_desired(self, pipelines: Iterable[int], clocks: Clocks, *, is_urgent: bool = False) -> None:
        """Set the desired clocks of pipelines; the stages that have to change get one new version.

        `is_urgent`: offer them as urgent, even where they were offered before and are not in force yet.
        """
        pipelines = [number for number in pipelines if not self._has_resumed(number, clocks, is_urgent)]
        wanted = [_share(clocks, stage) for stage in self._stages]
        # Keyed by the pipelines' current clocks, as many pipelines share them.
        changes: dict[int, list[int]] = {}
        changing: dict[int, list[int]] = {}
        for number in pipelines:
            offer = self._pipelines[number].offer
            if id(offer.clocks) not in changes:
                changes[id(offer.clocks)] = [
                    stage for stage in self._stages if _share(offer.clocks, stage) != wanted[stage]
                ]
            is_in_force = self._pipelines[number].in_force_version == offer.version
            is_expedited = is_urgent and not offer.is_urgent and not is_in_force
            if stages := changes[id(offer.clocks)]:
                changing[number] = stages
            elif offer.clocks != clocks or is_expedited:  # the same clocks may have other predicted times
                self._replace(
                    number, replace(offer, clocks=clocks, is_urgent=offer.is_urgent or is_expedited)
                )
        if changing:
            self._renew(changing, clocks, is_urgent=is_urgent)

    def suspend(self) -> None:
        """Offer stock to all pipelines, until the plans are resumed or others are desired."""
        for pipeline in self._pipelines:
            pipeline.suspended = pipeline.offer
        self._suspended_count = len(self)
        self._renew(dict.fromkeys(range(len(self)), self._stages), STOCK, is_urgent=False)

    def resume(self) -> None:
        """Offer the suspended plans again."""
        for number, pipeline in enumerate(self._pipelines):
            if pipeline.suspended is not None:
                self.set_desired([number], pipeline.suspended.clocks)

    def _has_resumed(self, number: int, clocks: Clocks, is_urgent: bool) -> bool:
        """If these are the clocks of a pipeline's suspended plan, offer them again under their versions."""
        pipeline = self._pipelines[number]
        offer = pipeline.suspended
        if offer is None:
            return False
        if is_same := offer.clocks == clocks:
            pipeline.late_count = 0
            start_iteration = self._start_iteration(pipeline)
            self._replace(number, replace(offer, start_iteration=start_iteration, is_urgent=is_urgent))
        else:
            move(self._planned_times_s, _planned_times_s(pipeline), ())
        pipeline.suspended = None
        self._suspended_count -= 1
        return is_same

    def take_changed(self) -> Collection[int]:
        """Return the pipelines whose offer has changed since the last call."""
        changed, self._changed = self._changed, set()
        return sorted(changed)

    def forget_sent(self, place: Coordinates) -> None:
        """Forget the offer sent to a rank: its stream ended, or it fell back to stock."""
        self._sent.pop(place, None)
        self._ahead.pop(place, None)
        self._unreconciled[place.pipeline].add(place)

    def postpone(self, place: Coordinates, iteration: int) -> None:
        """Offer a rank's pipeline its clocks again with a later start: at this iteration it came too late.

        If the rank can't be there beside the others, it has to wait until they are, too, or for an iteration
        of the whole job (`try_again`).
        """
        if iteration > self._ranks.highest_iteration():
            self._ahead[place] = iteration
            return
        self._pipelines[place.pipeline].late_count += 1
        self._restart(place.pipeline)

    def try_again(self) -> None:
        """Offer their clocks again to ranks that were ahead, as all ranks have reported an iteration."""
        for place in [*self._ahead]:
            self.forget_sent(place)

    def reconcile(self) -> None:
        """Send offers to the ranks that need one, and announce versions that are now in force everywhere."""
        for place in self._ranks.take_changed():
            self._unreconciled[place.pipeline].add(place)
        if self._ahead and min(self._ahead.values()) <= (highest := self._ranks.highest_iteration()):
            for place, iteration in [*self._ahead.items()]:
                if iteration <= highest:
                    del self._ahead[place]
                    self.postpone(place, iteration)
        for number in sorted(self._unreconciled):
            pipeline = self._pipelines[number]
            needing = self._needing(number)
            stages = sorted({rank.coordinates.stage for rank in needing})
            if unversioned := [at for at in stages if pipeline.offer.stage_versions[at] == NO_VERSION]:
                # Unknown clocks are in force there, so stock has to be offered explicitly.
                self._renew({number: unversioned}, pipeline.offer.clocks, is_urgent=pipeline.offer.is_urgent)
                needing = self._needing(number)
            elif needing and pipeline.offer.start_iteration < self._start_iteration(pipeline):
                self._restart(number)
                needing = self._needing(number)
            if needing:
                self._announce_offered(number, pipeline)
            for rank in needing:
                offer = self.of_rank(rank.coordinates)
                self._sent[rank.coordinates] = _identity(offer)
                self._ranks.note_offered(rank.coordinates, offer.version)
                self._buffer.do(SendOffer(rank.coordinates, rank.instance_id, offer))
            self._announce_in_force(number, pipeline)
        self._unreconciled.clear()

    @property
    def are_in_force(self) -> bool:
        """Whether every pipeline runs its offer, as far as its ranks have reported."""
        return all(pipeline.in_force_version == pipeline.offer.version for pipeline in self._pipelines)

    def validate(self) -> None:
        """Check the invariants that hold between two inputs."""
        assert self.versions == tuple(offer.version for offer in self)
        assert self._suspended_count == sum(each.suspended is not None for each in self._pipelines)
        assert set(self.versions_in_use) == set(self.versions)
        times_s = self.planned_times_s
        assert self.planned_range_s == ((min(times_s), max(times_s)) if times_s else (0.0, 0.0))
        for offer in self:
            assert len(offer.stage_versions) == len(self._stages)
            assert all(NO_VERSION <= version <= self._record.version for version in offer.stage_versions)
        for rank in self._ranks:
            own = self.of_rank(rank.coordinates)
            sent = self._sent.get(rank.coordinates)
            assert rank.in_force_version >= FOREIGN_VERSION
            number = rank.coordinates.pipeline
            if rank.coordinates not in self._unreconciled.get(number, ()):
                is_lacking = rank.coordinates in self._pipelines[number].lacking
                assert is_lacking == (rank.in_force_version != own.version)
            if rank.state is RankState.CONNECTED:
                assert rank.in_force_version == own.version or sent == _identity(own)
            else:
                assert sent is None
        for pipeline in self._pipelines:
            starts = {
                start
                for place in chain.from_iterable(pipeline.stages)
                if (sent := self._sent.get(place)) is not None
                for version, start, _ in [sent]
                if version == pipeline.offer.stage_versions[place.stage]
                and self._ranks[place].in_force_version != version
            }
            assert len(starts) <= 1, "ranks of one pipeline would switch at different iterations"

    def _renew(self, changing: Mapping[int, Collection[int]], clocks: Clocks, *, is_urgent: bool) -> None:
        """Give stages of pipelines a new version."""
        self._record.version += 1
        self.switch_count += isinstance(clocks, PlannedClocks)
        for number, stages in changing.items():
            pipeline = self._pipelines[number]
            pipeline.late_count = 0
            versions = tuple(
                self._record.version if stage in stages else version
                for stage, version in enumerate(pipeline.offer.stage_versions)
            )
            start_iteration = self._start_iteration(pipeline)
            self._replace(
                number, PipelineOffer(versions, start_iteration, clocks, is_urgent or pipeline.is_urgent)
            )

    def _restart(self, number: int) -> None:
        pipeline = self._pipelines[number]
        self._replace(number, replace(pipeline.offer, start_iteration=self._start_iteration(pipeline)))

    def _replace(self, number: int, offer: PipelineOffer) -> None:
        pipeline = self._pipelines[number]
        before = pipeline.offer.stage_versions
        visited = self._unreconciled[number]
        visited |= pipeline.lacking  # they may have been sent another start iteration
        for stage, version in enumerate(offer.stage_versions):
            if version != before[stage]:
                visited.update(pipeline.stages[stage])
        self._put(pipeline, offer)
        self._changed.add(number)
        self._buffer.store(OfferRecord(number, offer))

    def _put(self, pipeline: _Pipeline, offer: PipelineOffer) -> None:
        move(self._versions, (pipeline.offer.version,), (offer.version,))
        before_s = _planned_times_s(pipeline)
        pipeline.offer = offer
        move(self._planned_times_s, before_s, _planned_times_s(pipeline))
        self._all_versions = None

    def _start_iteration(self, pipeline: _Pipeline) -> int:
        margin = MIN_MARGIN
        if self.iteration_time_s:
            margin = max(margin, 1 + math.ceil(TRANSIT_S / self.iteration_time_s))
        return self._ranks.highest_iteration() + min(MAX_MARGIN, margin << min(pipeline.late_count, 8))

    def _needing(self, number: int) -> list[Rank]:
        """Return the visited ranks of a pipeline that need its offer, in order, and note which lack it."""
        pipeline = self._pipelines[number]
        offer = pipeline.offer
        versions, start_iteration, is_urgent = offer.stage_versions, offer.start_iteration, offer.is_urgent
        found = []
        for place in sorted(self._unreconciled[number], key=attrgetter("stage", "tensor")):
            rank, version = self._ranks[place], versions[place.stage]
            if rank.in_force_version == version:
                pipeline.lacking.discard(place)
                continue
            pipeline.lacking.add(place)
            is_sent = self._sent.get(place) == (version, start_iteration, is_urgent)
            if rank.state is RankState.CONNECTED and not is_sent:
                found.append(rank)
        return found

    def _announce_offered(self, number: int, pipeline: _Pipeline) -> None:
        offer = pipeline.offer
        if offer.version != pipeline.offered_version and pipeline.suspended is None:
            pipeline.offered_version = offer.version
            self._buffer.announce(
                event_pb2.JOB_EVENT_TYPE_PLAN_OFFERED,
                f"pipeline {number} is offered {offer.clocks} as version {offer.version} "
                + ("at once" if offer.is_urgent else f"from iteration {offer.start_iteration}"),
                _details(number, offer),
            )

    def _announce_in_force(self, number: int, pipeline: _Pipeline) -> None:
        offer = pipeline.offer
        if offer.version != pipeline.in_force_version and not pipeline.lacking:
            pipeline.in_force_version = offer.version
            pipeline.late_count = 0
            if pipeline.suspended is not None or offer.version == pipeline.announced_version:
                return
            pipeline.announced_version = offer.version
            self._buffer.announce(
                event_pb2.JOB_EVENT_TYPE_PLAN_IN_FORCE,
                f"version {offer.version} ({offer.clocks}) is in force on pipeline {number}",
                _details(number, offer),
            )


def _share(clocks: Clocks, stage: int) -> tuple[tuple[int, ...] | int, int | None]:
    """Return a stage's share for comparison. Stock under a maximum clock differs from stock."""
    return stage_clocks(clocks, stage), clocks.max_clock_mhz if isinstance(clocks, StockClocks) else None


def _identity(offer: Offer) -> tuple[int, int, bool]:
    """Return the fields that distinguish a rank's offer from earlier ones."""
    return offer.version, offer.start_iteration, offer.is_urgent


def _planned_times_s(pipeline: _Pipeline) -> list[float]:
    """Return the predicted iteration time of a pipeline's plan, offered or suspended; nothing without."""
    clocks = (pipeline.suspended or pipeline.offer).clocks
    return [clocks.plan.iteration_time_s] if isinstance(clocks, PlannedClocks) else []


def _details(number: int, offer: PipelineOffer) -> event_pb2.PipelineClocks:
    version, clocks = offer.version, offer.clocks
    details = event_pb2.PipelineClocks(
        pipeline=number,
        version=version,
        changed_stages=(stage for stage, own in enumerate(offer.stage_versions) if own == version),
        start_iteration=offer.start_iteration,
    )
    match clocks:
        case HoldClocks():
            details.hold.clocks_mhz.extend(clocks.clocks_mhz)
        case PlannedClocks():
            details.plan.iteration_time_s = clocks.plan.iteration_time_s
            details.plan.energy_j = clocks.plan.energy_j
        case StockClocks():
            details.stock.SetInParent()
    return details
