"""The cost of ended runs for the coordinator: memory, and time to start."""

import asyncio
import logging
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import structlog

from benchmarks.harness import Column, Table, main
from perseus.schedule_name import ScheduleName
from perseus.service.domain.inputs import FinishRequested, RankJoined, RankLeft
from perseus.service.domain.model import Gpu, RankLeftReason
from perseus.service.domain.retention import Retention
from perseus.service.domain.specification import (
    JobSpec,
    NamedSchedule,
    Parallelism,
    Registration,
)
from perseus.service.job.rules import Rules
from perseus.service.shell.coordinator import Coordinator
from perseus.service.solving.worker_pool import JOBS, REQUESTS, WorkerPool
from perseus.service.storage.sql_store import SqlStore

RUN_COUNT = 200
_COUNTS = Parallelism(16, 8, 8)
_SPEC = NamedSchedule(ScheduleName.ONE_FORWARD_ONE_BACKWARD, 16)
_CLOCKS_MHZ = tuple(range(1980, 345 - 1, -15))


def run() -> Sequence[Table]:
    rows: list[tuple[str | int | float | None, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        for count in (0, RUN_COUNT):
            path = Path(folder) / f"{count}.db"
            (grown_mb,) = _in_a_process(_train, path, count)
            start_mb, start_s = _in_a_process(_start, path)
            rows.append((count, grown_mb, start_mb, start_s))
    return [
        Table(
            "Runs of 1,024 ranks that have ended",
            (
                Column("runs"),
                Column("memory still used [MiB]", ".0f"),
                Column("memory after a start [MiB]", ".0f"),
                Column("start [s]", ".2f"),
            ),
            tuple(rows),
            "Without iterations and frontiers. Memory is the growth of the process.",
        )
    ]


def _in_a_process(work: Callable[..., tuple[float, ...]], *arguments: object) -> tuple[float, ...]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


async def _opened(path: Path) -> Coordinator:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    store = await SqlStore.open(path)
    return Coordinator(store, WorkerPool(JOBS, 0, 60.0), WorkerPool(REQUESTS, 0, 60.0), Rules(), Retention())


def _train(path: Path, count: int) -> tuple[float]:
    """Let runs begin and end, all their ranks one after the other; return the memory still used."""

    async def train() -> tuple[float]:
        coordinator = await _opened(path)
        await coordinator.start()
        working = asyncio.create_task(coordinator.run())
        before_mb = _resident_mb()
        for number in range(count):
            spec = JobSpec(f"job-{number}", _COUNTS, _SPEC)
            await coordinator.jobs.register(spec, Registration(f"request-{number}"))
            live = coordinator.live.find(spec.job_id)
            places = list(_COUNTS.all_coordinates())
            for place in places:
                gpu = Gpu(f"GPU-{number}-{place}", "NVIDIA H100", _CLOCKS_MHZ)
                joined = RankJoined(
                    place, f"agent-{place.pipeline}", f"host-{place.pipeline}", gpu, 0, "", 0, 0
                )
                coordinator.live.handle(live, joined)
            for place in places:
                left = RankLeft(place, f"agent-{place.pipeline}", RankLeftReason.FINISHED)
                coordinator.live.handle(live, left)
            coordinator.live.handle(live, FinishRequested())
            await coordinator.flush()
        after_mb = _resident_mb()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await coordinator.close()
        await coordinator._store.close()
        return (after_mb - before_mb,)

    return asyncio.run(train())


def _start(path: Path) -> tuple[float, float]:
    async def start() -> tuple[float, float]:
        coordinator = await _opened(path)
        before_mb, began_s = _resident_mb(), time.perf_counter()
        await coordinator.start()
        taken = _resident_mb() - before_mb, time.perf_counter() - began_s
        await coordinator._store.close()
        return taken

    return asyncio.run(start())


if __name__ == "__main__":
    main("ended_runs", run)
