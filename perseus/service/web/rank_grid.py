"""All ranks of a job in columns, for the grid: made in batches, the same for all readers."""

import asyncio
import gzip
from functools import partial

from perseus.service.domain.model import RankState
from perseus.service.shell.jobs import LATEST, Jobs
from perseus.service.web.json_text import as_json
from perseus.service.web.single_flight_cache import SingleFlightCache
from perseus.v1 import job_pb2

_TURN_RANKS = 1_024
"""Ranks read at a time: some milliseconds."""

_MAX_JOBS = 32
"""Number of jobs whose answers are kept."""

_STATES = tuple(RankState)
_STATE_NUMBERS = {state: number for number, state in enumerate(_STATES)}
_COLUMNS = ("state", "iteration", "clock_mhz", "slowness", "power_w")


class RankGrid:
    """Answers requests for the ranks of jobs."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._cache: SingleFlightCache[tuple[bytes, bytes]] = SingleFlightCache(_MAX_JOBS)

    async def answer(self, job_id: str) -> tuple[bytes, bytes]:
        """Return the JSON of a job's ranks, plain and compressed with gzip.

        Raises:
            CoordinatorError: there is no such job.
        """
        job = await self._jobs.job(job_id, LATEST, is_full=False)
        return await self._cache.get((job_id, job.run_number), partial(self._make, job))

    async def _make(self, job: job_pb2.Job) -> tuple[bytes, bytes]:
        counts = job.parallelism
        step = max(1, _TURN_RANKS // (counts.stage_count * counts.tensor_count))
        texts: dict[str, list[str]] = {name: [] for name in _COLUMNS}
        for pipeline in range(0, counts.pipeline_count, step):
            found = await self._jobs.rank_columns(job.job_id, pipeline, step)
            columns = (
                [_STATE_NUMBERS[state] for state in found.state],
                found.iteration,
                [_rounded(value, 1) for value in found.clock_mhz],
                [_rounded(value, 4) for value in found.slowness],
                [_rounded(value, 1) for value in found.power_w],
            )
            for name, column in zip(_COLUMNS, columns, strict=True):
                texts[name].append(as_json(column)[1:-1])
            await asyncio.sleep(0)
        now = await self._jobs.job(job.job_id, LATEST, is_full=False)
        if now.run_number != job.run_number:  # another run has begun meanwhile
            return await self._make(now)
        head = {
            "job_id": job.job_id,
            "run_number": job.run_number,
            "shape": [counts.pipeline_count, counts.stage_count, counts.tensor_count],
            "states": [state.name for state in _STATES],
        }
        parts = [as_json(head)[:-1], *(f',"{name}":[{",".join(some)}]' for name, some in texts.items()), "}"]
        body = "".join(parts).encode()
        return body, await asyncio.to_thread(gzip.compress, body, 1)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
