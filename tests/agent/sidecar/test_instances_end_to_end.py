"""An emulated engine and an agent in processes of their own, with the controller's own times.

Engines restart, metrics stop, agents are killed: the GPU is at stock within seconds, and is controlled again.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from perseus.agent.sidecar.health_client import ask_instances
from perseus.demo.processes import Process, end, until
from perseus.demo.serving_scenario import GPU, profile_csv
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.request_replay import Outcome, replay_requests
from perseus.emulation.serving import EngineConfiguration
from perseus.serving.engine import Request
from tests.ports import free_port
from tests.processes import agent_pid, tails

pytestmark = pytest.mark.slow("real processes, and seconds until a clock is chosen")

STOCK_MHZ = GPU.highest_clock_mhz


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
        configuration = EngineConfiguration(
            [str(folder / "gpus" / "0")],
            str(folder / "profile.csv"),
            512,
            100_000,
            [] if reads_metrics else ["perseus.agent.vllm:StatLogger"],
            self.port,
        )
        self.engine = Process(
            folder / "engine.log",
            *("-m", "perseus.emulation.serving", configuration.to_json()),
            environment={"PERSEUS_AGENT_SOCKET": str(folder / "agent.sock")},
        )
        command = ("-m", "perseus.cli", "agent", f"--config={folder / 'agent.toml'}")
        self.agent = Process(folder / "agent.log", *command)
        self.start_engine()
        self.start_agent()

    def start_engine(self) -> None:
        self.engine.launch()
        self.engine.logged("listening")

    def start_agent(self) -> None:
        def answers() -> bool:
            try:
                return bool(ask_instances(self.folder / "agent.sock", 5.0))
            except OSError:
                return False

        self.agent.launch()
        self.agent.until(answers, "an agent that answers")

    @property
    def is_low(self) -> bool:
        return self.gpu.sm_clock_mhz() < STOCK_MHZ

    @property
    def has_record(self) -> bool:
        return any((self.folder / "restore").glob("*.json"))

    async def until_low(self) -> None:
        await asyncio.to_thread(until, lambda: self.is_low, "a lower clock", state=self._state)

    async def until_stock(self) -> None:
        """Wait for what a second without statistics or a supervisor brings about."""
        await asyncio.to_thread(
            until, lambda: not self.is_low and not self.has_record, "stock", state=self._state
        )

    def _state(self) -> str:
        return tails(self.folder)


@asynccontextmanager
async def running(
    folder: Path, *, reads_metrics: bool = False, is_controlled: bool = True
) -> AsyncIterator[Node]:
    node = await asyncio.to_thread(Node, folder, reads_metrics)
    requests = [Request(number / 3, 100, 30) for number in range(300)]
    client = asyncio.create_task(replay_requests(f"127.0.0.1:{node.port}", requests, node.outcomes.append))
    try:
        if is_controlled:
            await node.until_low()
        yield node
    finally:
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)
        await asyncio.to_thread(end, node.agent, node.engine)
        assert not node.is_low
        assert not node.has_record
        node.gpu.close()


async def test_an_agent_that_is_killed_leaves_no_clock_and_its_successor_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        assert node.has_record
        os.kill(agent_pid(node.agent), signal.SIGKILL)
        await node.until_stock()
        await asyncio.to_thread(node.agent.wait)
        await asyncio.to_thread(node.start_agent)
        await node.until_low()


async def test_an_engine_that_is_killed_and_starts_again(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        node.engine.kill()
        await node.until_stock()
        await asyncio.to_thread(node.start_engine)
        await node.until_low()
        assert len([each for each in node.outcomes if each.ttft_s is not None]) > 30, "both engines answer"


async def test_metrics_that_stop_and_come_back(tmp_path: Path) -> None:
    async with running(tmp_path, reads_metrics=True) as node:
        node.engine.signal(signal.SIGSTOP)
        try:
            await node.until_stock()
        finally:
            node.engine.signal(signal.SIGCONT)
        await node.until_low()


async def test_a_clock_that_is_refused_leaves_stock_and_the_engine_alone(tmp_path: Path) -> None:
    (tmp_path / "restore").write_text("no folder: a clock without a restore record is refused\n")
    async with running(tmp_path, is_controlled=False) as node:

        def is_refused() -> bool:
            (found,) = ask_instances(tmp_path / "agent.sock", 5.0)
            return (found["state"], found["reason"]) == ("at stock", "a clock was refused")

        await asyncio.to_thread(until, is_refused, "the refusal")
        (tmp_path / "restore").unlink()
        assert len([each for each in node.outcomes if each.ttft_s is not None]) > 10, "the engine answers"
