"""An emulated inference engine: OpenAI-like HTTP with streaming, vLLM's metrics, and calls of its plug-ins.

`python -m perseus.emulation.serving CONFIGURATION`, which is JSON (`EngineConfiguration`). Batches are those
of `perseus.serving.engine`, in real time: a step executes on all emulated GPUs, for the time and with the
watts of the profile at the clock that the first of them has when it begins.

    POST /v1/completions   prompt (a text, whose words count, or a list of tokens), max_tokens, stream
    GET /metrics, /health  as vLLM
"""

import asyncio
import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import Work
from perseus.serving.engine import Engine, Request, StepTable
from perseus.serving.errors import ServingError
from perseus.serving.profile_csv import read_profile
from perseus.serving.stats import EngineLimits

_TTFT_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
    640, 2560,
)  # fmt: skip
_ITL_BOUNDS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80
)  # fmt: skip
"""vLLM's."""
_IDLE_S = 0.05
_INSTANT_S = 1e-9


@dataclass(frozen=True, slots=True)
class EngineConfiguration:
    """An engine: the files of its GPUs and its profile, its limits, and plug-ins as `module:class`.

    `port`: 0 for any that is free.
    """

    gpus: Sequence[str]
    profile: str
    max_batched_tokens: int
    kv_capacity_tokens: int
    stat_loggers: Sequence[str] = ()
    port: int = 0

    def to_json(self) -> str:
        """Return it as the program's argument."""
        return json.dumps(asdict(self))


class LiveEngine:
    """The engine's thread. `submit` may be called from any other."""

    def __init__(self, configuration: EngineConfiguration) -> None:
        profile = Path(configuration.profile)
        self._gpus = [EmulatedGpu(Path(each)) for each in configuration.gpus]
        steps = read_profile(profile.read_text(), str(profile))
        clocks = [
            each
            for each in self._gpus[0].supported_clocks_mhz
            if steps.clocks_mhz[0] <= each <= steps.clocks_mhz[-1]
        ]
        self._limits = EngineLimits(configuration.max_batched_tokens, configuration.kv_capacity_tokens)
        self._requests: list[Request] = []
        self._listeners: dict[int, Callable[[bool], None]] = {}
        self._engine = Engine(StepTable(steps.at_clocks(clocks), self._limits), self._limits, self._requests)
        self._changed = threading.Condition()
        self._stopping = False
        self._last_s: dict[int, float] = {}
        self.metrics = _Metrics()
        self._stat_loggers = [resolve_name(each)(None, 0) for each in configuration.stat_loggers]
        for each in self._stat_loggers:
            each.log_engine_initialized()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, prompt_tokens: int, generated_tokens: int, on_token: Callable[[bool], None]) -> None:
        """Add a request; the engine's thread calls `on_token` for each token, with whether it is the last.

        Raises:
            ServingError: it never fits.
        """
        context = prompt_tokens + generated_tokens
        if min(prompt_tokens, generated_tokens) < 1 or context > self._limits.kv_capacity_tokens:
            raise ServingError(
                f"request: expected 1 to {self._limits.kv_capacity_tokens} tokens in all, found {context}"
            )
        with self._changed:
            self._listeners[len(self._requests)] = on_token
            self._requests.append(Request(time.monotonic(), prompt_tokens, generated_tokens))
            self._changed.notify()

    def close(self) -> None:
        """End the thread after its step."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()
        for gpu in self._gpus:
            gpu.close()

    def _run(self) -> None:
        engine = self._engine
        while not self._stopping:
            with self._changed:
                if not engine.is_busy and engine.next_arrival_s == math.inf:
                    self._changed.wait(_IDLE_S)
                    continue
                engine.now_s = max(engine.now_s, time.monotonic())
                decoding = set(engine.decoding)
                clock_mhz = self._gpus[0].sm_clock_mhz()
                engine.column = min(
                    range(len(engine.clocks_mhz)), key=lambda each: abs(engine.clocks_mhz[each] - clock_mhz)
                )
                before_s, before_j, begun = engine.now_s, engine.totals.energy_j, engine.totals.prompt_tokens
                engine.run_until(engine.now_s + _INSTANT_S)
            time_s = engine.now_s - before_s
            self._execute(time_s, (engine.totals.energy_j - before_j) / time_s / len(self._gpus))
            self._publish(decoding, engine.first_tokens, engine.totals.prompt_tokens - begun)

    def _execute(self, time_s: float, power_w: float) -> None:
        for gpu in self._gpus:
            model, clock_mhz = gpu.model, gpu.sm_clock_mhz()
            none_w, full_w = model.power_w(0.0, clock_mhz), model.power_w(1.0, clock_mhz)
            activity = min(1.0, max(1e-3, (power_w - none_w) / (full_w - none_w)))
            gpu.begin(Work(compute_s=0.0, memory_s=time_s, activity=activity))
        for gpu in self._gpus:
            gpu.wait()

    def _publish(self, decoding: set[int], first: Sequence[int], prompt_tokens: int) -> None:
        now_s, engine = time.monotonic(), self._engine
        left = {*engine.decoding}
        ttft = [now_s - self._requests[number].arrival_s for number in first]
        itl = [now_s - self._last_s[number] for number in decoding]
        for number in (*decoding, *first):
            self._last_s[number] = now_s
            is_last = number not in left
            self._listeners[number](is_last)
            if is_last:
                del self._listeners[number], self._last_s[number]
        running, waiting, kv_usage = engine.occupancy
        scheduler = SimpleNamespace(
            num_running_reqs=running, num_waiting_reqs=waiting, kv_cache_usage=kv_usage
        )
        iteration = SimpleNamespace(
            num_prompt_tokens=prompt_tokens,
            num_generation_tokens=len(first) + len(decoding),
            time_to_first_tokens_iter=ttft,
            inter_token_latencies_iter=itl,
        )
        self.metrics.record(scheduler, iteration)
        for each in self._stat_loggers:
            each.record(
                scheduler_stats=scheduler, iteration_stats=iteration, mm_cache_stats=None, engine_idx=0
            )


class _Metrics:
    """vLLM's metrics that matter here, by its names."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        more: Any = {"labelnames": ("model_name", "engine"), "registry": registry}
        made = {
            "running": Gauge("vllm:num_requests_running", "Running requests.", **more),
            "waiting": Gauge("vllm:num_requests_waiting", "Waiting requests.", **more),
            "kv_usage": Gauge("vllm:kv_cache_usage_perc", "KV cache usage, 1 is all.", **more),
            "prompt": Counter("vllm:prompt_tokens", "Prefill tokens.", **more),
            "generation": Counter("vllm:generation_tokens", "Generated tokens.", **more),
            "iteration": Histogram("vllm:iteration_tokens_total", "Tokens per step.", **more),
            "ttft": Histogram("vllm:time_to_first_token_seconds", "TTFT.", buckets=_TTFT_BOUNDS_S, **more),
            "itl": Histogram("vllm:inter_token_latency_seconds", "ITL.", buckets=_ITL_BOUNDS_S, **more),
        }
        self._registry = registry
        self._of: dict[str, Any] = {name: each.labels("emulated", "0") for name, each in made.items()}

    def record(self, scheduler: Any, iteration: Any) -> None:
        self._of["running"].set(scheduler.num_running_reqs)
        self._of["waiting"].set(scheduler.num_waiting_reqs)
        self._of["kv_usage"].set(scheduler.kv_cache_usage)
        self._of["prompt"].inc(iteration.num_prompt_tokens)
        self._of["generation"].inc(iteration.num_generation_tokens)
        self._of["iteration"].observe(iteration.num_prompt_tokens + iteration.num_generation_tokens)
        for latency_s in iteration.time_to_first_tokens_iter:
            self._of["ttft"].observe(latency_s)
        for latency_s in iteration.inter_token_latencies_iter:
            self._of["itl"].observe(latency_s)

    def render(self) -> bytes:
        return generate_latest(self._registry)


