"""Two trainings with one identifier, with real agents and a real coordinator: only one of them is served."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from perseus.agent import Kind, NamedSchedule, Probe
from perseus.agent.sidecar.settings import AgentSettings
from perseus.agent.sidecar.shell import serving
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM, Work
from perseus.service.server import running
from perseus.v1 import job_pb2
from tests.service.grpc_fakes import Client, connected_to, make_settings

MODEL = replace(A100_SXM.with_clocks(3), counter_period_s=0.02)
STAGE_COUNT = 2
TIMEOUT_S = 60.0


class Training:
    """One trainer per stage, each on a thread: one microbatch per iteration, until a request to stop."""

    def __init__(self, node: "Node", stage_work: Sequence[str]) -> None:
        self._node = node
        self._stage_work = stage_work
        self._stop = threading.Event()
        self.is_registered: bool | None = None
        self.foreign_clocks_mhz: set[int] = set()
        self._threads = [
            threading.Thread(target=self._train, args=(stage,), daemon=True) for stage in range(STAGE_COUNT)
        ]
        for thread in self._threads:
            thread.start()

    async def crash(self) -> None:
        """Let all trainers die silently."""
        self._stop.set()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _train(self, stage: int) -> None:
        gpu = self._node.gpus[stage]
        probe = Probe.connect(self._node.socket, job_id="job", pipeline=0, stage=stage, gpu_uuid=gpu.uuid)
        is_registered = probe.register(
            pipeline_count=1,
            stage_count=STAGE_COUNT,
            schedule=NamedSchedule("gpipe", 1),
            stage_work=self._stage_work,
        )
        if stage == 0:
            self.is_registered = is_registered
        while not self._stop.is_set():
            with probe.iteration():
                for kind in (Kind.FORWARD, Kind.BACKWARD):
                    with probe.computation(kind, 0):
                        gpu.execute(Work(0.02, 0.01, 1.0))
                time.sleep(0.02)
            self.foreign_clocks_mhz |= {gpu.sm_clock_mhz()} - {MODEL.highest_clock_mhz}
        probe.close()


class Node:
    """A node's GPUs, and its agent."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder / name
        (self.folder / "gpus").mkdir(parents=True)
        self.socket = self.folder / "agent.sock"
        self.gpus = [
            EmulatedGpu.create(self.folder / "gpus" / str(stage), MODEL, f"GPU-{name}-{stage}")
            for stage in range(STAGE_COUNT)
        ]

    @asynccontextmanager
    async def serving(self, coordinator: str) -> AsyncIterator[None]:
        settings = AgentSettings(
            coordinator=coordinator,
            socket=self.socket,
            gpu_backend="emulated",
            emulated_gpus=self.folder / "gpus",
            restore_folder=self.folder / "restore",
        )  # type: ignore[call-arg]
        async with serving(settings):
            yield
        for gpu in self.gpus:
            assert gpu.sm_clock_mhz() == MODEL.highest_clock_mhz
            gpu.close()


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        await asyncio.sleep(0.05)


@pytest.mark.slow("trainings that are measured and profiled, one after another")
@pytest.mark.serial
@pytest.mark.timeout(240)
async def test_another_split_of_the_same_order_is_another_run_without_the_previous_plan(
    tmp_path: Path,
) -> None:
    first_node, second_node = Node(tmp_path, "a"), Node(tmp_path, "b")
    async with (
        running(make_settings(tmp_path)) as (address, _),
        connected_to(address) as client,
        first_node.serving(address),
        second_node.serving(address),
    ):
        first = Training(first_node, ["12 layers", "12 layers"])
        await until(lambda: bool(first.foreign_clocks_mhz), "the first training is profiled")

        second = Training(second_node, ["16 layers", "8 layers"])
        await until(lambda: second.is_registered is not None, "an answer")
        assert second.is_registered is False
        await asyncio.sleep(1.5)  # the second training's ranks are announced every second
        both = await client.job()
        assert both.run_number == 1
        assert both.rank_counts.connected_count == STAGE_COUNT
        assert not second.foreign_clocks_mhz

        await first.crash()
        await until_run(client, 2)
        abandoned = await client.job(run_number=1)
        assert abandoned.state == job_pb2.JOB_STATE_FINISHED
        assert abandoned.state_reason.endswith("its stage_work differs")
        second_job = await client.job()
        assert second_job.profiled_clock_count == 0
        assert [work.fingerprint for work in second_job.spec.stage_work] == ["16 layers", "8 layers"]
        await until(lambda: bool(second.foreign_clocks_mhz), "the second training is profiled")
        await second.crash()


async def until_run(client: Client, number: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while (await client.job()).run_number != number:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
