"""Perseus follows a job whose number of microbatches changes, with a real agent and a real coordinator."""

import asyncio
import contextlib
import random
import threading
import time
from pathlib import Path

import grpc
import pytest

from perseus.agent.link.computation import Kind
from perseus.agent.probe.attachment import Attachment
from perseus.agent.probe.client import Probe
from perseus.agent.probe.exchange import LocalExchange
from perseus.agent.probe.placement import Placement
from perseus.agent.probe.stage_work import StageWork
from perseus.emulation.physics import Work
from perseus.service.server import running
from perseus.v1 import job_pb2
from tests.service.grpc_fakes import Client, connected_to, make_settings
from tests.test_runs_end_to_end import STAGE_COUNT, Node, until

TIMEOUT_S = 60.0
_CLOCKED = (job_pb2.JOB_STATE_PROFILING, job_pb2.JOB_STATE_SOLVING, job_pb2.JOB_STATE_PLANNED)
_WORKS = {Kind.FORWARD: Work(0.016, 0.004, 1.0), Kind.BACKWARD: Work(0.030, 0.010, 0.8)}


class Stages:
    """State shared by the stages of one pipeline, to compute in step.

    All take the same number of microbatches in each iteration.
    """

    def __init__(self) -> None:
        self.microbatch_count = 2
        self.is_over = False
        self._barrier = threading.Barrier(STAGE_COUNT)
        self._next = (self.microbatch_count, self.is_over)

    def next_iteration(self) -> tuple[int, bool]:
        """Return its number of microbatches, and whether training has ended; the same for all stages."""
        if self._barrier.wait(60) == 0:
            self._next = (self.microbatch_count, self.is_over)
        self._barrier.wait(60)
        return self._next


class Training:
    """One trainer per stage, each on a thread; `again` detaches them all, and attaches them again at once."""

    def __init__(self, node: Node) -> None:
        self.stages = Stages()
        self.has_detached = threading.Event()
        self._exchanges = [LocalExchange() for _ in range(2)]
        self._node = node
        self._threads = [
            threading.Thread(target=self._train, args=(stage,), daemon=True) for stage in range(STAGE_COUNT)
        ]
        for thread in self._threads:
            thread.start()

    async def end(self) -> None:
        self.stages.is_over = True
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _train(self, stage: int) -> None:
        gpu, jitter = self._node.gpus[stage], random.Random(stage)
        for exchange in self._exchanges:
            probe = Probe.connect(self._node.socket, job_id="job", pipeline=0, stage=stage, gpu_uuid=gpu.uuid)
            placement = Placement(0, 1, stage, STAGE_COUNT, gpu_uuid=gpu.uuid)
            with Attachment(
                placement, probe, exchange, work=lambda: StageWork(f"stage {stage} of the model")
            ) as attachment:
                while not (next_iteration := self.stages.next_iteration())[1]:
                    attachment.begin_iteration()
                    for kind in (Kind.FORWARD, Kind.BACKWARD):
                        for microbatch in range(next_iteration[0]):
                            attachment.begin(kind, microbatch)
                            gpu.execute(_WORKS[kind])
                            attachment.end(kind, microbatch)
                    # Not in step with the counters, so that they distinguish the kinds.
                    time.sleep((0.03 + 0.04 * jitter.random()) * (1 + stage))
                    attachment.end_iteration()
            if stage == 0:
                self.stages.is_over = False
                self.has_detached.set()


async def until_clocked(client: Client, run_number: int) -> job_pb2.Job:
    """Wait until a run has measured its baseline, in regular iterations."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):  # it is not registered yet
                job = await client.job()
                if job.run_number == run_number and job.state in _CLOCKED:
                    return job
            await asyncio.sleep(0.05)


@pytest.mark.slow("a training that is measured at stock three times, by real clocks")
@pytest.mark.serial
@pytest.mark.timeout(300)
async def test_a_ramp_is_followed_and_detached_ranks_may_attach_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(tmp_path, "a")
    async with (
        running(make_settings(tmp_path)) as (address, _),
        connected_to(address) as client,
        node.serving(address),
    ):
        training = Training(node)
        await until_clocked(client, 1)
        training.stages.microbatch_count = 3
        second = await until_clocked(client, 2)
        assert "stage 0 executes 3 microbatches (6 computations) instead of 2 (4)" in caplog.text
        orders = second.spec.schedule.explicit.stages
        assert [len(stage.computations) for stage in orders] == [6, 6]
        assert (await client.job(run_number=1)).state_reason.endswith("its schedule differs")

        training.stages.is_over = True
        await until(training.has_detached.is_set, "the end of the first attachment")
        third = await until_clocked(client, 3)
        assert third.spec.schedule == second.spec.schedule
        assert "refuses" not in caplog.text, "the agent takes the ranks that are back at once"
        await training.end()
