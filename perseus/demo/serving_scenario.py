"""The demo of inference: two emulated engines get the same requests, one at stock and one under an agent.

Everything is on loopback, without a coordinator: the agent controls its engine by itself. The profile is made
up (`profile_csv`): a step reads the weights, whatever the clock, and computes 0.12 ms a token at the highest.
"""

import asyncio
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any, Protocol

from perseus import pictures
from perseus.demo.processes import ClusterError, Process, end
from perseus.demo.serving_agent import REMEMBERED_S
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM
from perseus.emulation.request_replay import Outcome, replay_requests
from perseus.emulation.serving import EngineConfiguration
from perseus.serving.engine import Request
from perseus.serving.stats import LatencyObjective, Objectives

LOW, HIGH, LOW_AGAIN = "low load", "high load", "low load again"
STEPS = (LOW, HIGH, LOW_AGAIN)
STOCK, CONTROLLED = "stock", "Perseus"
ENGINES = (STOCK, CONTROLLED)
GPU = A100_SXM.with_clocks(8)
TTFT, ITL = "p99 <= 500 ms", "p95 <= 50 ms"
OBJECTIVES = Objectives(LatencyObjective.parse(TTFT), LatencyObjective.parse(ITL))
_MAX_BATCHED_TOKENS, _KV_CAPACITY_TOKENS = 512, 100_000
_PROMPT_TOKENS, _GENERATED_TOKENS = (20, 240), (30, 90)


@dataclass(frozen=True, slots=True)
class ServingScript:
    """The load: requests a second, and seconds, of each step."""

    rates: tuple[float, float, float] = (2.0, 9.0, 2.0)
    lengths_s: tuple[float, float, float] = (35.0, 25.0, 45.0)

    def requests(self) -> list[Request]:
        """Return the requests, the same at each call."""
        generator, now_s, found = random.Random(1), 0.0, []
        for rate, length_s in zip(self.rates, self.lengths_s, strict=True):
            end_s = now_s + length_s
            while (arrival_s := now_s + generator.expovariate(rate)) < end_s:
                prompt, answer = generator.randint(*_PROMPT_TOKENS), generator.randint(*_GENERATED_TOKENS)
                found.append(Request(arrival_s, prompt, answer))
                now_s = arrival_s
            now_s = end_s
        return found

    def step_at(self, time_s: float) -> str:
        """Return the step at a time since the start."""
        first_s, second_s, _ = self.lengths_s
        return STEPS[(time_s >= first_s) + (time_s >= first_s + second_s)]


SERVING_SCRIPT = ServingScript()


def profile_csv() -> str:
    """Return the made-up profile, as a file that the agent reads, too."""
    rows = ["clock_mhz,prefill_tokens,decoding_count,context_tokens,time_s,energy_j"]
    for clock_mhz in GPU.clocks_mhz:
        rows.append(f"{clock_mhz},0,0,0,1,{GPU.blocking_power_w(clock_mhz)}")
        for prefill, decoding in ((0, 1), (0, 16), (0, 64), (64, 16), (128, 16), (256, 16), (448, 64)):
            tokens = prefill + decoding
            time_s = 0.010 + (0.002 + 1.2e-4 * tokens) * GPU.highest_clock_mhz / clock_mhz
            power_w = GPU.power_w(0.5 + 0.5 * tokens / _MAX_BATCHED_TOKENS, clock_mhz)
            rows.append(f"{clock_mhz},{prefill},{decoding},{200 * decoding},{time_s},{power_w * time_s}")
    return "\n".join(rows) + "\n"


@dataclass(frozen=True, slots=True)
class ServingSample:
    """A second. By engine: clock, mean power, and tokens generated in it."""

    time_s: float
    requests_per_s: float
    clocks_mhz: dict[str, int]
    powers_w: dict[str, float]
    tokens: dict[str, int]


