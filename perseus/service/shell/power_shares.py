"""This coordinator's share in the feeds of a fleet with several slots: read and published once a second.

The database is between the coordinators: each publishes its jobs' curves in its slot's row, and that of
slot 0 the division, too (`fleet.power.division`). Rows go with the group commits of everything else, so
nobody writes them after losing the slot.
"""

import asyncio
from collections.abc import Iterable, Mapping

from perseus.service.domain.power import FeedStatus
from perseus.service.domain.slot_power import Division, KnownSlot, SlotPower
from perseus.service.fleet.power.division import Divider
from perseus.service.fleet.power.machine import FleetMachine
from perseus.service.fleet.power.messages import FeedShared
from perseus.service.shell.writer import Writer
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import SlotPowerEntry


class PowerShares:
    """The part of one slot of several, by number."""

    def __init__(self, store: SqlStore, writer: Writer, slot: int) -> None:
        self._store = store
        self._writer = writer
        self._slot = slot
        self._slots: list[KnownSlot] = []
        self._division = Division()
        self._divider: Divider | None = None
        self._published: tuple[SlotPower, Division] | None = None

    @property
    def is_begun(self) -> bool:
        """Whether the coordinator that divides has begun to."""
        return bool(self._slots) and self._slots[0].is_of_holder

    async def read(self) -> None:
        """Read what all have published."""
        self._slots, self._division = await self._store.load_slot_powers()

    def shared(self, feeds: Iterable[str]) -> list[FeedShared]:
        """Return the input for the fleet about its share in each feed."""
        others = [
            slot.power
            for number, slot in enumerate(self._slots)
            if number != self._slot and slot.power is not None
        ]
        shares = self._division.shares
        return [
            FeedShared(
                feed,
                shares[feed][self._slot] if feed in shares else None,
                sum(power.drawn_w(feed) for power in others),
                sum(power.max_w(feed) for power in others),
            )
            for feed in feeds
        ]

    async def publish(self, fleet: FleetMachine, now_s: float) -> Mapping[str, FeedStatus]:
        """Publish our part, and the division if that is ours to make; then return the statuses of feeds."""
        # In a thread, as it adds up all jobs.
        own = await asyncio.to_thread(fleet.published, self._division.version, now_s)
        division = Division()
        statuses: Mapping[str, FeedStatus] = {}
        if self._slot == 0:
            self._divider = self._divider or Divider(self._division)
            self._slots[0] = KnownSlot(own, is_served=True, is_of_holder=True)
            division = self._divider.divide(self._slots, fleet.to_divide_w(now_s), now_s)
            powers = [slot.power for slot in self._slots if slot.power is not None]
            statuses = {
                feed: fleet.whole_status(
                    [power.statuses[feed] for power in powers if feed in power.statuses], now_s
                )
                for feed in fleet.statuses
            }
        if (own, division) != self._published:
            self._published = own, division
            await self._writer.later([SlotPowerEntry(self._slot, self._store.lease_epoch, own, division)])
        return statuses
