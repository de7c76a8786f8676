import asyncio
from typing import Any, cast

import pytest

from perseus.service.shell import writer
from perseus.service.shell.writer import Writer
from perseus.service.storage.sql_store import SqlStore


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
