"""Agents' messages are taken in order, and few in each turn of the event loop."""

import asyncio
from itertools import pairwise
from typing import Any, cast

import pytest

from perseus.service.shell import writer
from perseus.service.shell.admission import TURN_MESSAGES, Admission
from perseus.service.shell.writer import Writer
from perseus.service.storage.sql_store import SqlStore


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


class StoresAtOnce:
    async def write(self, entries: list[Any]) -> None:
        pass


async def test_no_reader_is_admitted_amid_thousands_of_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offers to all ranks come before what agents send about the plans that they replace."""
    monkeypatch.setattr(writer, "GATHERING_S", 0.0)
    monkeypatch.setattr(writer, "TURN_S", 0.0)  # each action is a turn
    written = Writer(cast("SqlStore", StoresAtOnce()))
    running = asyncio.create_task(written.run())
    seen: list[str] = []

    async def read() -> None:
        await written.admission.wait(1)
        seen.append("reader")

    def offer() -> None:
        seen.append("offer")

    reading: list[asyncio.Task[None]] = []
    await written.later([], [offer, lambda: reading.append(asyncio.create_task(read())), *[offer] * 20])
    await asyncio.gather(*reading)
    assert seen == ["offer"] * 21 + ["reader"]
    running.cancel()
