"""A budget set while ranks without a plan run a long iteration: in force before the iteration's end.

Agents are processes, over sockets and streams; trainers are threads, and the coordinator runs here, so that
the test can inspect it.
"""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from perseus.agent.link.computation import Kind
from perseus.agent.probe import rejoin
from perseus.demo.trainer import STOP_FILE, RankTask, train
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM
from perseus.service import server
from perseus.service.domain.model import JobState, RankFilter, RankState
from perseus.service.domain.power import DEFAULT_FEED, BudgetRequest
from perseus.service.domain.principals import ANYBODY
from perseus.service.job import views
from perseus.service.job.machine import JobMachine
from perseus.service.shell.coordinator import Coordinator
from perseus.solver import Kind as SolverKind
from perseus.solver import one_forward_one_backward
from tests.service.grpc_fakes import make_settings

MODEL = A100_SXM.with_clocks(4)
LIMIT_SHARE = 0.75
"""Share of the drawn power."""
PIPELINES, STAGES, MICROBATCHES = 2, 2, 2
FORWARD_S, BACKWARD_S = 0.25, 0.5
"""At the highest clock. (stages + microbatches - 1) times both, and the optimizer's 0.3 s, make 2.6 s."""
OPTIMIZER_S = 0.3
START_S = 90.0
LEASE_S = 8.0
KINDS = {SolverKind.FORWARD: Kind.FORWARD, SolverKind.BACKWARD: Kind.BACKWARD}


class Processes:
    """An agent for every pipeline's GPUs, in a process; and a trainer for every rank, on a thread."""

    def __init__(self, folder: Path, address: str, stack: ExitStack) -> None:
        self._folder = folder
        self._address = address
        self._stack = stack
        self.gpus = [self._gpu(pipeline, stage) for pipeline in range(PIPELINES) for stage in range(STAGES)]
        self._started: list[subprocess.Popen[bytes]] = []
        self._trainers: list[threading.Thread] = []
        self._stack.callback(self._end)
        self.agents = [self.start_agent(pipeline) for pipeline in range(PIPELINES)]

    def start_agent(self, pipeline: int) -> subprocess.Popen[bytes]:
        return self._start(
            f"agent-{pipeline}",
            "-m",
            "perseus.cli",
            "agent",
            f"--coordinator={self._address}",
            f"--socket={self.socket(pipeline)}",
            f"--restore-folder={self._folder / 'restore'}",
            "--gpu-backend=emulated",
            f"--emulated-gpus={self._folder / f'gpus-{pipeline}'}",
        )

    def start_trainers(self) -> None:
        orders = one_forward_one_backward(STAGES, MICROBATCHES).orders
        for pipeline in range(PIPELINES):
            for stage in range(STAGES):
                task = RankTask(
                    run_dir=str(self._folder),
                    agent_socket=str(self.socket(pipeline)),
                    gpu_file=str(self._folder / f"gpus-{pipeline}" / str(stage)),
                    job_id="job",
                    pipeline=pipeline,
                    pipeline_count=PIPELINES,
                    stage=stage,
                    stage_count=STAGES,
                    microbatch_count=MICROBATCHES,
                    order=[(KINDS[each.kind], each.microbatch) for each in orders[stage]],
                    forward=(0.8 * FORWARD_S, 0.2 * FORWARD_S, 0.9),
                    backward=(0.8 * BACKWARD_S, 0.2 * BACKWARD_S, 0.9),
                    optimizer_s=OPTIMIZER_S,
                )
                self._trainers.append(threading.Thread(target=train, args=[task], daemon=True))
                self._trainers[-1].start()

    def socket(self, pipeline: int) -> Path:
        return self._folder / f"agent-{pipeline}.sock"

    def clocks_mhz(self) -> set[int]:
        """Return the clocks of the GPUs, each read separately."""
        return {gpu.sm_clock_mhz() for gpu in self.gpus}

    def _gpu(self, pipeline: int, stage: int) -> EmulatedGpu:
        path = self._folder / f"gpus-{pipeline}" / str(stage)
        path.parent.mkdir(exist_ok=True)
        gpu = EmulatedGpu.create(path, MODEL, f"GPU-{pipeline}-{stage}")
        self._stack.callback(gpu.close)
        return gpu

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with (self._folder / f"{name}.log").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **threads},
            )
        self._started.append(process)
        return process

    def _end(self) -> None:
        (self._folder / STOP_FILE).touch()
        for trainer in self._trainers:
            trainer.join()
        for process in self._started:
            if process.poll() is None:
                process.terminate()
        for process in self._started:
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Ordering:
    """The coordinator's job, and methods to set a budget."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    @property
    def machine(self) -> JobMachine:
        machine = self._coordinator.live.find("job").machine
        assert isinstance(machine, JobMachine)
        return machine

    @property
    def is_registered(self) -> bool:
        return self._coordinator.live.get("job") is not None

    @property
    def max_clock_mhz(self) -> int:
        """The job's maximum clock on its GPUs."""
        max_clock = self.machine.record.max_clock
        assert max_clock is not None
        lower = (clock_mhz for clock_mhz in MODEL.clocks_mhz if clock_mhz <= max_clock.clock_mhz)
        return max(lower, default=MODEL.clocks_mhz[-1])

    def iteration_count(self) -> int:
        latest = self.machine.run.log.latest
        return 0 if latest is None else latest.iteration + 1

    def connected_count(self) -> int:
        wanted = RankFilter(frozenset({RankState.CONNECTED}))
        return sum(1 for _ in self.machine.run.ranks.select(wanted)) if self.is_registered else 0

    def are_all_in_force(self) -> bool:
        """Whether all ranks have reported that their offers are in force."""
        ranks = (rank for _, rank in self.machine.run.ranks.select(RankFilter(), 0))
        return all(rank.in_force_version == rank.offered_version > 0 for rank in ranks)

    async def set_budget(self) -> None:
        power_w = views.power(self.machine.run).power_w
        assert power_w is not None
        wanted = BudgetRequest("b", "r", DEFAULT_FEED, LIMIT_SHARE * power_w, None, None, None, None, "")
        await self._coordinator.power.set_budget(wanted, ANYBODY)

    async def cancel_budget(self) -> None:
        await self._coordinator.power.cancel_budget("b", ANYBODY)


