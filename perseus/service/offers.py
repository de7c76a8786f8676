"""What clocks each pipeline of a job should have, and the way there. Part of the state machine.

A version belongs to clocks, rises within the job and is never used again. All ranks of a pipeline get the
same version and the same start iteration. A rank that has already begun the start iteration refuses; then
the pipeline keeps the version and is offered it anew with a later start.

The start lies a margin above the highest iteration that any rank reported. Telemetry comes when an
iteration has ended and the next is running, so two is the least; short iterations need enough of them to
cover the way (`TRANSIT_S`). The margin doubles with every refusal of the same version.

`settle` sends offers. It looks at how things stand, never at how they came about: every connected rank that
neither has its pipeline's version in force nor was sent the present offer is sent it. So a rank that
resumes with the right version gets nothing, and one that comes back with another, or fell back to stock,
gets the offer.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from perseus.service.commands import OfferRecord, SendOffer
from perseus.service.journal import Journal
from perseus.service.model import (
    FOREIGN_VERSION,
    NO_VERSION,
    STOCK,
    Clocks,
    EventType,
    Offer,
    PlannedClocks,
    Rank,
    RankState,
)
from perseus.service.ranks import RankTable
from perseus.service.specification import Coordinates

TRANSIT_S = 0.5
"""Time that a report needs to get here, and an offer to get back, with room to spare."""

LEAST_MARGIN = 2
MOST_MARGIN = 256

_NO_OFFER = Offer(NO_VERSION, 0, STOCK)


@dataclass(slots=True)
class _Pipeline:
    """The offer, how often it came too late, and the version that was last in force on all ranks."""

    offer: Offer = _NO_OFFER
    late_count: int = 0
    announced_version: int = NO_VERSION


class OfferBoard:
    """One offer per pipeline, and what was sent of it.

    Attributes:
        version: the highest version used so far.
        iteration_time_s: that of the latest iteration, 0 if unknown; short iterations need a wider margin.
    """

    def __init__(self, pipeline_count: int, ranks: RankTable, journal: Journal) -> None:
        self.version = NO_VERSION
        self.iteration_time_s = 0.0
        self._ranks = ranks
        self._journal = journal
        self._pipelines = [_Pipeline() for _ in range(pipeline_count)]
        self._by_pipeline: list[list[Coordinates]] = [[] for _ in range(pipeline_count)]
        for rank in ranks:
            self._by_pipeline[rank.coordinates.pipeline].append(rank.coordinates)
        # The (version, start iteration) sent to each rank on its present stream.
        self._sent: dict[Coordinates, tuple[int, int]] = {}
        # Pipelines of which something has changed: only these need a look, however large the job is.
        self._unsettled: set[int] = set()

    def __getitem__(self, pipeline: int) -> Offer:
        return self._pipelines[pipeline].offer

    def __iter__(self) -> Iterator[Offer]:
        return (pipeline.offer for pipeline in self._pipelines)

    def __len__(self) -> int:
        return len(self._pipelines)

    def restore(self, version: int, offers: Iterable[OfferRecord]) -> None:
        """Take what is stored."""
        self.version = version
        for record in offers:
            pipeline = self._pipelines[record.pipeline]
            pipeline.offer, pipeline.announced_version = record.offer, record.offer.version

    def wish(self, pipelines: Iterable[int], clocks: Clocks) -> None:
        """Let pipelines have these clocks, under one new version; those that have them keep theirs."""
        changing = [number for number in pipelines if self._pipelines[number].offer.clocks != clocks]
        if changing:
            self._renew(changing, clocks)

    def forget_sent(self, place: Coordinates) -> None:
        """What was sent to a rank is of no use any more: its stream ended, or it fell back to stock."""
        self._sent.pop(place, None)
        self._unsettled.add(place.pipeline)

    def postpone(self, number: int) -> None:
        """Offer a pipeline its clocks anew, later: they came too late for a rank."""
        pipeline = self._pipelines[number]
        pipeline.late_count += 1
        self._restart(number)

    def settle(self) -> None:
        """Send offers to the ranks that need one, and announce plans that are now in force everywhere."""
        for number in sorted(self._unsettled | self._ranks.take_changed_pipelines()):
            pipeline = self._pipelines[number]
            ranks = [self._ranks[place] for place in self._by_pipeline[number]]
            needing = self._needing(pipeline, ranks)
            if needing and pipeline.offer.version == NO_VERSION:
                self._renew([number], STOCK)  # Something unknown is in force: stock has to be said.
                needing = self._needing(pipeline, ranks)
            elif needing and pipeline.offer.start_iteration < self._start_iteration(pipeline):
                self._restart(number)
                needing = self._needing(pipeline, ranks)
            for rank in needing:
                offer = pipeline.offer
                self._sent[rank.coordinates] = (offer.version, offer.start_iteration)
                self._ranks.change(replace(rank, offered_version=offer.version))
                self._journal.do(SendOffer(rank.coordinates, rank.instance_id, offer))
            self._announce_in_force(number, pipeline, ranks)
        self._unsettled.clear()

    def validate(self) -> None:
        """Check what must always hold between two inputs."""
        assert all(NO_VERSION <= offer.version <= self.version for offer in self)
        for rank in self._ranks:
            offer = self[rank.coordinates.pipeline]
            sent = self._sent.get(rank.coordinates)
            assert rank.in_force_version >= FOREIGN_VERSION
            assert rank.offered_version <= offer.version
            if rank.state is RankState.CONNECTED:
                assert rank.in_force_version == offer.version or sent == (
                    offer.version,
                    offer.start_iteration,
                )
            else:
                assert sent is None
        for number, pipeline in enumerate(self._pipelines):
            starts = {
                start
                for place in self._by_pipeline[number]
                if (sent := self._sent.get(place)) is not None
                for version, start in [sent]
                if version == pipeline.offer.version and self._ranks[place].in_force_version != version
            }
            assert len(starts) <= 1, "a pipeline would be switched in halves"

    def _renew(self, numbers: Sequence[int], clocks: Clocks) -> None:
        self.version += 1
        for number in numbers:
            pipeline = self._pipelines[number]
            pipeline.late_count = 0
            pipeline.offer = Offer(self.version, self._start_iteration(pipeline), clocks)
            self._unsettled.add(number)
            self._journal.store(OfferRecord(number, pipeline.offer))
            self._journal.announce(
                EventType.PLAN_OFFERED,
                f"pipeline {number} is offered {clocks} as version {self.version} "
                f"from iteration {pipeline.offer.start_iteration}",
                **_evidence(number, pipeline.offer),
            )

    def _restart(self, number: int) -> None:
        pipeline = self._pipelines[number]
        pipeline.offer = replace(pipeline.offer, start_iteration=self._start_iteration(pipeline))
        self._unsettled.add(number)
        self._journal.store(OfferRecord(number, pipeline.offer))

    def _start_iteration(self, pipeline: _Pipeline) -> int:
        margin = LEAST_MARGIN
        if self.iteration_time_s:
            margin = max(margin, 1 + math.ceil(TRANSIT_S / self.iteration_time_s))
        return self._ranks.highest_iteration() + min(MOST_MARGIN, margin << min(pipeline.late_count, 8))

    def _needing(self, pipeline: _Pipeline, ranks: Iterable[Rank]) -> list[Rank]:
        offer = pipeline.offer
        return [
            rank
            for rank in ranks
            if rank.state is RankState.CONNECTED
            and rank.in_force_version != offer.version
            and self._sent.get(rank.coordinates) != (offer.version, offer.start_iteration)
        ]

    def _announce_in_force(self, number: int, pipeline: _Pipeline, ranks: Iterable[Rank]) -> None:
        version = pipeline.offer.version
        if version != pipeline.announced_version and all(rank.in_force_version == version for rank in ranks):
            pipeline.announced_version = version
            pipeline.late_count = 0
            self._journal.announce(
                EventType.PLAN_IN_FORCE,
                f"version {version} ({pipeline.offer.clocks}) is in force on pipeline {number}",
                **_evidence(number, pipeline.offer),
            )


def _evidence(number: int, offer: Offer) -> dict[str, object]:
    evidence: dict[str, object] = {
        "pipeline": number,
        "version": offer.version,
        "start_iteration": offer.start_iteration,
        "clocks": offer.clocks,
    }
    if isinstance(offer.clocks, PlannedClocks):
        evidence["iteration_time_s"] = offer.clocks.plan.iteration_time_s
        evidence["energy_j"] = offer.clocks.plan.energy_j
    return evidence
