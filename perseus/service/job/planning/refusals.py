"""Handles refused offers. Part of the state machine.

    reason                  consequence
    ----------------------- ----------------------------------------------------------------------------------
    PAST_START              the same clocks are offered again, with a later start
    UNKNOWN_RANK            none: the rank's agent is about to report whether it serves the rank
    CLOCK_NOT_SUPPORTED     the rank, and its stage on all pipelines, does without these clocks
    any other               the rank, and its stage on all pipelines, stays at stock

Only a refusal of the current offer counts. A rank that refuses stock has nothing else to fall back to.
A rank that claims to be past the start, at an iteration where it can't be beside the others, has to wait
until all ranks have reported another one.
"""

from perseus.service.domain.inputs import OfferAnswered
from perseus.service.domain.messages import NUMBERS, coordinates_to_proto
from perseus.service.domain.model import STOCK_MHZ, Offer, RefusalReason, stage_clocks
from perseus.service.job.command_buffer import CommandBuffer
from perseus.service.job.planning.offers import OfferBoard
from perseus.service.job.ranks.rank_table import RankTable
from perseus.v1 import event_pb2


class Refusals:
    """Takes the refusals of a job's ranks."""

    def __init__(self, ranks: RankTable, offers: OfferBoard, buffer: CommandBuffer) -> None:
        self._ranks = ranks
        self._offers = offers
        self._buffer = buffer

    def take(self, event: OfferAnswered) -> str | None:
        """Take an answer to an offer of this epoch; return what is no longer available, if it names that."""
        offer = self._offers.of_rank(event.rank)
        if event.refusal is None or event.version != offer.version:
            return None
        is_late = event.refusal is RefusalReason.PAST_START
        has_it = self._ranks[event.rank].in_force_version == event.version
        if is_late and (has_it or event.iteration < offer.start_iteration):
            return None  # It refuses an earlier start of this version; the answer to the newer is on its way.
        self._announce(event, offer)
        if is_late:
            self._offers.postpone(event.rank, event.iteration)
            return None
        if event.refusal is RefusalReason.UNKNOWN_RANK:
            return None
        return self._give_up(event, event.refusal, offer)

    def _give_up(self, event: OfferAnswered, reason: RefusalReason, offer: Offer) -> str | None:
        wanted = stage_clocks(offer.clocks, event.rank.stage)
        wanted_mhz = {wanted} if isinstance(wanted, int) else set(wanted)
        wanted_mhz.discard(STOCK_MHZ)
        if not wanted_mhz:
            return None
        if reason is RefusalReason.CLOCK_NOT_SUPPORTED:
            # An agent that does not name the refused clocks refuses all of them.
            refused_mhz = wanted_mhz.intersection(event.refused_clocks_mhz) or wanted_mhz
            return self._ranks.refuse_clocks(event.rank, refused_mhz)
        return self._ranks.leave_at_stock(event.rank, reason)

    def _announce(self, event: OfferAnswered, offer: Offer) -> None:
        assert event.refusal is not None
        self._buffer.announce(
            event_pb2.JOB_EVENT_TYPE_PLAN_REFUSED,
            f"{event.rank} refused version {event.version} ({offer.clocks}): {event.refusal.value}",
            event_pb2.PlanRefused(
                rank=coordinates_to_proto(event.rank),
                version=event.version,
                start_iteration=offer.start_iteration,
                iteration=event.iteration,
                reason=NUMBERS[event.refusal],
                refused_clocks_mhz=event.refused_clocks_mhz,
                agent_message=event.message,
            ),
        )
