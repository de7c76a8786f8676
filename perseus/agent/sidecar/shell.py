"""The agent's lifecycle: connects, starts and stops its parts. `run` is the entry point.

    trainers ──► admission ──► access, claims     who may train here
        │  └───► ranks ──────► served, restorer  their ranks, each with its GPU
        ▼          ▼
      roster ◄── uplink ─────► stream            messages from and to the coordinator

    inference engines ──► instances ──► serving  statistics in, one clock for all of an instance's GPUs out

All decisions are made elsewhere: `rank.session` (one rank's lifecycle), `stream` (messages to the
coordinator, and registrations), `claims` (who may have which GPU), `restore` (what must be restored).

However the agent ends, it resets the GPUs before it says goodbye. A reset that fails leaves its record on
disk, and so does an agent that dies; every agent restores such records as long as it runs.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from perseus.agent.gpu.executor import GpuExecutor
from perseus.agent.link.packets import Reply
from perseus.agent.rank.events import Tick
from perseus.agent.restore.records import RecordFolder
from perseus.agent.restore.restorer import Restorer
from perseus.agent.sidecar.access import AccessChecker
from perseus.agent.sidecar.admission import Admission
from perseus.agent.sidecar.backends import Backend, Inventory, VisibleGpus, backend
from perseus.agent.sidecar.gpus import RankGpus
from perseus.agent.sidecar.health_client import FOREIGN_CLOCK, UNMARKED
from perseus.agent.sidecar.instance import InstanceParts
from perseus.agent.sidecar.instances import Instances
from perseus.agent.sidecar.local import LocalServer, SocketAccess
from perseus.agent.sidecar.metrics_server import AgentCollector, serving_metrics_of
from perseus.agent.sidecar.optional import OptionalParts
from perseus.agent.sidecar.power_readings import PowerReadings
from perseus.agent.sidecar.ranks import Ranks
from perseus.agent.sidecar.roster import Roster
from perseus.agent.sidecar.self_test import gpu_findings
from perseus.agent.sidecar.settings import AgentSettings
from perseus.agent.sidecar.uplink import Uplink
from perseus.logs import log_end

_log = structlog.get_logger(__name__)

_TICK_S = 0.1
_BEAT_S = 0.5
_STOP_S = 5.0
# Marks and clocks must not wait Python's 5 ms for the thread that computes energy estimates.
_SWITCH_INTERVAL_S = 0.0005


async def run(settings: AgentSettings, lifeline: int | None = None) -> None:
    """Serve this node's trainers until SIGTERM or SIGINT, or until the supervisor is gone.

    `lifeline` is a file descriptor that becomes readable when the supervisor's end of it is closed; it takes
    beats, from when the agent serves until it has restored its GPUs.

    Raises:
        OSError: the local socket can't be opened.
        TlsError: a certificate, its key or the CAs can't be used.
        ServingError: an instance's profile can't be used.
        RecordError: a GPU could not be restored; its record stays.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if lifeline is not None:
        loop.add_reader(lifeline, stop.set)
    beating: asyncio.Task[None] | None = None
    try:
        async with serving(settings) as failure:
            if lifeline is not None:
                beating = asyncio.create_task(_beat(lifeline))
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait([stopped, failure], return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if failure.done():
                try:
                    failure.result()
                except Exception as error:  # said before the GPUs are restored, which may take long
                    log_end(error)
                    raise
    finally:
        if beating is not None:
            beating.cancel()
        if lifeline is not None:
            loop.remove_reader(lifeline)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _beat(lifeline: int) -> None:
    """Show the supervisor that the event loop runs."""
    os.set_blocking(lifeline, False)
    while True:
        with contextlib.suppress(OSError):  # it is stopped, or gone
            os.write(lifeline, b".")
        await asyncio.sleep(_BEAT_S)


@asynccontextmanager
async def serving(settings: AgentSettings) -> AsyncIterator[asyncio.Task[None]]:
    """Run an agent until the context is left; yields the task that ends only if the agent fails.

    Raises:
        OSError, TlsError, ServingError, RecordError: as `run`.
    """
    gpus = backend(settings)
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible_gpus = gpus if visible_devices is None else VisibleGpus(gpus, visible_devices)
    agent = Agent(settings, visible_gpus, gpus)
    access = SocketAccess(int(settings.socket_mode, 8), settings.socket_group)
    metrics = contextlib.ExitStack()
    async with contextlib.AsyncExitStack() as unless_opened:
        unless_opened.callback(agent.close)
        server = LocalServer(settings.socket, access, agent.ranks.converse)
        unless_opened.push_async_callback(server.close)
        metrics.enter_context(serving_metrics_of(agent.collector, settings))
        unless_opened.pop_all()
    working = asyncio.create_task(agent.work())
    _log.info("serving", socket=str(settings.socket), coordinator=settings.coordinator)
    try:
        yield working
    finally:
        await asyncio.to_thread(metrics.close)
        await agent.stop()
        await server.close()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await agent.restore_all()
        _log.info("stopped")


class Agent:
    """All ranks of this node, and their coordinators.

    Trainers may use `gpus`; records of dead agents are restored on `all_gpus`.

    Attributes:
        ranks: serves the connections of the local socket.
        collector: reads the agent's metrics.
    """

    def __init__(self, settings: AgentSettings, gpus: Backend, all_gpus: Backend) -> None:
        self._settings = settings
        executor = GpuExecutor()
        self._optional = OptionalParts()
        records = RecordFolder(settings.restore_folder)
        self._restorer = Restorer(records, all_gpus.open, executor)
        self._access = AccessChecker(gpus, settings.grants, executor)
        find = gpu_findings if settings.gpu_backend == "nvml" else None
        self._inventory = Inventory(gpus, executor, find=find)
        self._roster = Roster()
        rank_gpus = RankGpus(settings, gpus, executor, records, self._restorer, self._optional)
        self._uplink = Uplink(settings, self._roster, rank_gpus.counters)
        self._connecting: asyncio.Task[None] | None = None
        admission = Admission(self._roster, self._access, rank_gpus.counters)
        self._instances = Instances(settings, InstanceParts(gpus, executor, self._access, rank_gpus))
        self.ranks = Ranks(
            self._roster, admission, rank_gpus, self._uplink, self._health, self._instances.converse
        )
        self._readings = PowerReadings(gpus, executor, self._roster.served, self._uplink)
        self.collector = AgentCollector(
            self._roster.served,
            self._uplink,
            self._restorer,
            rank_gpus.counters,
            self._optional,
            self._instances.by_name,
        )

    async def work(self) -> None:
        """Run the streams, the ticks, the restorer and the optional parts until cancelled or a failure."""
        async with asyncio.TaskGroup() as parts:
            self._connecting = parts.create_task(self._uplink.run())
            parts.create_task(self._tick())
            self._instances.start(parts, self._optional)
            parts.create_task(self._optional.keep_running("inventory", self._inventory.report))
            parts.create_task(self._optional.keep_running("power readings", self._readings.report))
            if not self._settings.observe:
                parts.create_task(self._restorer.keep_restoring())

    def close(self) -> None:
        """End the threads of an agent that has not served any trainer."""
        self._access.close()
        self.ranks.close()

    async def stop(self) -> None:
        """Return every GPU to stock, then say goodbye."""
        self._roster.is_stopping = True
        await asyncio.gather(self.ranks.stop(), self._instances.stop())
        self._access.close()
        await asyncio.to_thread(self.ranks.close)
        self._uplink.close("the agent was stopped")
        if self._connecting is not None:
            await asyncio.wait([self._connecting], timeout=_STOP_S)

    async def restore_all(self) -> None:
        """Restore the GPUs of dead agents, retrying for a while. Raises `RecordError` if that fails."""
        if not self._settings.observe:
            await self._restorer.restore_all()

    async def _health(self) -> Reply:
        """Report whether GPUs can be served; an absent coordinator does not make the agent unhealthy."""
        found = await self._inventory.refresh()
        parts = [
            f"GPUs: {found.gpu_count}",
            self._roster.describe(),
            self._uplink.describe(),
            *found.problems,
        ]
        reason = UNMARKED if self._roster.unmarked else FOREIGN_CLOCK if self._roster.foreign_clocks else ""
        return Reply(found.gpu_count > 0, reason if found.gpu_count else "NO_GPU", "; ".join(parts))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._roster.dispatch_to_all(Tick())