@contextmanager
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Coordinator]]:
    """The coordinators that servers make."""
    made: list[Coordinator] = []

    class Noted(Coordinator):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            made.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(server, "Coordinator", Noted)
        yield made


@asynccontextmanager
async def serving(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Ordering, Processes]]:
    with noted(monkeypatch) as made, ExitStack() as stack:
        async with server.running(make_settings(folder, lease_s=LEASE_S)) as (address, _):
            processes = Processes(folder, address, stack)
            for pipeline in range(PIPELINES):
                await until(processes.socket(pipeline).exists, "the agents listen")
            processes.start_trainers()
            ordering = Ordering(made[0])
            await until(lambda: ordering.connected_count() == PIPELINES * STAGES, "all ranks are served")
            yield ordering, processes
            await asyncio.to_thread(stack.close)


async def until(condition: Callable[[], bool], what: str, timeout_s: float = START_S) -> float:
    """Wait for a condition; return the time that it took."""
    begun_s = time.monotonic()
    while not condition():
        assert time.monotonic() < begun_s + timeout_s, what
        await asyncio.sleep(0.02)
    return time.monotonic() - begun_s


@pytest.mark.slow("agents in real processes, and iterations long enough to act within one")
@pytest.mark.timeout(300)
async def test_a_budget_s_max_clock_is_in_force_within_an_iteration_and_on_a_returning_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Let trainers check sooner for a new agent.
    monkeypatch.setattr(rejoin, "PERIOD_NS", 5 * 10**8)
    async with serving(tmp_path, monkeypatch) as (ordering, processes):
        # The first one includes the trainers' start.
        await until(lambda: ordering.iteration_count() >= 2, "two iterations")
        await asyncio.sleep(FORWARD_S)  # all ranks are within the next one
        assert processes.clocks_mhz() == {MODEL.highest_clock_mhz}
        before = ordering.iteration_count()
        await ordering.set_budget()
        await until(lambda: ordering.machine.record.max_clock is not None, "the maximum clock is ordered")
        await until(
            lambda: processes.clocks_mhz() == {ordering.max_clock_mhz}, "all clocks are at the maximum clock"
        )
        await until(ordering.are_all_in_force, "the coordinator knows")
        assert ordering.iteration_count() == before, "and that within the iteration"

        await until(
            lambda: (
                ordering.machine.run.log.latest is not None
                and ordering.machine.run.log.latest.has_clock_change
            ),
            "the affected iteration is reported as such",
        )
        assert ordering.machine.record.state is JobState.BASELINE
        assert ordering.machine.record.baseline is None

        processes.agents[0].kill()
        processes.agents[0].wait()
        processes.start_agent(0)
        await until(lambda: ordering.connected_count() < PIPELINES * STAGES, "the agent is gone")
        await until(lambda: ordering.connected_count() == PIPELINES * STAGES, "it is back")
        await until(lambda: processes.clocks_mhz() == {ordering.max_clock_mhz}, "and has the maximum clock")
        assert ordering.max_clock_mhz < MODEL.highest_clock_mhz

        await ordering.cancel_budget()
        await until(lambda: processes.clocks_mhz() == {MODEL.highest_clock_mhz}, "stock again")