def application(engine: LiveEngine) -> web.Application:
    """Return the HTTP application of an engine."""

    async def complete(request: web.Request) -> web.StreamResponse:
        try:
            asked = await request.json()
            prompt = asked["prompt"]
            prompt_tokens = len(prompt.split() if isinstance(prompt, str) else prompt)
            tokens: asyncio.Queue[bool] = asyncio.Queue()
            loop = asyncio.get_running_loop()

            def on_token(is_last: bool) -> None:
                loop.call_soon_threadsafe(tokens.put_nowait, is_last)

            engine.submit(prompt_tokens, int(asked.get("max_tokens", 16)), on_token)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        choice: dict[str, Any] = {"index": 0, "text": " token", "finish_reason": None}
        if not asked.get("stream"):
            count = 1
            while not await tokens.get():
                count += 1
            choice |= {"text": " token" * count, "finish_reason": "length"}
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count}
            return web.json_response({"object": "text_completion", "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        is_last = False
        while not is_last:
            is_last = await tokens.get()
            choice["finish_reason"] = "length" if is_last else None
            chunk = json.dumps({"object": "text_completion", "choices": [choice]})
            await response.write(f"data: {chunk}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=engine.metrics.render(), content_type="text/plain")

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    made = web.Application()
    made.add_routes(
        [web.post("/v1/completions", complete), web.get("/metrics", metrics), web.get("/health", health)]
    )
    return made


async def serve(configuration: EngineConfiguration) -> None:
    """Serve on loopback until SIGTERM; writes a line of JSON with the address, once it listens."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    engine = LiveEngine(configuration)
    runner = web.AppRunner(application(engine))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", configuration.port).start()
    host, port = runner.addresses[0][:2]
    print(json.dumps({"event": "listening", "address": f"{host}:{port}"}), flush=True)
    await stop.wait()
    engine.close()
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(EngineConfiguration(**json.loads(sys.argv[1]))))
