"""Agents' messages are taken in order, and few in each turn of the event loop."""

import asyncio
from itertools import pairwise

from perseus.service.shell.admission import TURN_MESSAGES, Admission


class Readers:
    """Readers that note when they were admitted, by number and turn of the loop."""

    def __init__(self, message_count: int) -> None:
        self.has_room = True
        self.now_s = 0.0
        self.admission = Admission(lambda: self.has_room, lambda: self.now_s)
        self.admitted: list[int] = []
        self._message_count = message_count

    async def read(self, number: int) -> None:
        if not self.admission.is_admitted(self._message_count):
            await self.admission.wait(self._message_count)
        self.admitted.append(number)

    def begin(self, count: int) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.read(number)) for number in range(count)]


async def test_a_turn_takes_only_so_many_messages_and_all_are_taken_in_order() -> None:
    readers = Readers(message_count=TURN_MESSAGES // 4)
    tasks = readers.begin(10)
    counts = [0]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        counts.append(len(readers.admitted))
    assert readers.admitted == list(range(10))
    assert max(after - before for before, after in pairwise(counts)) == 4


async def test_all_wait_in_order_while_there_is_no_room() -> None:
    readers = Readers(message_count=1)
    readers.has_room = False
    tasks = readers.begin(3)
    await asyncio.sleep(0.01)
    assert (readers.admitted, readers.admission.waiting_count) == ([], 3)
    readers.now_s += 2.0
    assert readers.admission.waited_s() == 2.0
    tasks[1].cancel()
    readers.has_room = True
    readers.admission.resume()
    await asyncio.wait(tasks)
    assert readers.admitted == [0, 2]
    assert (readers.admission.waiting_count, readers.admission.waited_s()) == (0, 0.0)
