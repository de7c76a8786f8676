"""A real coordinator in a process of its own, to be signalled."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

from tests.service.grpc_fakes import TIMEOUT_S, make_settings

PROGRAM = """
import asyncio, json, sys
from perseus import logs
from perseus.service.server import serve
from perseus.service.settings import CoordinatorSettings

logs.configure("info", "json")
settings = CoordinatorSettings(**json.loads(sys.argv[1]))
if __name__ == "__main__":
    asyncio.run(serve(settings))
"""


class Process:
    """A coordinator in a process of its own."""

    def __init__(self, directory: Path, **changes: Any) -> None:
        self.settings = make_settings(directory, **changes).model_dump(mode="json", exclude_unset=True)
        self.program = directory / "coordinator.py"
        self.program.write_text(PROGRAM)
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> str:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(self.program),
            json.dumps(self.settings),
            stderr=asyncio.subprocess.PIPE,
        )
        assert self.process.stderr is not None
        async with asyncio.timeout(TIMEOUT_S):
            async for line in self.process.stderr:
                entry = json.loads(line)
                if entry["event"] == "listening":
                    return str(entry["address"])
        raise AssertionError("the coordinator did not start")

    async def stop(self, number: signal.Signals) -> tuple[int, list[str]]:
        """Send a signal; return the exit status, and the events logged since."""
        assert self.process is not None
        assert self.process.stderr is not None
        self.process.send_signal(number)
        async with asyncio.timeout(TIMEOUT_S):
            lines = (await self.process.stderr.read()).decode().splitlines()
            events = [json.loads(line)["event"] for line in lines if line.startswith("{")]
            return await self.process.wait(), events
