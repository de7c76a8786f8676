"""The emulated engine and the replayer over real HTTP: tokens, metrics, plug-ins, watts, refusals."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import pytest
from aiohttp import web

from benchmarks.serving_data import QWEN_14B, measured_steps
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM
from perseus.emulation.request_replay import Outcome, replay_requests
from perseus.emulation.serving import EngineConfiguration, LiveEngine, application
from perseus.serving.engine import Request
from perseus.serving.model import MeasuredStep
from perseus.serving.profile_csv import read_profile
from perseus.serving.scrape import interval, parse_metrics
from tests.published_data import PUBLISHED_DATA
from tests.serving.profiles import measured, model
from tests.serving.test_profile_csv import text

CLOCK_MHZ = 1410


class Recorder:
    """A plug-in that keeps what it is called with."""

    steps: ClassVar[list[Any]] = []

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.steps.clear()

    def log_engine_initialized(self) -> None:
        self.steps.append("initialized")

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        self.steps.append((scheduler_stats, iteration_stats))


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[str]:
    profile = tmp_path / "profile.csv"
    profile.write_text(text(measured()))
    gpu = EmulatedGpu.create(tmp_path / "gpu", A100_SXM, "GPU-0")
    engine = LiveEngine(
        EngineConfiguration([str(tmp_path / "gpu")], str(profile), 512, 2_000, [f"{__name__}:Recorder"])
    )
    runner = web.AppRunner(application(engine))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()
    await asyncio.to_thread(engine.close)
    gpu.close()


async def _get(address: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}/metrics") as answer:
        return await answer.text()


async def test_requests_are_batched_streamed_and_counted(served: str) -> None:
    before = parse_metrics(await _get(served))
    outcomes: list[Outcome] = []
    requests = [Request(0.0, 100, 10), Request(0.02, 30, 5)]
    await replay_requests(served, requests, outcomes.append)
    assert [len(each.itl_s) for each in outcomes] == [9, 4]
    assert [each.error for each in outcomes] == ["", ""]
    assert outcomes[0].ttft_s is not None
    assert outcomes[0].ttft_s >= float(model().time_s(100, 0, 100)[-1])
    after = parse_metrics(await _get(served))
    stats = interval(before, after, 1.0)
    assert stats is not None
    assert (stats.running_count, stats.waiting_count) == (0, 0)
    assert (stats.prompt_tokens, stats.generation_tokens) == (130, 15)
    assert (sum(each.count for each in stats.ttft), sum(each.count for each in stats.itl)) == (2, 13)
    initialized, *steps = Recorder.steps
    assert initialized == "initialized"
    assert sum(iteration.num_generation_tokens for _, iteration in steps) == 15
    assert steps[-1][0].num_running_reqs == 0
    assert stats.step_count == len(steps)


async def test_without_streaming_and_what_is_refused(served: str) -> None:
    url = f"http://{served}/v1/completions"
    async with aiohttp.ClientSession() as session:
        async with session.post(url, json={"prompt": "a b c", "max_tokens": 4}) as answer:
            found = await answer.json()
        assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 4}
        refused: list[Any] = [
            {},
            {"prompt": ""},
            {"prompt": "a", "max_tokens": 0},
            {"prompt": [0] * 9_999},
            [],
        ]
        for asked in refused:
            async with session.post(url, json=asked) as answer:
                assert answer.status == 400
                assert "error" in await answer.json()


async def test_a_replay_goes_on_without_the_engine() -> None:
    outcomes: list[Outcome] = []
    await replay_requests("127.0.0.1:1", [Request(0.0, 1, 1)], outcomes.append)
    assert outcomes[0].ttft_s is None
    assert outcomes[0].error


needs_data = pytest.mark.skipif(
    not PUBLISHED_DATA.exists(), reason="the published data is not beside the checkout"
)


@pytest.mark.parametrize(
    "steps", [measured, pytest.param(lambda: measured_steps(QWEN_14B), marks=needs_data, id="published")]
)
@pytest.mark.parametrize("clock_mhz", [CLOCK_MHZ, 990])
async def test_watts_and_times_of_steps(
    tmp_path: Path, clock_mhz: int, steps: Callable[[], list[MeasuredStep]]
) -> None:
    profile = tmp_path / "profile.csv"
    profile.write_text(text(steps()))
    expected = read_profile(profile.read_text(), "profile").at_clocks([clock_mhz])
    gpu = EmulatedGpu.create(tmp_path / "gpu", A100_SXM, "GPU-0")
    gpu.set_clock_mhz(clock_mhz)
    engine = LiveEngine(EngineConfiguration([str(tmp_path / "gpu")], str(profile), 512, 100_000))
    through = threading.Event()
    times_s: list[float] = []

    def on_token(is_last: bool) -> None:
        times_s.append(time.monotonic())
        if is_last:
            through.set()

    engine.submit(400, 12, on_token)
    during_w = []
    while not through.wait(0.01):
        during_w.append(gpu.power_w())
    engine.close()
    gpu.close()
    steps_s = sorted(later_s - earlier_s for earlier_s, later_s in pairwise(times_s))
    one_s, one_w = float(expected.time_s(0, 1, 400)[0]), float(expected.power_w(0, 1)[0])
    assert steps_s[0] >= 0.95 * one_s
    assert min(abs(power_w - one_w) for power_w in during_w) < 0.02 * one_w
