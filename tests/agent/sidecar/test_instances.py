"""Instances in a running agent: a plug-in's packets, the real socket, records and threads, an emulated GPU.

The controller's times are compressed. That a dead agent's GPUs return to stock is in the tests of restoring.
"""

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from perseus.agent import vllm
from perseus.agent.sidecar import clock_worker, engine_metrics, instance
from perseus.agent.sidecar.engine_metrics import MetricsReader
from perseus.agent.sidecar.health_client import ask_instances
from perseus.agent.sidecar.shell import serving
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM, Work
from perseus.emulation.serving import EngineConfiguration, LiveEngine, application
from perseus.gpu import GpuPermissionError, RecordError
from perseus.serving import controller, savings
from perseus.serving.errors import ServingError
from tests.agent.coordinator_stub import until
from tests.agent.sidecar.test_agent_metrics import get
from tests.agent.sidecar.training import STOCK_MHZ, settings
from tests.ports import free_port
from tests.serving.profiles import measured, model
from tests.serving.test_profile_csv import text

STEPS = model()


@pytest.fixture(autouse=True)
def compressed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value_s in (("SETTLE_S", 0.3), ("DWELL_S", 0.1), ("_DECISION_S", 0.1), ("REFUSED_S", 0.5)):
        monkeypatch.setattr(controller, name, value_s)
    monkeypatch.setattr(instance, "_TICK_S", 0.02)
    monkeypatch.setattr(instance, "_FIRST_DELAY_S", 0.1)
    monkeypatch.setenv("PERSEUS_AGENT_SOCKET", str(tmp_path / "run" / "agent.sock"))


