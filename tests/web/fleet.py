"""A coordinator at rest whose jobs were prepared beforehand: many ranks, in seconds."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.batch_cost import TimedCluster
from perseus.service.domain.inputs import AgentDisconnected, RankLeft
from perseus.service.domain.model import JobState, RankLeftReason
from perseus.service.job.machine import JobMachine
from perseus.service.web.page_files import packaged_page
from tests.service.web.page_server import PageServer, serving


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


@asynccontextmanager
async def fleet(folder: Path, machines: Iterable[JobMachine]) -> AsyncIterator[PageServer]:
    """Serve the page of a coordinator that has these jobs."""
    async with serving(folder, is_at_rest=True, files=packaged_page()) as site:
        for each in machines:
            site.coordinator.live.begin(each, [], [])
        yield site
