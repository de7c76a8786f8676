"""What an agent costs that controls an engine: its share of a core, at 100 steps a second.

A real agent with emulated GPUs, and a process that reports as vLLM's plug-in does.
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from benchmarks.harness import Column, Table, main
from perseus.agent.link.address import SOCKET_VARIABLE
from perseus.agent.vllm import StatLogger
from perseus.demo.processes import Process, end
from perseus.demo.serving_scenario import GPU, profile_csv
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import Work

_STEPS_PER_S = 100
_SETTLE_S, _MEASURED_S = 25.0, 30.0
_DECODING = 64
_GPUS_OF_INSTANCES = ((1,), (8,), (1,) * 8)


def run() -> list[Table]:
    """Measure agents with one instance and with several."""
    rows = [(len(each), sum(each), 100 * _share(each)) for each in _GPUS_OF_INSTANCES]
    columns = (Column("instances", "d"), Column("GPUs", "d"), Column("agent, % of a core", ".1f"))
    note = (
        f"Each instance: {_STEPS_PER_S} steps a second with {_DECODING} requests; measured while clocks are "
        "held. Most of it is polling the energy counters, 50 times a second for each GPU; an emulated "
        "counter costs more than NVML's."
    )
    return [Table("The agent beside inference engines", columns, tuple(rows), note)]


def _share(gpu_counts: tuple[int, ...]) -> float:
    """Return the agent's CPU time in cores."""
    with tempfile.TemporaryDirectory(prefix="perseus-") as name:
        folder = Path(name)
        (folder / "gpus").mkdir()
        (folder / "profile.csv").write_text(profile_csv())
        socket = folder / "agent.sock"
        lines = [
            f'socket = "{socket}"\ngpu_backend = "emulated"\nemulated_gpus = "{folder / "gpus"}"',
            f'restore_folder = "{folder / "restore"}"\ngrants = "{folder / "grants"}"',
            f'coordinator = "unix:{folder / "coordinator.sock"}"\ntoken = "none"',
        ]
        index = 0
        for instance, count in enumerate(gpu_counts):
            own = [str(each) for each in range(index, index + count)]
            index += count
            for each in own:
                gpu = EmulatedGpu.create(folder / "gpus" / each, GPU, f"GPU-{each}")
                gpu.execute(Work(0.001, 0.0))
                gpu.close()
            lines.append(
                f'[instances.i{instance}]\ngpus = {own}\nuser = "{os.getuid()}"\nttft = "p99 <= 2 s"\n'
                f'itl = "p95 <= 100 ms"\nprofile = "{folder / "profile.csv"}"\nmax_batched_tokens = 512\n'
                "kv_capacity_tokens = 100000"
            )
        (folder / "agent.toml").write_text("\n".join(lines) + "\n")
        agent = Process(
            folder / "agent.log", *("-m", "perseus.demo.serving_agent", str(folder / "agent.toml"))
        )
        engines = [
            Process(
                folder / f"engine-{instance}.log",
                *("-m", "benchmarks.serving_agent", "engine"),
                environment={SOCKET_VARIABLE: str(socket), "PERSEUS_INSTANCE": f"i{instance}"},
            )
            for instance in range(len(gpu_counts))
        ]
        try:
            for process in (agent, *engines):
                process.launch()
            agent.until(socket.exists, "the agent's socket")
            time.sleep(_SETTLE_S)
            before_s = _cpu_s(agent.pid)
            time.sleep(_MEASURED_S)
            return (_cpu_s(agent.pid) - before_s) / _MEASURED_S
        finally:
            end(*engines, agent)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def report_as_engine() -> None:
    """Report a steady load until terminated."""
    logger = StatLogger()
    logger.log_engine_initialized()
    scheduler = SimpleNamespace(num_running_reqs=_DECODING, num_waiting_reqs=0, kv_cache_usage=0.1)
    iteration = SimpleNamespace(
        num_prompt_tokens=0,
        num_generation_tokens=_DECODING,
        time_to_first_tokens_iter=[],
        inter_token_latencies_iter=[0.01] * _DECODING,
    )
    while True:
        logger.record(scheduler, iteration)
        time.sleep(1 / _STEPS_PER_S)


if __name__ == "__main__":
    if sys.argv[1:] == ["engine"]:
        report_as_engine()
    else:
        main("serving_agent", run)
