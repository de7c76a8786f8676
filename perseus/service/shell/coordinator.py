"""The coordinator: assembles its parts and runs them.

A thin shell. `live_runs` feeds the jobs' state machines and carries out their commands; `jobs` serves clients
and `agents` serves agents; the writer stores everything before anything leaves.
"""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import structlog

from perseus.service.domain.errors import DatabaseUnreadableError, DrainingError
from perseus.service.domain.ledger import UNKNOWN, Rates
from perseus.service.domain.limits import Limits
from perseus.service.domain.members import ALONE, Fleet
from perseus.service.domain.retention import Retention
from perseus.service.fleet.ledger import constant
from perseus.service.fleet.power.feeds import Feeds
from perseus.service.job.rules import Rules
from perseus.service.shell.agents import Agents
from perseus.service.shell.gpu_claims import ClaimWriter
from perseus.service.shell.job_clock import JobClock
from perseus.service.shell.jobs import Jobs
from perseus.service.shell.ledger import Ledger
from perseus.service.shell.live_runs import LiveRuns
from perseus.service.shell.measured_loop import MeasuredLoop
from perseus.service.shell.power import Power
from perseus.service.shell.quotas import Quotas
from perseus.service.shell.signal_targets import SignalTargets
from perseus.service.shell.signals import NamedSignal, Signals
from perseus.service.shell.tokens import Tokens
from perseus.service.shell.writer import Writer
from perseus.service.solving.worker_pool import WorkerPool
from perseus.service.storage.sql_store import SqlStore

log = structlog.get_logger(__name__)

NO_FEEDS = Feeds()
"""None is configured: only the default feed exists."""

TICK_S = 1.0
"""How often leases are checked."""

PRUNE_STEP_S = 0.2
"""Between two steps of pruning, so that commits go first."""

PRUNE_ROUND_S = 60.0
"""Between two rounds of pruning."""


