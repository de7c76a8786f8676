"""A real coordinator in a process of its own, to be signalled."""

import asyncio
import signal
from pathlib import Path

from perseus.demo.processes import Coordinator, entries


class Process:
    """A coordinator in a process of its own."""

    def __init__(self, directory: Path) -> None:
        flags = ("--baseline-iterations=2", "--profile-iterations=2", "--shutdown-grace-s=0.5")
        self.process = Coordinator(directory, directory / "perseus.db", *flags)

    async def start(self) -> str:
        return await asyncio.to_thread(self.process.start)

    async def stop(self, number: signal.Signals) -> tuple[int, list[str]]:
        """Send a signal; return the exit status, and the events logged by then."""
        self.process.signal(number)
        status = await asyncio.to_thread(self.process.wait)
        return status, [entry["event"] for entry in entries(self.process.log)]
