"""Work in pieces, done in worker processes or on a Dask cluster, with one progress display."""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, TypeVar

import typer

from perseus.cli.progress import working
from perseus.cli.terminal import FAILURE, fail
from perseus.tls.rules import check_dask

Answer = TypeVar("Answer")

_MAX_WAITING = 4_096
"""Pieces that wait at a time: more than any cluster has threads, and few to choose from."""

_POLL_S = 0.05

ProcessesOption = Annotated[
    int | None,
    typer.Option(
        "--processes",
        min=1,
        max=1024,
        help="Processes for several profiles or scenarios; by default one for each processor.",
        show_default=False,
    ),
]
DaskOption = Annotated[
    str | None,
    typer.Option(
        "--dask",
        metavar="tls://HOST:PORT",
        help="Scheduler of a Dask cluster that does the work instead of own processes.",
        show_default=False,
    ),
]
DaskInsecureOption = Annotated[
    bool,
    typer.Option(
        "--dask-insecure",
        help="Use a Dask cluster in plaintext: whoever can connect to it runs code there and here.",
    ),
]


@dataclass(frozen=True, slots=True)
class Executor:
    """Where work is done: in so many processes, or on a Dask cluster."""

    process_count: int
    dask: str | None

    @classmethod
    def of_flags(cls, processes: int | None, dask: str | None, dask_insecure: bool) -> "Executor":
        """Return the executor that the flags ask for; exit if they are wrong."""
        if dask is not None:
            try:
                check_dask(dask, insecure=dask_insecure, wanted="--dask-insecure")
            except ValueError as error:
                fail(f"--dask: {error}, found {dask}")
            if find_spec("distributed") is None:
                fail("--dask: expected the package distributed (perseus-energy[dask]), found none")
        return cls(processes or len(os.sched_getaffinity(0)), dask)

    def run(
        self,
        description: str,
        pieces: Sequence[Callable[[], Answer]],
        on_done: Callable[[int, Answer | Exception], None],
        limit_s: float,
    ) -> None:
        """Run functions that can be pickled, each within the limit; exit if no cluster is there at first.

        `on_done` is called with each piece's number, and its answer or its SolverError or ServiceError.
        """
        with working(f"{description} {len(pieces)}", is_measured=True) as report:
            done_count = 0

            def end(number: int, answer: Answer | Exception) -> None:
                nonlocal done_count
                on_done(number, answer)
                done_count += 1
                report(done_count / len(pieces), f"{description} {len(pieces)}, {done_count} done")

            asyncio.run(self._run(pieces, end, limit_s))

    async def _run(
        self,
        pieces: Sequence[Callable[[], Answer]],
        on_done: Callable[[int, Answer | Exception], None],
        limit_s: float,
    ) -> None:
        from perseus import logs
        from perseus.service.domain.errors import ServiceError
        from perseus.service.solving.dask_cluster import DaskCluster
        from perseus.service.solving.worker_pool import BATCH, WorkerPool
        from perseus.solver import SolverError

        logs.configure("error", "console")
        cluster = None if self.dask is None else DaskCluster(self.dask)
        pool = WorkerPool(BATCH, min(self.process_count, len(pieces)), limit_s, cluster=cluster)
        connection = None if cluster is None else asyncio.create_task(cluster.run())
        room = asyncio.Semaphore(_MAX_WAITING)

        async def one(number: int, piece: Callable[[], Answer]) -> None:
            answer: Answer | Exception
            async with room:
                try:
                    answer = await pool.run(piece)
                except (SolverError, ServiceError) as error:
                    answer = error
            on_done(number, answer)

        try:
            while cluster is not None and not cluster.thread_count:
                if cluster.trouble:
                    fail(f"--dask: {self.dask}: {cluster.trouble}", FAILURE)
                await asyncio.sleep(_POLL_S)
            logs.configure("warning", "console")  # from now on, own processes continue
            await asyncio.gather(*(one(number, piece) for number, piece in enumerate(pieces)))
        finally:
            if connection is not None:
                connection.cancel()
                await asyncio.gather(connection, return_exceptions=True)
            pool.close()
