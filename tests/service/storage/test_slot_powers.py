"""What coordinators of slots publish for power budgets is read by all, with who serves them."""

from perseus.service.domain.power import FeedStatus
from perseus.service.domain.slot_power import Curve, Division, KnownSlot, SlotPower
from perseus.service.storage.store import SlotPowerEntry
from tests.service.storage.stores import held_slots

STATUS = FeedStatus(
    "a", 4e5, False, True, ("x",), (), 1 / 3, 2e5, 0.0, 4e5, ("x", "y"), None, None, 0.0, False
)
POWER = SlotPower(2, {"a": Curve((1e5, 2e5 / 3), (0.5, 0.0), 2.0)}, {"a": STATUS})
DIVISION = Division(3, {"a": (0.25, 0.75)}, {"a": (0.3, 0.7)})


async def test_slots_are_known_with_their_holders(url: str) -> None:
    async with held_slots(url) as slots:
        stores = slots.stores
        assert await stores[1].load_slot_powers() == ([KnownSlot(None, True, False)] * 2, Division())
        for slot, store in enumerate(stores):
            division = DIVISION if slot == 0 else Division()
            await store.write([SlotPowerEntry(slot, store.lease_epoch, POWER, division)])
        assert await stores[1].load_slot_powers() == ([KnownSlot(POWER, True, True)] * 2, DIVISION)
        slots.members[0].depart()
        left, kept = await stores[1].load_slot_powers()
        assert (left[0], kept) == (KnownSlot(POWER, is_served=False, is_of_holder=True), DIVISION)
        slots.members[1].take(0, 1)
        taken, _ = await stores[1].load_slot_powers()
        assert taken[0] == KnownSlot(POWER, is_served=True, is_of_holder=False)