@dataclass(slots=True)
class ServingOutcome:
    """What was measured: the GPUs by their counters, latencies by the clients."""

    script: ServingScript
    begun_s: float = 0.0
    samples: list[ServingSample] = field(default_factory=list)
    outcomes: dict[str, list[Outcome]] = field(default_factory=lambda: {each: [] for each in ENGINES})

    def figures(self, step: str | None = None) -> dict[str, dict[str, Any]]:
        """Return each engine's figures in a step, or in all of them."""
        samples = [s for s in self.samples if step in (None, self.script.step_at(s.time_s - 1))]
        found = {}
        for engine in ENGINES:
            outcomes = [
                o
                for o in self.outcomes[engine]
                if step in (None, self.script.step_at(o.sent_s - self.begun_s))
            ]
            ttft_s = [o.ttft_s for o in outcomes if o.ttft_s is not None]
            itl_s = [itl_s for o in outcomes for itl_s in o.itl_s]
            tokens = sum(sample.tokens[engine] for sample in samples)
            clocks = [sample.clocks_mhz[engine] for sample in samples]
            found[engine] = {
                "requests": len(outcomes),
                "joules_per_token": sum(s.powers_w[engine] for s in samples) / max(1, tokens),
                "clocks_mhz": [min(clocks, default=0), max(clocks, default=0)],
                "ttft_p99_s": _percentile(ttft_s, 99),
                "itl_p95_s": _percentile(itl_s, 95),
                "ttft_attainment": _attainment(ttft_s, OBJECTIVES.ttft),
                "itl_attainment": _attainment(itl_s, OBJECTIVES.itl),
            }
        return found

    def less(self, step: str | None = None) -> float:
        """Return the share of energy per token that the controlled engine saves."""
        stock, own = (float(self.figures(step)[each]["joules_per_token"]) for each in ENGINES)
        return 1 - own / max(1e-9, stock)


def _percentile(values: Sequence[float], percent: int) -> float | None:
    return quantiles(values, n=100)[percent - 1] if len(values) > 1 else None


def _attainment(values: Sequence[float], objective: LatencyObjective) -> float | None:
    return sum(each <= objective.limit_s for each in values) / len(values) if values else None


class ServingDisplay(Protocol):
    """Shows the scenario while it runs."""

    def begin(self, step: str) -> None:
        """Show that a step has begun."""

    def refresh(self, outcome: ServingOutcome) -> None:
        """Show the latest second."""

    def note(self, lines: list[str]) -> None:
        """Print lines that stay."""


async def run_serving_scenario(
    out_dir: Path, display: ServingDisplay, script: ServingScript = SERVING_SCRIPT
) -> ServingOutcome:
    """Run the whole scenario; write summary.json to `out_dir`.

    Raises:
        ClusterError: a process did not start, or died.
        OSError: `out_dir` can't be written.
    """
    logs = out_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="perseus-") as folder:
        with running(Path(folder), logs) as (addresses, gpus, agent):
            display.note(
                [f"The agent remembers late requests for {REMEMBERED_S:.0f} s here, usually for 3 min"]
            )
            outcome = await _replay(addresses, gpus, display, script)
            if not agent.is_running:
                raise ClusterError(f"the agent has ended; its log is in {logs}")
        if (
            left := [name for name, gpu in gpus.items() if gpu.sm_clock_mhz() != GPU.highest_clock_mhz]
        ) != []:
            raise ClusterError(f"expected all GPUs at stock after the agent's end, found others: {left}")
    document = {step: outcome.figures(step) for step in STEPS} | {"all": outcome.figures()}
    (out_dir / "summary.json").write_text(json.dumps(document, indent=2) + "\n")
    return outcome


@contextmanager
def running(folder: Path, logs: Path) -> Iterator[tuple[dict[str, str], dict[str, EmulatedGpu], Process]]:
    """Run two engines and an agent for one of them; yields addresses, GPUs, and the agent's process."""
    profile, socket = folder / "profile.csv", folder / "agent.sock"
    profile.write_text(profile_csv())
    (folder / "agent.toml").write_text(
        f'socket = "{socket}"\ngpu_backend = "emulated"\nemulated_gpus = "{folder / CONTROLLED}"\n'
        f'restore_folder = "{folder / "restore"}"\ngrants = "{folder / "grants"}"\nlog_format = "json"\n'
        # No coordinator is there, and none of this machine's is asked instead, nor its token read.
        f'coordinator = "unix:{folder / "coordinator.sock"}"\ntoken = "none"\n\n'
        f'[instances.demo]\ngpus = ["0"]\nuser = "{os.getuid()}"\nttft = "{TTFT}"\nitl = "{ITL}"\n'
        f'profile = "{profile}"\nmax_batched_tokens = {_MAX_BATCHED_TOKENS}\n'
        f"kv_capacity_tokens = {_KV_CAPACITY_TOKENS}\n"
    )
    processes: list[Process] = []
    addresses: dict[str, str] = {}
    gpus: dict[str, EmulatedGpu] = {}
    try:
        for engine in ENGINES:
            file = folder / engine / "gpu-0.bin"
            file.parent.mkdir()
            gpus[engine] = EmulatedGpu.create(file, GPU, f"GPU-{engine}")
            plugins = ["perseus.agent.vllm:StatLogger"] if engine == CONTROLLED else []
            configuration = EngineConfiguration(
                [str(file)], str(profile), _MAX_BATCHED_TOKENS, _KV_CAPACITY_TOKENS, plugins
            )
            process = Process(
                logs / f"engine-{engine}.log",
                *("-m", "perseus.emulation.serving", configuration.to_json()),
                environment={"PERSEUS_AGENT_SOCKET": str(socket)},
            )
            processes.append(process)
            process.launch()
            addresses[engine] = str(process.logged("listening")["address"])
        agent = Process(logs / "agent.log", *("-m", "perseus.demo.serving_agent", str(folder / "agent.toml")))
        processes.append(agent)
        agent.launch()
        agent.until(socket.exists, "the agent's socket")
        yield addresses, gpus, agent
    finally:
        end(*processes[::-1])


