"""What vLLM's plug-in costs an engine: for each step in the engine's thread, and in its own thread."""

import os
import socket
import tempfile
import threading
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter_ns, process_time, sleep, thread_time
from types import SimpleNamespace

from benchmarks.harness import Column, Table, main
from perseus.agent.link.address import SOCKET_VARIABLE
from perseus.agent.link.packets import MAX_PACKET_BYTES
from perseus.agent.vllm import StatLogger

_STEPS_PER_S = 100
_MEASURED_S = 10.0


def run() -> list[Table]:
    """Measure engines with few and many requests, with and without an agent."""
    rows = []
    for has_agent in (True, False):
        for decoding in (8, 64, 256):
            costs_us, share = _measure(decoding, has_agent)
            rows.append(
                (
                    decoding,
                    "yes" if has_agent else "no",
                    median(costs_us),
                    quantiles(costs_us, n=100)[98],
                    100 * share,
                )
            )
    columns = (
        Column("requests that decode", "d"),
        Column("agent there"),
        Column("per step, median, µs", ".2f"),
        Column("per step, 99 %, µs", ".2f"),
        Column("its own thread, % of a core", ".2f"),
    )
    note = (
        f"{_STEPS_PER_S} steps a second, each with an inter-token latency per request. Per step: the call of "
        "`record` in the engine's thread. Its own thread holds the interpreter's lock while it sums up."
    )
    return [Table("The plug-in for vLLM", columns, tuple(rows), note)]


def _measure(decoding: int, has_agent: bool) -> tuple[list[float], float]:
    """Return the times of `record` in microseconds, and what else the process used, in cores."""
    with tempfile.TemporaryDirectory(prefix="perseus-") as folder:
        path = Path(folder) / "agent.sock"
        os.environ[SOCKET_VARIABLE] = str(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reader = threading.Thread(target=_read, args=(listener,), daemon=True)
        if has_agent:
            listener.bind(str(path))
            listener.listen()
            reader.start()
        logger = StatLogger()
        logger.log_engine_initialized()
        sleep(1.0)
        costs_us = []
        begun_s, own_s = process_time(), thread_time()
        for _ in range(round(_STEPS_PER_S * _MEASURED_S)):
            iteration = SimpleNamespace(
                num_prompt_tokens=0,
                num_generation_tokens=decoding,
                time_to_first_tokens_iter=[],
                inter_token_latencies_iter=[0.01 + 1e-6 * each for each in range(decoding)],
            )
            scheduler = SimpleNamespace(num_running_reqs=decoding, num_waiting_reqs=0, kv_cache_usage=0.1)
            before_ns = perf_counter_ns()
            logger.record(scheduler_stats=scheduler, iteration_stats=iteration, engine_idx=0)
            costs_us.append((perf_counter_ns() - before_ns) / 1e3)
            sleep(1 / _STEPS_PER_S)
        others_s = process_time() - begun_s - (thread_time() - own_s)
        listener.close()
    return costs_us, others_s / _MEASURED_S


def _read(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        while connection.recv(MAX_PACKET_BYTES):
            pass


if __name__ == "__main__":
    main("serving_plugin", run)
