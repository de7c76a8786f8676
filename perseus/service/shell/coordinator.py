"""The coordinator itself: its parts put together, and their life.

A thin shell. `live_runs` feeds the jobs' state machines and carries out what they want; `jobs` is what
clients may ask, `agents` what agents say; the writer stores everything before anything leaves.
"""

from perseus.service.domain.errors import DrainingError
from perseus.service.job.rules import Rules
from perseus.service.shell.agents import Agents
from perseus.service.shell.jobs import Jobs
from perseus.service.shell.live_runs import LiveRuns
from perseus.service.shell.writer import Writer
from perseus.service.solving.job_lane import JobLane
from perseus.service.solving.request_lane import RequestLane
from perseus.service.storage.store import JobStore


class Coordinator:
    """All jobs of one coordinator; everything runs on the event loop.

    Attributes:
        jobs: what clients ask.
        agents: what agents say.
    """

    def __init__(
        self, store: JobStore, job_solver: JobLane, request_solver: RequestLane, rules: Rules
    ) -> None:
        self._writer = Writer(store)
        self._live = LiveRuns(store, self._writer, job_solver, rules)
        self.jobs = Jobs(store, self._writer, request_solver, self._live)
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
