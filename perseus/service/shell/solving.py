"""Solving in worker processes: igraph's max-flow holds the GIL, so the event loop must not share its process.

Workers are spawned, never forked (a forked gRPC server hangs). A worker that dies breaks the pool; the
problem that it had fails, and the next one gets a new pool.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait

from perseus.service.domain.commands import SlowPlan
from perseus.service.domain.errors import SolverBusyError, SolverCrashedError
from perseus.solver import (
    Frontier,
    LagError,
    Pipeline,
    explaining_lag_s,
    fastest_clock_plan,
    solve,
    with_lag,
)

POINT_COUNT = 100

_WAITING_PER_PROCESS = 64


class SolverPool:
    """Solves problems, a few at a time."""

    def __init__(self, process_count: int) -> None:
        self._process_count = process_count
        self._limit = process_count * _WAITING_PER_PROCESS
        self._in_flight = 0
        self._pool = self._new_pool()

    async def solve(
        self, problem: Pipeline, point_count: int = POINT_COUNT, slow: SlowPlan | None = None
    ) -> Frontier:
        """Solve a problem, with the lag between stages that explains a slow plan, if there is one.

        Raises:
            LagError: no lag explains the slow plan.
            SolverError: the problem can't be solved.
            SolverCrashedError: the worker died.
            SolverBusyError: too many problems wait.
        """
        if self._in_flight >= self._limit:
            raise SolverBusyError(limit=self._limit)
        pool = self._pool
        self._in_flight += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                pool, solve_explaining, problem, point_count, slow
            )
        except BrokenProcessPool as error:
            if self._pool is pool:
                pool.shutdown(wait=False)
                self._pool = self._new_pool()
            raise SolverCrashedError(cause=error) from None
        finally:
            self._in_flight -= 1

    def close(self) -> None:
        """End the workers; what they still solve is dropped."""
        workers = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()

    def _new_pool(self) -> ProcessPoolExecutor:
        pool = ProcessPoolExecutor(
            self._process_count, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker
        )
        pool.submit(os.getpid)  # Starting and importing takes a second: do it before the first problem comes.
        return pool


def solve_explaining(problem: Pipeline, point_count: int, slow: SlowPlan | None) -> Frontier:
    """Solve a problem here and now; see SolverPool.solve."""
    if slow is not None:
        problem = with_lag(problem, _lag_s(problem, slow))
    return solve(problem, point_count=point_count)


def _lag_s(problem: Pipeline, slow: SlowPlan) -> float:
    stock = fastest_clock_plan(problem)
    lag_s = explaining_lag_s(problem, slow.plan, slow.median_time_s, stock, slow.baseline_time_s)
    if lag_s is None:
        raise LagError(
            f"no lag between stages explains iterations of {slow.median_time_s:.6f} s, "
            f"{slow.baseline_time_s:.6f} s at stock",
            median_time_s=slow.median_time_s,
            baseline_time_s=slow.baseline_time_s,
        )
    return lag_s


def _start_worker() -> None:
    """Leave Ctrl-C to the coordinator, and end with it however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def end_with_parent() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
