"""An emulated engine and an agent in processes of their own, with the controller's own times.

Engines restart, metrics stop, agents are killed: the GPU is at stock within seconds, and is controlled again.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import Popen

import pytest

from perseus.agent.sidecar.health_client import ask_instances
from perseus.demo.cluster import await_log, await_start, end_processes, start_process
from perseus.demo.serving_scenario import GPU, profile_csv
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.request_replay import Outcome, replay_requests
from perseus.emulation.serving import EngineConfiguration
from perseus.serving.engine import Request
from tests.ports import free_port

pytestmark = pytest.mark.slow("real processes, and seconds until a clock is chosen")

STOCK_MHZ = GPU.highest_clock_mhz
_AT_STOCK_S = 4.0
"""A second without statistics or until a supervisor acts, and room for a busy machine."""


class Node:
    """A GPU, an engine on it, an agent, and a client that sends three requests a second."""

    def __init__(self, folder: Path, reads_metrics: bool) -> None:
        self.folder, self.reads_metrics = folder, reads_metrics
        (folder / "gpus").mkdir()
        self.gpu = EmulatedGpu.create(folder / "gpus" / "0", GPU, "GPU-0")
        (folder / "profile.csv").write_text(profile_csv())
        self.port = free_port()
        metrics = f'metrics = "127.0.0.1:{self.port}"\n' if reads_metrics else ""
        (folder / "agent.toml").write_text(
            f'socket = "{folder / "agent.sock"}"\ngpu_backend = "emulated"\n'
            f'emulated_gpus = "{folder / "gpus"}"\n'
            f'restore_folder = "{folder / "restore"}"\ngrants = "{folder / "grants"}"\n'
            f'coordinator = "unix:{folder / "coordinator.sock"}"\ntoken = "none"\n\n'
            f'[instances.chat]\ngpus = ["GPU-0"]\nuser = "{os.getuid()}"\nttft = "p99 <= 1 s"\n'
            f'itl = "p95 <= 100 ms"\nprofile = "{folder / "profile.csv"}"\nmax_batched_tokens = 512\n'
            f"kv_capacity_tokens = 100000\n{metrics}"
        )
        self.outcomes: list[Outcome] = []
        self.engine = self.start_engine()
        self.agent = self.start_agent()

    def start_engine(self) -> Popen[bytes]:
        plugins = [] if self.reads_metrics else ["perseus.agent.vllm:StatLogger"]
        configuration = EngineConfiguration(
            [str(self.folder / "gpus" / "0")],
            str(self.folder / "profile.csv"),
            512,
            100_000,
            plugins,
            self.port,
        )
        log = self.folder / "engine.log"
        environment = {"PERSEUS_AGENT_SOCKET": str(self.folder / "agent.sock")}
        process = start_process(
            log, "-m", "perseus.emulation.serving", configuration.to_json(), environment=environment
        )
        await_log(process, "engine", log, "listening", "address")
        return process

    def start_agent(self) -> Popen[bytes]:
        log = self.folder / "agent.log"
        process = start_process(log, "-m", "perseus.cli", "agent", f"--config={self.folder / 'agent.toml'}")

        def answers() -> bool:
            try:
                return bool(ask_instances(self.folder / "agent.sock", 5.0))
            except OSError:
                return False

        await_start(process, "agent", log, answers)
        return process

    @property
    def agents_child(self) -> int:
        """The agent itself, whose parent is its supervisor."""
        pid = self.agent.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    @property
    def is_low(self) -> bool:
        return self.gpu.sm_clock_mhz() < STOCK_MHZ

    @property
    def has_record(self) -> bool:
        return any((self.folder / "restore").glob("*.json"))

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> float:
        """Return the seconds until a condition holds."""
        begun_s = time.monotonic()
        while not condition():
            assert time.monotonic() - begun_s < timeout_s, (self.folder / "agent.log").read_text()[-3000:]
            await asyncio.sleep(0.02)
        return time.monotonic() - begun_s


@asynccontextmanager
async def running(
    folder: Path, *, reads_metrics: bool = False, is_controlled: bool = True
) -> AsyncIterator[Node]:
    node = await asyncio.to_thread(Node, folder, reads_metrics)
    requests = [Request(number / 3, 100, 30) for number in range(300)]
    client = asyncio.create_task(replay_requests(f"127.0.0.1:{node.port}", requests, node.outcomes.append))
    try:
        if is_controlled:
            await node.until(lambda: node.is_low, 30)
        yield node
    finally:
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)
        await asyncio.to_thread(end_processes, [node.agent, node.engine])
        assert not node.is_low
        assert not node.has_record
        node.gpu.close()


async def test_an_agent_that_is_killed_leaves_no_clock_and_its_successor_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        assert node.has_record
        os.kill(node.agents_child, signal.SIGKILL)
        await node.until(lambda: not node.is_low and not node.has_record, _AT_STOCK_S)
        await asyncio.to_thread(node.agent.wait)
        node.agent = await asyncio.to_thread(node.start_agent)
        await node.until(lambda: node.is_low, 30)


async def test_an_engine_that_is_killed_and_starts_again(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        node.engine.kill()
        node.engine.wait()
        await node.until(lambda: not node.is_low, _AT_STOCK_S)
        node.engine = await asyncio.to_thread(node.start_engine)
        await node.until(lambda: node.is_low, 30)
        in_time = [each.ttft_s < 1.0 for each in node.outcomes if each.ttft_s is not None]
        assert len(in_time) > 30
        assert all(in_time)


async def test_metrics_that_stop_and_come_back(tmp_path: Path) -> None:
    async with running(tmp_path, reads_metrics=True) as node:
        node.engine.send_signal(signal.SIGSTOP)
        try:
            await node.until(lambda: not node.is_low, _AT_STOCK_S)
        finally:
            node.engine.send_signal(signal.SIGCONT)
        await node.until(lambda: node.is_low, 30)


async def test_a_clock_that_is_refused_leaves_stock_and_the_engine_alone(tmp_path: Path) -> None:
    (tmp_path / "restore").write_text("no folder: a clock without a restore record is refused\n")
    async with running(tmp_path, is_controlled=False) as node:

        def is_refused() -> bool:
            (found,) = ask_instances(tmp_path / "agent.sock", 5.0)
            return (found["state"], found["reason"]) == ("at stock", "a clock was refused")

        await node.until(is_refused, 30)
        (tmp_path / "restore").unlink()
        in_time = [each.ttft_s < 1.0 for each in node.outcomes if each.ttft_s is not None]
        assert len(in_time) > 10
        assert all(in_time)
