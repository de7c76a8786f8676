"""The probe's cost for the trainer: both edges of a computation, with a real agent in every condition.

The agent runs beside it on an emulated GPU, without a coordinator. A stopped agent reads nothing, so marks
are dropped once the socket is full; after a kill, the probe finds the connection closed. Trainer and agent
have a core each, as on any training node.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter_ns

from benchmarks.harness import Column, Table, main
from perseus.agent import Kind, Probe
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM

UUID = "GPU-benchmark"
COMPUTATIONS = 4000
COMPUTATION_TIME_S = 0.0005
"""Time between computations: a running agent keeps up."""
_START_TIMEOUT_S = 30.0
_CORES = os.sched_getaffinity(0)
TRAINER_CORE = min(_CORES)
_OTHER_CORES = _CORES - {TRAINER_CORE} or _CORES


def run() -> list[Table]:
    """Measure all conditions."""
    os.sched_setaffinity(0, {TRAINER_CORE})
    rows = []
    for condition in ("agent reads", "agent stopped, socket full", "agent killed", "no agent"):
        costs_us, dropped_count = _measure(condition)
        rows.append((condition, median(costs_us), quantiles(costs_us, n=100)[98], dropped_count))
    bare_us = _bare_sends_us()
    rows.append(("two bare sends to a reader", median(bare_us), quantiles(bare_us, n=100)[98], 0))
    columns = (
        Column("condition"),
        Column("median, µs", ".1f"),
        Column("99 %, µs", ".1f"),
        Column("marks dropped", "d"),
    )
    return [Table("Both edges of one computation in the trainer", columns, tuple(rows))]


def _measure(condition: str) -> tuple[list[float], int]:
    with tempfile.TemporaryDirectory(prefix="perseus-") as folder, running_agent(Path(folder)) as agent:
        path = Path(folder) / "agent.sock"
        if condition == "no agent":
            path = path.with_name("nobody.sock")
        probe = Probe.connect(path, job_id="job", pipeline=0, stage=0, gpu_uuid=UUID)
        if condition == "agent stopped, socket full":
            agent.send_signal(signal.SIGSTOP)
            while probe.dropped_mark_count == 0:
                probe.begin_iteration()
        elif condition == "agent killed":
            agent.kill()
            agent.wait()
        dropped_before = probe.dropped_mark_count
        costs_us = []
        probe.begin_iteration()
        for microbatch in range(COMPUTATIONS):
            begun_ns = perf_counter_ns()
            probe.begin_computation(Kind.FORWARD, microbatch)
            probe.end_computation(Kind.FORWARD, microbatch)
            costs_us.append((perf_counter_ns() - begun_ns) / 1000)
            compute(COMPUTATION_TIME_S)
        dropped_count = probe.dropped_mark_count - dropped_before
        agent.send_signal(signal.SIGCONT)  # does nothing to one that is dead
        probe.close()
    return costs_us, dropped_count


def _bare_sends_us() -> list[float]:
    """Return the system's own time for two packets of a mark's size to a process that waits for them."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = f"import socket; s = socket.socket(fileno={theirs.fileno()})\nwhile s.recv(64): pass"
    reader = subprocess.Popen([sys.executable, "-c", command], pass_fds=[theirs.fileno()])
    os.sched_setaffinity(reader.pid, _OTHER_CORES)
    theirs.close()
    packet = bytes(32)
    costs_us = []
    for _ in range(COMPUTATIONS):
        begun_ns = perf_counter_ns()
        ours.send(packet)
        ours.send(packet)
        costs_us.append((perf_counter_ns() - begun_ns) / 1000)
        compute(COMPUTATION_TIME_S)
    ours.close()
    reader.wait()
    return costs_us


def compute(duration_s: float) -> None:
    """Keep the core busy, as a trainer does; a sleep would let the core sleep, too."""
    until_s = time.perf_counter() + duration_s
    while time.perf_counter() < until_s:
        pass


@contextmanager
def running_agent(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run an agent with an emulated GPU on the other cores; its socket is `agent.sock` in the folder."""
    (folder / "gpus").mkdir()
    EmulatedGpu.create(folder / "gpus" / "gpu", A100_SXM, UUID).close()
    settings = {
        "COORDINATOR": "127.0.0.1:1",
        "SOCKET": str(folder / "agent.sock"),
        "GPU_BACKEND": "emulated",
        "EMULATED_GPUS": str(folder / "gpus"),
        "RESTORE_FOLDER": str(folder / "records"),
    }
    # Without its supervisor, so that the agent itself is stopped or killed here.
    agent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import asyncio; from perseus.agent.sidecar.settings import AgentSettings; "
            "from perseus.agent.sidecar.shell import run; asyncio.run(run(AgentSettings()))",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **{f"PERSEUS_AGENT_{name}": value for name, value in settings.items()}},
    )
    os.sched_setaffinity(agent.pid, _OTHER_CORES)
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while not (folder / "agent.sock").exists():
        if agent.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"expected the agent to listen within {_START_TIMEOUT_S} s")
        time.sleep(0.05)
    try:
        yield agent
    finally:
        agent.terminate()
        agent.wait()


if __name__ == "__main__":
    main("probe", run)
