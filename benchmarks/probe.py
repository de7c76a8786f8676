"""The cost of marks: in the trainer for each computation, in the agent for each mark.

A real agent with emulated GPUs runs beside the trainers, in every condition. Trainers have one core, and the
agent has the other, as on any training node. A stopped agent reads nothing, so marks are dropped once the
socket is full; after a kill, the probe finds the connection closed. With a stand-in for the coordinator that
has a clock held, marks are sent one by one; at stock, they are packed.
"""

import asyncio
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import fmean, median, quantiles
from time import perf_counter_ns, thread_time_ns

from benchmarks.harness import Cell, Column, Table, main
from perseus.agent import Kind, NamedSchedule, Probe
from perseus.demo.processes import Process
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1 import computation_pb2
from tests.agent.coordinator_stub import CoordinatorStub, Inbox
from tests.ports import free_port

UUID = "GPU-benchmark"
COMPUTATIONS = 4000
COMPUTATION_TIME_S = 0.0005
"""Time of a computation where only the trainer is timed: a running agent keeps up."""
_MICROBATCHES = 32
_REAL_TIME_S = 0.01
"""Time of a computation where the agent is timed, too: a short one of a real training."""
_MARKED_S = 8.0
_IDLE_S = 3.0
_CORES = os.sched_getaffinity(0)
TRAINER_CORE = min(_CORES)
_OTHER_CORES = _CORES - {TRAINER_CORE} or _CORES


def run() -> list[Table]:
    """Measure all conditions."""
    os.sched_setaffinity(0, {TRAINER_CORE})
    rows: list[tuple[Cell, ...]] = []
    for condition in (
        "agent reads, clock held",
        "agent reads, at stock",
        "agent stopped, socket full",
        "agent killed",
        "no agent",
    ):
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
    cpu_rows = [
        (rank_count, condition, *_cpu_us(rank_count, condition))
        for rank_count in (1, 8)
        for condition in (
            "clock held",
            "at stock",
            "clock held, agent's core busy",
            "at stock, agent's core busy",
        )
    ]
    cpu_columns = (
        Column("ranks"),
        Column("condition"),
        Column("trainer, µs per computation", ".1f"),
        Column("agent, µs per mark", ".1f"),
        Column("agent without marks, % of a core per rank", ".1f"),
    )
    return [
        Table("Both edges of one computation in the trainer, wall time", columns, tuple(rows)),
        Table(
            f"CPU time of marks, computations of {1000 * _REAL_TIME_S:g} ms",
            cpu_columns,
            tuple(cpu_rows),
            "Means. The agent's includes estimates and telemetry; what it needs without marks, to poll "
            "energy counters, is subtracted, and in the last column.",
        ),
    ]


def _measure(condition: str) -> tuple[list[float], int]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perseus-")))
        port = stack.enter_context(_coordinator(holds="held" in condition))
        agent = stack.enter_context(running_agent(folder, port=port))
        path = folder / ("nobody.sock" if condition == "no agent" else "agent.sock")
        probe = _joined(path, 0)
        if condition == "agent stopped, socket full":
            agent.signal(signal.SIGSTOP)
            while probe.dropped_mark_count == 0:
                probe.begin_iteration()
        elif condition == "agent killed":
            agent.kill()
            agent.wait()
        else:
            _iterate(probe, 1.5, 0.002)  # until a clock is held, and the probe has heard what it may pack
        dropped_before = probe.dropped_mark_count
        costs_us: list[float] = []
        while len(costs_us) < COMPUTATIONS:
            with probe.iteration():
                for microbatch in range(_MICROBATCHES):
                    begun_ns = perf_counter_ns()
                    probe.begin_computation(Kind.FORWARD, microbatch)
                    probe.end_computation(Kind.FORWARD, microbatch)
                    costs_us.append((perf_counter_ns() - begun_ns) / 1000)
                    compute(COMPUTATION_TIME_S)
        dropped_count = probe.dropped_mark_count - dropped_before
        agent.signal(signal.SIGCONT)  # does nothing to one that is dead
        probe.close()
    return costs_us, dropped_count