class Coordinator:
    """All jobs of one coordinator; everything runs on the event loop.

    Attributes:
        jobs: serves clients' requests about jobs.
        agents: serves agents.
        tokens: authenticates both.
        ledger: adds up what jobs have used and saved.
        power: keeps power budgets.
        signals: follows carbon intensity and price.
        signal_targets: sets the target iteration times of jobs that follow a signal.
        quotas: counts and limits what each principal has.
        live: the jobs' latest runs.
        fleet: the coordinators on the database, and what of it this one serves.
        writer: stores.
        job_solver, request_solver: solve for jobs, and for clients' requests.
        store_size_bytes: size of the database, None until it is known.
        standbys: how many standbys the database has, by kind, as far as it is known.
        lag_s, late_total_s: how late the loop's last tick was, and the sum over all ticks.
    """

    def __init__(
        self,
        store: SqlStore,
        job_solver: WorkerPool,
        request_solver: WorkerPool,
        rules: Rules,
        retention: Retention,
        limits: Limits | None = None,
        rates: Rates = UNKNOWN,
        feeds: Feeds = NO_FEEDS,
        signals: Sequence[NamedSignal] = (),
        fleet: Fleet = ALONE,
    ) -> None:
        self._store = store
        self.fleet = fleet
        self._retention = retention
        self.writer = Writer(store)
        self._clock = JobClock(TICK_S, time.monotonic)
        self.lag_s = self.late_total_s = 0.0
        # When the loop's idle time was last looked at, and that.
        self._looked_at = time.monotonic(), 0.0
        self.store_size_bytes: int | None = None
        self.standbys: Mapping[str, int] = {}
        self.job_solver, self.request_solver = job_solver, request_solver
        self.signals, self._has_signals = Signals(signals, rates), bool(signals)
        self.live = LiveRuns(store, self.writer, job_solver, rules, self._clock, self._rates_at, fleet)
        self.quotas = Quotas(limits or Limits(), time.monotonic)
        self.jobs = Jobs(store, self.writer, request_solver, self.live, self.quotas)
        # Slots that share a database have a fence each.
        is_shared = len(fleet.slots) > 1 and store.lease_epoch > 0
        self._claim_writer = ClaimWriter(store, self.live, fleet.served or 0) if is_shared else None
        self.agents = Agents(store, self.writer, self.live, feeds, claim_writer=self._claim_writer)
        self.tokens = Tokens(store, self.writer, fleet)
        self.ledger = Ledger(store, self.writer, constant(rates), retention.ledger_age_s, fleet)
        self.power = Power(store, self.writer, self.live, self.agents, self.quotas, feeds, retention, fleet)
        self.signal_targets = SignalTargets(self.live, self.signals, self.power.shares)

    def _rates_at(self, job_id: str, time_s: float) -> Rates:
        return self.signals.rates_at(self.power.shares(job_id), time_s)

    async def start(self) -> None:
        """Load what is stored, and continue from it."""
        await self.jobs.load()
        await self.live.load()
        await self.agents.load()
        await self.tokens.load()
        await self.power.load()

    async def run(self) -> None:
        """Store, carry out commands, tick, and prune, until cancelled.

        Raises:
            Exception: the store failed. Nothing can be guaranteed any more: stop.
        """
        work = (
            self.writer.run(),
            self._tick(),
            self.power.run(),
            *([self._claim_writer.run()] if self._claim_writer is not None else []),
            *([self.signals.run()] if self._has_signals else []),
            self.signal_targets.run(),
            self.ledger.run(),
            self.tokens.run(),
            self._prune(),
            self._store.watch(),
        )
        parts = [asyncio.ensure_future(part) for part in work]
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in parts:
                part.cancel()
            ends = await asyncio.gather(*parts, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _tick(self) -> None:
        while True:
            self.lag_s = self._clock.tick(self.writer.admission.waited_s())
            self.late_total_s += self.lag_s
            if self.lag_s > TICK_S:
                log.warning(
                    "event loop stood still: leases are credited with it", late_s=round(self.lag_s, 3)
                )
            self.live.tick()
            self.agents.tick(self._busy_share())
            self.tokens.tick()
            await asyncio.sleep(TICK_S)

    def _busy_share(self) -> float:
        """Return the share of the time since the last call during which the loop had work; 0 if unknown."""
        loop = asyncio.get_running_loop()
        if not isinstance(loop, MeasuredLoop):
            return 0.0
        before_s, before_idle_s = self._looked_at
        self._looked_at = now_s, idle_s = time.monotonic(), loop.idle_s
        return 1.0 - (idle_s - before_idle_s) / max(now_s - before_s, 1e-9)

    async def _prune(self) -> None:
        """Prune the store and evict old runs from memory, in small steps."""
        evicted_s = -math.inf
        while True:
            is_done = True
            with suppress(DatabaseUnreadableError):
                is_done = (await self._store.prune(self._retention, time.time())).is_done
            if is_done or time.monotonic() >= evicted_s + PRUNE_ROUND_S:  # a round may take hours
                evicted_s = time.monotonic()
                self.jobs.evict(self._retention, time.time())
                with suppress(DatabaseUnreadableError):
                    self.store_size_bytes = await self._store.size_bytes()
                    self.standbys = await self._store.standbys()
            await asyncio.sleep(PRUNE_ROUND_S if is_done else PRUNE_STEP_S)

    def late_s(self) -> float:
        """How long something has waited to be stored, or the event loop has stood still, seconds."""
        return max(self.lag_s, self.writer.late_s())

    def drain(self) -> None:
        """Announce to all agents and watchers that the coordinator is about to stop."""
        self.agents.drain()
        for run in self.live:
            for watcher in run.watchers:
                watcher.end(DrainingError())
        self.power.end(DrainingError())

    async def flush(self) -> None:
        """Wait until everything that happened so far is stored and carried out."""
        await self.writer.flush()

    async def close(self) -> None:
        """Cancel all solves."""
        await self.jobs.close()
        await self.live.close()
