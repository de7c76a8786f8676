"""A coordinator at rest whose jobs were prepared beforehand: many ranks, in seconds."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.batch_cost import TimedCluster
from perseus.service.domain.inputs import AgentDisconnected, RankLeft
from perseus.service.domain.model import JobState, RankLeftReason
from perseus.service.job.machine import JobMachine
from perseus.service.shell.coordinator import Coordinator
from tests.service.web.page_server import Site, site


def machine(
    job_id: str,
    rank_count: int,
    state: JobState = JobState.PLANNED,
    *,
    silent: Iterable[int] = (),
    gone: int = -1,
) -> JobMachine:
    """Return a job with all its ranks, in a state.

    `silent`: pipelines whose agents' streams then end; `gone`: one whose trainers have died.
    """
    cluster = TimedCluster(rank_count, job_id)
    if state is JobState.WAITING:
        return cluster.machine
    cluster.join_all()
    cluster.iterate_until(state)
    cluster.iterate(6)
    for pipeline in silent:
        cluster.send(AgentDisconnected(f"agent-{pipeline}"))
    for place in cluster.ranks:
        if place.pipeline == gone:
            cluster.send(RankLeft(place, f"agent-{gone}", RankLeftReason.TRAINER_GONE))
    return cluster.machine


class AtRest(Coordinator):
    """Only writes: no lease expires."""

    async def run(self) -> None:
        await self.writer.run()


@asynccontextmanager
async def fleet(folder: Path, machines: Iterable[JobMachine]) -> AsyncIterator[Site]:
    """Serve the page of a coordinator that has these jobs."""
    async with site(folder, AtRest) as at_rest:
        for each in machines:
            at_rest.coordinator.live.begin(each, [], [])
        yield at_rest