def _cpu_us(rank_count: int, condition: str) -> tuple[float, float, float]:
    """Return the trainers' CPU time per computation, the agent's per mark, and the agent's without marks."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perseus-")))
        port = stack.enter_context(_coordinator(holds="held" in condition))
        agent = stack.enter_context(running_agent(folder, rank_count, port=port))
        if "busy" in condition:
            stack.enter_context(_busy())
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        begins, marked = context.Barrier(rank_count + 1), context.Barrier(rank_count + 1)
        trainers = [
            context.Process(target=_train, args=(folder / "agent.sock", rank, begins, marked, results))
            for rank in range(rank_count)
        ]
        for trainer in trainers:
            trainer.start()
        begins.wait()
        begin_us = _agent_cpu_us(agent.pid)
        marked.wait()
        during_us = _agent_cpu_us(agent.pid) - begin_us
        begin_us = _agent_cpu_us(agent.pid)
        time.sleep(_IDLE_S)
        idle_us_per_s = (_agent_cpu_us(agent.pid) - begin_us) / _IDLE_S
        found = [results.get() for _ in trainers]
        marked.wait()
        for trainer in trainers:
            trainer.join()
    costs_us, mark_count, duration_s = (list(column) for column in zip(*found, strict=True))
    per_mark_us = (during_us - idle_us_per_s * fmean(duration_s)) / sum(mark_count)
    return fmean(costs_us), per_mark_us, idle_us_per_s / 1e4 / rank_count


def _train(
    path: Path,
    rank: int,
    begins: threading.Barrier,
    marked: threading.Barrier,
    results: "multiprocessing.Queue[tuple[float, int, float]]",
) -> None:
    os.sched_setaffinity(0, {TRAINER_CORE})
    probe = _joined(path, rank)
    _iterate(probe, 3.0, _REAL_TIME_S)  # until a clock is held, and the probe has heard what it may pack
    begins.wait()
    begun_s = time.monotonic()
    costs_us = _iterate(probe, _MARKED_S, _REAL_TIME_S)
    results.put(
        (
            fmean(costs_us),
            len(costs_us) // _MICROBATCHES * (2 * _MICROBATCHES + 2),
            time.monotonic() - begun_s,
        )
    )
    marked.wait()
    marked.wait()  # the agent's idle time is measured
    probe.finish()
    probe.close()


def _iterate(probe: Probe, duration_s: float, computation_time_s: float) -> list[float]:
    """Return the CPU time, µs, of both edges of each computation, with its share of the iteration's."""
    until_s, costs_us = time.monotonic() + duration_s, []
    while time.monotonic() < until_s:
        begun_ns = thread_time_ns()
        probe.begin_iteration()
        iteration_ns = thread_time_ns() - begun_ns
        edges_ns = []
        for microbatch in range(_MICROBATCHES):
            begun_ns = thread_time_ns()
            probe.begin_computation(Kind.FORWARD, microbatch)
            begin_ns = thread_time_ns() - begun_ns
            time.sleep(computation_time_s)
            begun_ns = thread_time_ns()
            probe.end_computation(Kind.FORWARD, microbatch)
            edges_ns.append(begin_ns + thread_time_ns() - begun_ns)
        begun_ns = thread_time_ns()
        probe.end_iteration()
        iteration_ns += thread_time_ns() - begun_ns
        costs_us += [(each + iteration_ns / _MICROBATCHES) / 1000 for each in edges_ns]
    return costs_us


def _joined(path: Path, rank: int) -> Probe:
    """Return the probe of a rank that is a job of its own."""
    probe = Probe.connect(path, job_id=f"job-{rank}", pipeline=0, stage=0, gpu_uuid=f"{UUID}-{rank}")
    probe.register(pipeline_count=1, stage_count=1, schedule=NamedSchedule("gpipe", _MICROBATCHES))
    return probe


@contextmanager
def _busy() -> Iterator[None]:
    """Keep the agent's core busy with another process."""
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(spinning.pid, _OTHER_CORES)
    try:
        yield
    finally:
        spinning.kill()
        spinning.wait()


def _agent_cpu_us(pid: int) -> float:
    """Return the CPU time of all threads of a process."""
    time_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # the thread has just ended
            time_ns += int((task / "schedstat").read_text().split()[0])
    return time_ns / 1000


@contextmanager
def _coordinator(*, holds: bool) -> Iterator[int]:
    """Serve agents in another process; yield the port. `holds`: have a clock held after some telemetry."""
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(
        target=_coordinate, args=(port, holds), daemon=True
    )
    process.start()
    assert process.pid is not None
    os.sched_setaffinity(process.pid, _OTHER_CORES)
    try:
        yield port
    finally:
        process.terminate()
        process.join()


def _coordinate(port: int, holds: bool) -> None:
    asyncio.run(_answer(port, holds))


async def _answer(port: int, holds: bool) -> None:
    order = [
        computation_pb2.Computation(kind=computation_pb2.COMPUTATION_KIND_FORWARD, microbatch=microbatch)
        for microbatch in range(_MICROBATCHES)
    ]
    inbox = Inbox(lease_s=60.0)
    stub = CoordinatorStub(inbox, order)  # type: ignore[abstract] # of the calls that agents make
    await stub.start(port)
    held: set[str] = set()
    while True:
        await asyncio.sleep(0.1)
        for request in inbox.all("telemetry") if holds else []:
            job_id = request.telemetry.job_id
            if job_id not in held:
                held.add(job_id)
                offer = wire.PlanOffer(
                    job_id=job_id,
                    rank=request.telemetry.rank,
                    epoch="e",
                    version=1,
                    start_iteration=request.telemetry.iterations.iteration[-1] + 20,
                    lease_s=60.0,
                    hold=wire.HoldClock(clock_mhz=A100_SXM.clocks_mhz[3]),
                )
                stub.send(wire.ConnectResponse(plan_offer=offer))
        inbox.heard.clear()


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
def running_agent(folder: Path, gpu_count: int = 1, *, port: int = 1) -> Iterator[Process]:
    """Run an agent with emulated GPUs on the other cores; its socket is `agent.sock` in the folder.

    `port`: the coordinator's; by default there is none.
    """
    (folder / "gpus").mkdir()
    for index in range(gpu_count):
        EmulatedGpu.create(folder / "gpus" / f"gpu{index}", A100_SXM, f"{UUID}-{index}").close()
    settings = {
        "COORDINATOR": f"127.0.0.1:{port}",
        "SOCKET": str(folder / "agent.sock"),
        "GPU_BACKEND": "emulated",
        "EMULATED_GPUS": str(folder / "gpus"),
        "RESTORE_FOLDER": str(folder / "records"),
    }
    # Without its supervisor, so that the agent itself is stopped or killed here.
    code = (
        "import asyncio; from perseus.agent.sidecar.settings import AgentSettings; "
        "from perseus.agent.sidecar.shell import run; asyncio.run(run(AgentSettings()))"
    )
    environment = {f"PERSEUS_AGENT_{name}": value for name, value in settings.items()}
    with Process(folder / "agent.log", "-c", code, environment=environment) as agent:
        agent.launch()
        os.sched_setaffinity(agent.pid, _OTHER_CORES)
        agent.until((folder / "agent.sock").exists, "the agent's socket")
        yield agent


if __name__ == "__main__":
    main("probe", run)
