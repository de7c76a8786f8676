"""The coordinator itself: its parts put together, and their life.

A thin shell. `live_runs` feeds the jobs' state machines and carries out what they want; `jobs` is what
clients may ask, `agents` what agents say; the writer stores everything before anything leaves.
"""

import asyncio
import time

from perseus.service.domain.errors import DrainingError
from perseus.service.domain.retention import Retention
from perseus.service.job.rules import Rules
from perseus.service.shell.agents import Agents
from perseus.service.shell.jobs import Jobs
from perseus.service.shell.live_runs import LiveRuns
from perseus.service.shell.solving import SolverPool
from perseus.service.shell.writer import Writer
from perseus.service.storage.store import JobStore

PRUNE_STEP_S = 0.2
"""Between two steps of pruning: commits go first."""

PRUNE_ROUND_S = 60.0
"""Between two rounds."""


class Coordinator:
    """All jobs of one coordinator; everything runs on the event loop.

    Attributes:
        jobs: what clients ask.
        agents: what agents say.
    """

    def __init__(self, store: JobStore, solver: SolverPool, rules: Rules) -> None:
        self._store = store
        self._writer = Writer(store)
        self._live = LiveRuns(store, self._writer, solver, rules)
        self.jobs = Jobs(store, self._writer, solver, self._live)
        self.agents = Agents(store, self._writer, self._live)

    async def start(self) -> None:
        """Load what is stored, and go on with it."""
        await self.jobs.load()
        await self._live.load()
        self.agents.load()

    async def run(self) -> None:
        """Store and carry out what the machines want, until cancelled.

        Raises:
            Exception: the store failed. Nothing can be promised any more: stop.
        """
        await self._writer.run()

    def tick(self) -> None:
        """Let leases run out. To be called about every second."""
        self._live.tick()

    async def prune(self, retention: Retention) -> None:
        """Forget what is no longer to be kept, in the store and here, until cancelled.

        Raises:
            StoreFailedError: nothing can be promised any more: stop.
        """
        while True:
            pruned = await self._store.prune(retention, time.time())
            self.jobs.retire(retention, time.time())
            await asyncio.sleep(PRUNE_ROUND_S if pruned.is_done else PRUNE_STEP_S)

    def drain(self) -> None:
        """Tell all agents and watchers that the coordinator is about to stop."""
        self.agents.drain()
        for run in self._live:
            for watcher in run.watchers:
                watcher.end(DrainingError())

    async def flush(self) -> None:
        """Wait until everything that happened so far is stored and carried out."""
        await self._writer.flush()

    async def close(self) -> None:
        """Drop what is being solved."""
        await self._live.close()