async def _replay(
    addresses: dict[str, str], gpus: dict[str, EmulatedGpu], display: ServingDisplay, script: ServingScript
) -> ServingOutcome:
    outcome, requests, step = ServingOutcome(script, time.monotonic()), script.requests(), ""
    replays = [
        asyncio.create_task(replay_requests(addresses[each], requests, outcome.outcomes[each].append))
        for each in ENGINES
    ]
    energies_j, tokens, sent = _energies_j(gpus), dict.fromkeys(ENGINES, 0), 0
    try:
        for second in range(1, round(sum(script.lengths_s)) + 1):
            if (now := script.step_at(second - 1)) != step:
                step = now
                display.begin(step)
            await asyncio.sleep(max(0.0, outcome.begun_s + second - time.monotonic()))
            before_j, energies_j = energies_j, _energies_j(gpus)
            before, tokens = tokens, {each: _tokens(outcome.outcomes[each]) for each in ENGINES}
            before_sent, sent = sent, len(outcome.outcomes[STOCK])
            outcome.samples.append(
                ServingSample(
                    second,
                    sent - before_sent,
                    {each: gpu.sm_clock_mhz() for each, gpu in gpus.items()},
                    {each: energies_j[each] - before_j[each] for each in ENGINES},
                    {each: tokens[each] - before[each] for each in ENGINES},
                )
            )
            display.refresh(outcome)
        await asyncio.gather(*replays)
    finally:
        for each in replays:
            each.cancel()
        await asyncio.gather(*replays, return_exceptions=True)
    return outcome


def _energies_j(gpus: dict[str, EmulatedGpu]) -> dict[str, float]:
    return {engine: gpu.total_energy_j() for engine, gpu in gpus.items()}


def _tokens(outcomes: Sequence[Outcome]) -> int:
    return sum(len(each.itl_s) + (each.ttft_s is not None) for each in outcomes)


def draw_serving(outcome: ServingOutcome, window_s: int = 5) -> bytes:
    """Return a PNG of load, clocks and energy per token over time.

    Raises:
        ImportError: matplotlib is not installed.
    """
    samples = outcome.samples

    def per_token_j(engine: str) -> list[float]:
        windows = (samples[max(0, end - window_s) : end] for end in range(1, len(samples) + 1))
        return [
            sum(s.powers_w[engine] for s in window) / max(1, sum(s.tokens[engine] for s in window))
            for window in windows
        ]

    return pictures.draw_panels(
        f"The same requests at stock and under Perseus, TTFT {TTFT}, ITL {ITL}: emulated GPUs",
        [sample.time_s for sample in samples],
        {
            "requests/s": {"sent": [sample.requests_per_s for sample in samples]},
            "SM clock (MHz)": {each: [s.clocks_mhz[each] for s in samples] for each in ENGINES},
            f"J per token, {window_s} s": {each: per_token_j(each) for each in ENGINES},
        },
        "png",
    )


def judge_serving(outcome: ServingOutcome) -> list[str]:
    """Return the problems of an outcome; none if the objectives were kept with less energy.

    A share of so few requests may miss its objective by chance: it may be two standard errors too low. Tokens
    of a request are late together, so requests count.
    """
    figures, found = outcome.figures()[CONTROLLED], []
    for name, objective in (("ttft", OBJECTIVES.ttft), ("itl", OBJECTIVES.itl)):
        attainment, share = figures[f"{name}_attainment"], objective.percentile / 100
        if attainment is None:
            found.append(f"{name}: expected {objective.percentile:g} % in time, found no answer")
        elif attainment < share - 2 * math.sqrt(share * (1 - share) / figures["requests"]):
            found.append(
                f"{name}: expected {objective.percentile:g} % in time, found {100 * attainment:.2f} %"
            )
    if outcome.less() < 0.05:
        found.append(f"energy per token: expected at least 5 % less, found {100 * outcome.less():.1f} %")
    return found
