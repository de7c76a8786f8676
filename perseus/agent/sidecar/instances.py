"""The instances of inference engines whose clocks this agent sets, and the connections of their plug-ins."""

import asyncio
import time

from perseus.agent.link import packets
from perseus.agent.link.packets import (
    LATENCY_RATIO,
    EngineHello,
    EngineReport,
    InstancesQuestion,
    MalformedPacket,
    Reply,
)
from perseus.agent.sidecar.instance import Instance, InstanceParts
from perseus.agent.sidecar.local import ProbeConnection
from perseus.agent.sidecar.optional import OptionalParts
from perseus.agent.sidecar.settings import AgentSettings
from perseus.metrics.exposition import check_installed
from perseus.regular_file import read_bounded
from perseus.serving.profile_csv import read_profile
from perseus.serving.stats import EngineStats, LatencyCount


class Instances:
    """All configured instances, by name.

    Raises:
        OSError, ServingError: a profile can't be read.
        MetricsUnavailableError: metrics are to be read, and the package for it is not installed.
    """

    def __init__(self, settings: AgentSettings, parts: InstanceParts) -> None:
        if any(each.metrics is not None for each in settings.instances.values()):
            check_installed()
        self._access = parts.access
        kind = "observed" if settings.observe else "controlled"
        self._tasks: list[asyncio.Task[None]] = []
        self.by_name = {
            name: Instance(
                name,
                each,
                read_profile(read_bounded(each.profile).decode(errors="replace"), str(each.profile)),
                settings.restore_folder.with_name("serving") / f"{name}.{kind}.json",
                parts,
            )
            for name, each in settings.instances.items()
        }

    def start(self, parts: asyncio.TaskGroup, optional: OptionalParts) -> None:
        """Run all instances; a failure of one is logged, and it is run again."""
        self._tasks = [
            parts.create_task(optional.keep_running(f"instance {name}", instance.run))
            for name, instance in self.by_name.items()
        ]

    async def stop(self) -> None:
        """End control; all GPUs are back at stock when this returns."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def converse(self, connection: ProbeConnection, hello: EngineHello | InstancesQuestion) -> None:
        """Serve the connection of a plug-in to its end, or answer a question. Raises `MalformedPacket`."""
        await connection.pay_hello()
        if isinstance(hello, InstancesQuestion):
            connection.send(packets.Instances([each.view() for each in self.by_name.values()]))
            return
        user = await self._access.user(connection.peer)
        found = [
            each
            for each in self.by_name.values()
            if each.settings.user in (user.name, str(user.uid))
            and hello.instance in ("", each.name)
            and each.settings.metrics is None
        ]
        if len(found) != 1:
            which = f"named {hello.instance!r}" if hello.instance else "(PERSEUS_INSTANCE may name it)"
            connection.end(
                Reply(
                    False,
                    "NO_INSTANCE",
                    f"expected one configured instance of user {user} without metrics, {which}, "
                    f"found {len(found)}",
                )
            )
            return
        (instance,) = found
        connection.reply(Reply(True, message=f"instance {instance.name}"))
        instance.sources.join(connection, time.monotonic(), hello.engine_index)
        try:
            while messages := await connection.receive():
                for message in messages:
                    if not isinstance(message, EngineReport):
                        raise MalformedPacket(f"expected an engine's report, found {type(message).__name__}")
                    instance.sources.report(connection, time.monotonic(), stats_of(message))
        finally:
            instance.sources.leave(connection)


def stats_of(report: EngineReport) -> EngineStats:
    """Return a plug-in's interval as the controller takes it."""

    def latencies(buckets: dict[int, int]) -> list[LatencyCount]:
        return [
            LatencyCount(LATENCY_RATIO**bucket, LATENCY_RATIO ** (bucket + 1), count)
            for bucket, count in buckets.items()
        ]

    return EngineStats(
        length_s=report.length_s,
        running_count=report.running_count,
        waiting_count=report.waiting_count,
        kv_usage=report.kv_usage,
        prompt_tokens=report.prompt_tokens,
        generation_tokens=report.generation_tokens,
        ttft=latencies(report.ttft),
        itl=latencies(report.itl),
        itl_sum_s=report.itl_sum_s,
        step_count=report.step_count,
    )
