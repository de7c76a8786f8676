"""vLLM's statistics for the agent: a plug-in of the group `vllm.stat_logger_plugins` (vLLM 0.11.1 or later).

vLLM loads it in its API server, of which there may be several, and calls `record` after each step. That only
appends to a bounded queue. A thread sums up the queue four times a second and sends an interval to the agent,
if the agent's socket is there, also while the engine is idle. An interval that the agent has no room for is
sent with the next one. Nothing here raises into the engine.

Earlier versions have no such group: there, pass the class as `AsyncLLM(stat_loggers=[StatLogger])`, or let
the agent read the engine's metrics.
"""

import logging
import math
import os
import socket
import threading
import time
from collections import Counter, deque
from typing import Any

from perseus.agent.link.address import DEFAULT_SOCKET_PATH, SOCKET_VARIABLE
from perseus.agent.link.packets import (
    LATENCY_RATIO,
    MAX_LATENCY_BUCKET,
    MAX_PACKET_BYTES,
    EngineHello,
    EngineReport,
    Reply,
    decode,
    encode,
)

try:
    from vllm.v1.metrics.loggers import StatLoggerBase
except ModuleNotFoundError as error:
    if error.name != "vllm":  # one without it: vLLM logs the error and goes on without this plug-in
        raise
    StatLoggerBase = object

INSTANCE_VARIABLE = "PERSEUS_INSTANCE"
"""Environment variable with the instance's name in the agent's configuration."""

_log = logging.getLogger("vllm.perseus")  # vLLM shows only its own loggers
_INTERVAL_S = 0.25
_RECONNECT_S = 5.0
MAX_STEPS = 4096
"""Kept until the thread takes them: 20 s of the shortest steps."""
_BUCKETS_PER_UNIT = 1 / math.log(LATENCY_RATIO)


class StatLogger(StatLoggerBase):  # type: ignore[misc]
    """Sends the statistics of one engine of this process to the agent of the node.

    Attributes:
        sender: does so, from its own thread.
    """

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self._steps: deque[tuple[Any, Any]] = deque(maxlen=MAX_STEPS)
        path = os.environ.get(SOCKET_VARIABLE, DEFAULT_SOCKET_PATH)
        hello = EngineHello(os.environ.get(INSTANCE_VARIABLE, ""), engine_index)
        self.sender = Sender(self._steps, path, hello)

    def record(
        self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: object, **__: object
    ) -> None:
        """Note a step, or part of one; either argument may be None."""
        self._steps.append((scheduler_stats, iteration_stats))

    def log_engine_initialized(self) -> None:
        """Begin to send."""
        threading.Thread(target=self.sender.run, name="perseus", daemon=True).start()


class Sender:
    """Sums up steps and sends the intervals."""

    def __init__(self, steps: deque[tuple[Any, Any]], path: str, hello: EngineHello) -> None:
        self._steps, self._path, self._hello = steps, path, hello
        self._stopped = threading.Event()
        self._connection: socket.socket | None = None
        self._connect_at_s = 0.0
        self._running_count = self._waiting_count = 0
        self._kv_usage = 0.0
        self._last_problem = ""
        self._clear(time.monotonic())

    def stop(self) -> None:
        """Let `run` end, soon; returns at once."""
        self._stopped.set()

    def run(self) -> None:
        """Send until stopped, or the process ends; then end the connection."""
        while not self._stopped.wait(_INTERVAL_S):
            try:
                self.beat(time.monotonic())
            except Exception as error:
                self._note(f"statistics not sent: {error!r}")
                self._disconnect(time.monotonic())
        self._disconnect(time.monotonic())

    def beat(self, now_s: float) -> None:
        """Take the steps since the last call, and send them if an agent is there."""
        if self._connection is None:
            self._connect(now_s)
            self._steps.clear()  # the first interval begins here
            return
        self._sum_up()
        try:
            self._hear(self._connection)
            self._connection.send(encode(self._report(now_s)))
        except BlockingIOError:  # no room: the next interval includes this one
            return
        except OSError:
            self._disconnect(now_s)
            return
        self._clear(now_s)

    def _connect(self, now_s: float) -> None:
        if now_s < self._connect_at_s or not os.path.exists(self._path):
            return
        self._connect_at_s = now_s + _RECONNECT_S
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.setblocking(False)
            connection.connect(self._path)
            connection.send(encode(self._hello))
        except OSError as error:
            connection.close()
            self._note(f"{self._path}: {error.strerror}")
            return
        self._connection = connection
        self._clear(now_s)

    def _disconnect(self, now_s: float) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._connect_at_s = now_s + _RECONNECT_S

    def _hear(self, connection: socket.socket) -> None:
        """Read the answer to the hello. Raises OSError if the agent has ended the connection."""
        try:
            packet = connection.recv(MAX_PACKET_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:
            # The agent left without reading a report. Linux says so once, before the queued packets.
            packet = connection.recv(MAX_PACKET_BYTES)
        if not packet:
            raise ConnectionResetError
        if isinstance(reply := decode(packet), Reply):
            self._note(f"the agent {'accepts' if reply.ok else 'refuses'} this engine: {reply.message}")

    def _note(self, problem: str) -> None:
        if problem != self._last_problem:
            _log.warning("perseus: %s", problem)
            self._last_problem = problem

    # ------------------------------------------------------------------ summing up

    def _clear(self, now_s: float) -> None:
        self._begun_s = now_s
        self._prompt_tokens = self._generation_tokens = self._step_count = 0
        self._itl_sum_s = 0.0
        self._ttft: Counter[int] = Counter()
        self._itl: Counter[int] = Counter()

    def _sum_up(self) -> None:
        # The classes of vLLM's statistics change from version to version: whatever is missing counts as 0.
        while self._steps:
            scheduler, iteration = self._steps.popleft()
            if scheduler is not None:
                self._running_count = int(getattr(scheduler, "num_running_reqs", 0))
                self._waiting_count = int(getattr(scheduler, "num_waiting_reqs", 0))
                self._kv_usage = float(getattr(scheduler, "kv_cache_usage", 0.0))
            if iteration is None:
                continue
            self._step_count += 1
            cached = getattr(getattr(iteration, "prompt_token_stats", None), "cached_tokens", 0)
            self._prompt_tokens += max(0, int(getattr(iteration, "num_prompt_tokens", 0)) - int(cached))
            self._generation_tokens += int(getattr(iteration, "num_generation_tokens", 0))
            self._ttft.update(map(_bucket, getattr(iteration, "time_to_first_tokens_iter", ())))
            latencies_s: Any = getattr(iteration, "inter_token_latencies_iter", None)
            if latencies_s is None:  # before vLLM 0.11
                latencies_s = getattr(iteration, "time_per_output_tokens_iter", ())
            self._itl.update(map(_bucket, latencies_s))
            self._itl_sum_s += sum(latencies_s)

    def _report(self, now_s: float) -> EngineReport:
        return EngineReport(
            length_s=now_s - self._begun_s,
            running_count=self._running_count,
            waiting_count=self._waiting_count,
            kv_usage=self._kv_usage,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            step_count=self._step_count,
            itl_sum_s=self._itl_sum_s,
            ttft=dict(self._ttft),
            itl=dict(self._itl),
        )


def _bucket(latency_s: float) -> int:
    if latency_s <= 0:
        return -MAX_LATENCY_BUCKET
    bucket = math.floor(math.log(latency_s) * _BUCKETS_PER_UNIT)
    return max(-MAX_LATENCY_BUCKET, min(MAX_LATENCY_BUCKET, bucket))