class Engine:
    """Reports a light load, at step times of the GPU's clock."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        self._gpu = gpu
        gpu.execute(Work(0.001, 0.0))  # from now on this process is on the GPU
        self.is_silent = False
        self.start()

    def start(self) -> None:
        self._logger: Any = vllm.StatLogger()

    def stop(self) -> None:
        self._logger.sender.stop()
        self._logger.sender.run()  # ends the connection

    async def run(self) -> None:
        scheduler = SimpleNamespace(num_running_reqs=8, num_waiting_reqs=0, kv_cache_usage=0.02)
        while True:
            await asyncio.sleep(0.05)
            if self.is_silent:
                continue
            clock_mhz = min(STEPS.clocks_mhz, key=lambda each: abs(each - self._gpu.sm_clock_mhz()))
            itl_s = float(STEPS.time_s(0, 8, 2_000)[STEPS.clocks_mhz.index(clock_mhz)])
            for _ in range(round(0.05 / itl_s)):
                self._logger.record(
                    scheduler,
                    SimpleNamespace(
                        num_prompt_tokens=5,
                        num_generation_tokens=8,
                        time_to_first_tokens_iter=[],
                        inter_token_latencies_iter=[itl_s] * 8,
                    ),
                )
            self._logger.sender.beat(time.monotonic())


@asynccontextmanager
async def running(tmp_path: Path, gpu: EmulatedGpu, **more: object) -> AsyncIterator[Engine]:
    profile = tmp_path / "profile.csv"
    profile.write_text(text(measured()))
    own = {
        "gpus": ["0"],
        "user": str(os.getuid()),
        "ttft": "p99 <= 2 s",
        "itl": "p95 <= 100 ms",
        "profile": profile,
        "max_batched_tokens": 512,
        "kv_capacity_tokens": 100_000,
        "metrics": None,
    }
    own |= {name: more.pop(name) for name in list(more) if name in own}
    async with serving(settings(tmp_path, free_port(), instances={"chat": own}, **more)):
        engine = Engine(gpu)
        running = asyncio.create_task(engine.run())
        yield engine
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        engine.stop()


def is_low(gpu: EmulatedGpu) -> bool:
    return gpu.sm_clock_mhz() < STOCK_MHZ


async def test_an_engine_runs_at_a_low_clock_until_the_agent_stops_also_after_its_restart(
    tmp_path: Path, gpu: EmulatedGpu
) -> None:
    with capture_logs() as logs:
        async with running(tmp_path, gpu) as engine:
            await until(lambda: is_low(gpu), "a low clock")
            assert [path.name for path in (tmp_path / "restore").glob("*.json")] == [f"{gpu.uuid}.json"]
            engine.stop()
            engine.start()
            await until(lambda: not is_low(gpu), "stock")
            await until(lambda: is_low(gpu), "a low clock again")
    assert gpu.sm_clock_mhz() == STOCK_MHZ
    assert not list((tmp_path / "restore").glob("*.json"))
    assert "the engine restarted" in reasons(logs)


def reasons(logs: Sequence[Any], event: str | None = None) -> list[str]:
    """Return the reasons in the lines of an event, or in all lines."""
    return [str(each.get("reason")) for each in logs if event in (None, each["event"])]


async def test_what_the_agent_answers_about_its_instances(tmp_path: Path, gpu: EmulatedGpu) -> None:
    socket, port = tmp_path / "run" / "agent.sock", free_port()
    async with running(tmp_path, gpu, metrics_listen=str(port)) as engine:
        await until(lambda: is_low(gpu), "a low clock")
        (found,) = await asyncio.to_thread(ask_instances, socket, 60.0)
        assert (found["name"], found["state"], found["running_count"]) == ("chat", "controlled", 8)
        assert found["clock_mhz"] < STOCK_MHZ
        assert [row["clock_mhz"] for row in found["clocks"]][-1] == STOCK_MHZ
        assert found["savings"]["saving"] is None
        assert found["savings"]["generation_tokens"] > 0
        _, metrics = await asyncio.to_thread(get, f"http://127.0.0.1:{port}/metrics")
        assert 'perseus_instance_controlled{engine="chat"} 1.0' in metrics
        assert 'perseus_instance_requests{engine="chat",state="running"} 8.0' in metrics
        assert 'perseus_instance_attainment_ratio{engine="chat",objective="itl"} 1.0' in metrics
        engine.stop()
        engine.is_silent = True
        await until(lambda: not is_low(gpu), "stock")
        (found,) = await asyncio.to_thread(ask_instances, socket, 60.0)
        assert (found["state"], found["reason"]) == ("at stock", "no statistics for a second")
    tokens = json.loads((tmp_path / "serving" / "chat.controlled.json").read_text())["controlled"][2]
    assert tokens >= found["savings"]["generation_tokens"]
    async with running(tmp_path, gpu):  # a new agent goes on from there
        (found,) = await asyncio.to_thread(ask_instances, socket, 60.0)
        assert found["savings"]["generation_tokens"] >= tokens


async def test_stock_is_measured_and_no_saving_ends_control(
    tmp_path: Path, gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value_s in (("SETTLE_S", 0.1), ("MEASURED_S", 1.3), ("_GAP_S", 0.5)):
        monkeypatch.setattr(savings, name, value_s)
    monkeypatch.setattr(instance, "WINDOW_S", 0.6)
    with capture_logs() as logs:
        async with running(tmp_path, gpu):
            await until(lambda: is_low(gpu), "a low clock")
            await until(lambda: not is_low(gpu), "a window at stock")
            await until(lambda: is_low(gpu), "a low clock again")
            assert set(reasons(logs, "instance at stock")) == {"stock is measured, for half a minute"}
            monkeypatch.setattr(savings.SavingsMeter, "saves_nothing", True)
            monkeypatch.setattr(instance, "_SAVE_S", 0.0)
            monkeypatch.setattr(savings, "_GAP_S", 1e9)
            await until(lambda: not is_low(gpu), "stock")
            (found,) = await asyncio.to_thread(ask_instances, tmp_path / "run" / "agent.sock", 60.0)
            assert found["reason"] == "measured, lower clocks save nothing"


async def test_all_gpus_of_an_instance_hold_one_clock_and_a_refusal_by_one_frees_both_until_it_sets_again(
    tmp_path: Path, gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = EmulatedGpu.create(tmp_path / "gpus" / "1", A100_SXM, "GPU-1")
    other.execute(Work(0.001, 0.0))
    set_clock_mhz = EmulatedGpu.set_clock_mhz
    refusals = [GpuPermissionError("expected root"), RecordError("expected a folder")]

    def refuse(each: EmulatedGpu, clock_mhz: int) -> None:
        if refusals and each.uuid == other.uuid and clock_mhz != STOCK_MHZ:
            raise refusals.pop()
        set_clock_mhz(each, clock_mhz)

    def are_low_together() -> bool:
        return is_low(gpu) and gpu.sm_clock_mhz() == other.sm_clock_mhz()

    with capture_logs() as logs:
        async with running(tmp_path, gpu, gpus=["0", "GPU-1"]):
            await until(are_low_together, "one low clock")
            monkeypatch.setattr(EmulatedGpu, "set_clock_mhz", refuse)
            await until(lambda: not is_low(gpu) and not is_low(other), "stock on both")
            await until(lambda: not refusals, "another refusal")
            await until(are_low_together, "one low clock again")
    assert reasons(logs, "clock refused") == ["expected a folder", "expected root"]
    assert "a clock was refused" in reasons(logs, "instance at stock")
    other.close()


async def test_a_loop_that_hangs_leaves_the_gpu_at_stock_until_it_goes_on(
    tmp_path: Path, gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_worker, "LEASE_S", 1.0)
    with capture_logs() as logs:
        async with running(tmp_path, gpu):
            await until(lambda: is_low(gpu), "a low clock")
            while is_low(gpu):
                time.sleep(0.01)  # noqa: ASYNC251 - it hangs
            monkeypatch.setattr(clock_worker, "LEASE_S", 60.0)  # does not end again on a busy machine
            await until(lambda: is_low(gpu), "a low clock again")
    assert "clock was at stock: nothing decided on it" in [each["event"] for each in logs]


async def test_metrics_are_read_in_place_of_a_plug_in_and_may_stop_and_come_back(
    tmp_path: Path, gpu: EmulatedGpu
) -> None:
    port = free_port()

    async def ask(engine: LiveEngine) -> None:
        while True:
            engine.submit(100, 30, lambda is_last: None)
            await asyncio.sleep(0.3)

    @asynccontextmanager
    async def serving_metrics() -> AsyncIterator[None]:
        engine = LiveEngine(
            EngineConfiguration([str(tmp_path / "gpus" / "0")], str(tmp_path / "profile.csv"), 512, 100_000)
        )
        runner = web.AppRunner(application(engine))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        asking = asyncio.create_task(ask(engine))
        yield
        asking.cancel()
        await runner.cleanup()
        await asyncio.to_thread(engine.close)

    async with running(tmp_path, gpu, metrics=f"127.0.0.1:{port}"):
        async with serving_metrics():
            await until(lambda: is_low(gpu), "a low clock")
        await until(lambda: not is_low(gpu), "stock")
        async with serving_metrics():
            await until(lambda: is_low(gpu), "a low clock again")


async def test_stock_a_second_after_the_last_statistics_and_then_the_gpu_is_free(
    tmp_path: Path, gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance, "_GONE_S", 1.5)
    with capture_logs() as logs:
        async with running(tmp_path, gpu) as engine:
            await until(lambda: is_low(gpu), "a low clock")
            engine.is_silent = True
            await until(lambda: not is_low(gpu), "stock")
            await until(lambda: "instance let go: no statistics" in [each["event"] for each in logs], "it")
            engine.is_silent = False
            await until(lambda: is_low(gpu), "a low clock again")
    found = [(each["event"], each.get("reason")) for each in logs if each["event"].startswith("instance ")]
    assert found == [
        ("instance taken up", None),
        ("instance at stock", "no statistics for a second"),
        ("instance let go: no statistics", None),
        ("instance taken up", None),
    ]


async def test_an_observing_agent_sets_nothing(tmp_path: Path, gpu: EmulatedGpu) -> None:
    with capture_logs() as logs:
        async with running(tmp_path, gpu, observe=True):
            await until(lambda: "instance taken up" in [each["event"] for each in logs], "the instance")
            await asyncio.sleep(1.0)
            assert not is_low(gpu)
    assert not (tmp_path / "restore").exists()


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"gpus": ["7"]}, "gpus: expected different ones of this node's 1, found 7"),
        ({"gpus": ["0", "GPU-0"]}, "gpus: expected different ones of this node's 1, found GPU-0"),
        ({"grants": "someone: 0\n"}, "expected a grant for user"),
    ],
    ids=["no such GPU", "one GPU twice", "another user's GPU"],
)
async def test_what_keeps_an_instance_from_control_is_said(
    tmp_path: Path, gpu: EmulatedGpu, more: dict[str, Any], expected: str
) -> None:
    if "grants" in more:
        (tmp_path / "grants").mkdir()
        (tmp_path / "grants" / "all").write_text(more["grants"])
        more = {"grants": tmp_path / "grants"}
    with capture_logs() as logs:
        async with running(tmp_path, gpu, **more):
            await until(lambda: any(expected in reason for reason in reasons(logs)), "the problem")
            assert not is_low(gpu)


async def test_a_plug_in_of_no_instance_is_refused(tmp_path: Path, gpu: EmulatedGpu, caplog: Any) -> None:
    async with running(tmp_path, gpu, user="nobody"):
        await until(lambda: "expected one configured instance of user" in caplog.text, "the refusal")
        assert not is_low(gpu)


async def test_a_malformed_profile_is_one_clear_error(tmp_path: Path, gpu: EmulatedGpu) -> None:
    (tmp_path / "bad.csv").write_text("clock\n")
    with pytest.raises(ServingError, match=r"bad.csv: line 1: expected columns"):
        async with running(tmp_path, gpu, profile=tmp_path / "bad.csv"):
            pass


# --- The reader of an engine's metrics ----------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"


@contextmanager
def trickling(begin: bytes) -> Iterator[tuple[int, threading.Event]]:
    """Yield the port of a server that sends this, and then a byte now and then, for as long as it can.

    The event is set when a client has given up on a scrape.
    """
    ended, given_up = threading.Event(), threading.Event()

    def serve() -> None:
        while not ended.is_set():
            with suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.sendall(begin)
                    try:
                        while not ended.wait(0.01):
                            connection.sendall(b"x")
                    except OSError:
                        given_up.set()

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1], given_up
        finally:
            ended.set()
            thread.join()


@pytest.mark.parametrize("begin", [b"", HEAD], ids=["headers", "body"])
def test_a_scrape_that_trickles_is_given_up(begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_metrics, "_TIMEOUT_S", 0.1)
    with capture_logs() as logged, trickling(begin) as (port, given_up):
        reader = MetricsReader("127.0.0.1", port, lambda *_: None)
        assert given_up.wait(60)
        reader.close()
    (warning,) = logged
    assert warning["reason"] in ("expected a whole answer within 0.1 s", "timed out")
