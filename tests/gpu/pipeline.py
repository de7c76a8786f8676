"""A pipeline of several stages on one device under torch's schedules: the hook's cost, graphs beside it."""

import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import mean, median
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from perseus.agent.energy.regression import Span
from perseus.agent.gpu import Gpu
from perseus.agent.link.computation import Kind
from perseus.agent.probe.attachment import Attachment
from perseus.agent.probe.device_marks import DeviceMarks
from perseus.agent.probe.exchange import LocalExchange
from perseus.agent.probe.marks import Connect
from perseus.agent.probe.placement import Placement
from perseus.agent.torch import attach
from tests.gpu.edges import NotedProbe
from tests.gpu.energy import predicted, record
from tests.gpu.report import Finding, judged

SCHEDULES = {
    "1F1B": (1, 16),
    "Interleaved1F1B": (4, 64),
    "LoopedBFS": (4, 64),
    "InterleavedZeroBubble": (4, 88),
}
"""Stages in this process, and computations of an iteration, by schedule."""
MICROBATCHES, WIDTH, ITERATIONS = 8, 512, 30
TURNS, COST_LIMIT_S = 7, 100e-6
_RUN_S = 0.25
"""How long the forwards of an iteration take whose energy is predicted: longer than most counters' period."""
_WAIT_S = 0.05
_MARKS_S = 0.2
"""In which the last iteration's events have completed, and their marks come."""


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process."""
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1
        )
        try:
            yield
        finally:
            distributed.destroy_process_group()


class OwnNeighbour(PipelineStage):  # type: ignore[misc]
    """A stage whose neighbours are in the same process, which torch before 2.13 would connect by sockets."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return []


def layers(width: int) -> nn.Module:
    """A stage of the pipeline."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())


def make_step(
    name: str, device: torch.device, make_stage: Callable[[int], nn.Module] = layers, width: int = WIDTH
) -> tuple[Any, Callable[[], None]]:
    """A schedule with its stages, and what trains one iteration of it."""
    count, _ = SCHEDULES.get(name, (1, 0))
    chunks = [make_stage(width).to(device) for _ in range(count)]
    stages = [OwnNeighbour(chunk, index, count, device) for index, chunk in enumerate(chunks)]
    of_stages = stages if count > 1 else stages[0]
    schedule = get_schedule_class(name)(of_stages, MICROBATCHES, loss_fn=nn.MSELoss())
    inputs, target = (torch.randn(MICROBATCHES * 4, width, device=device) for _ in range(2))

    def step() -> None:
        schedule.step(inputs, target=target)
        for chunk in chunks:
            chunk.zero_grad()

    return schedule, step


def hook_findings(
    device: torch.device,
    connect: Connect,
    synchronize: Callable[[], None],
    *,
    turns: int = TURNS,
    iterations: int = ITERATIONS,
) -> list[Finding]:
    """The host's time that the hook takes of a computation, by schedule, the device running behind.

    Without and with the hook by turns: on an H200's host an iteration without it took from 3.7 to 7.2 ms.
    """
    findings = []
    for name, (stages, count) in SCHEDULES.items():
        schedule, step = make_step(name, device)
        bare_s, costs_s = [_host_time_s(step, synchronize, iterations)], []
        for turn in range(turns):
            attachment = attach(schedule, job_id=f"test-{name}-{turn}", connect=connect)
            step()  # the first one registers
            attached_s = _host_time_s(step, synchronize, iterations)
            attachment.detach()
            bare_s.append(_host_time_s(step, synchronize, iterations))
            costs_s.append((attached_s - mean(bare_s[-2:])) / count)
        cost_s, least_s, most_s = median(costs_s), min(costs_s), max(costs_s)
        findings.append(
            judged(
                f"cost of the hook, {name}, {stages} stages",
                f"{1e6 * cost_s:.1f} µs a computation, {1e6 * least_s:.0f} to {1e6 * most_s:.0f} in {turns} "
                f"turns ({count} an iteration of {1e3 * median(bare_s):.1f} ms on the host)",
                f"at most {1e6 * COST_LIMIT_S:.0f} µs",
                cost_s <= COST_LIMIT_S,
            )
        )
    return findings


def training_findings(
    gpu: Gpu,
    device: torch.device,
    probe: NotedProbe,
    synchronize: Callable[[], None],
    *,
    width: int = 16_384,
    durations_s: tuple[float, float] = (40.0, 20.0),
) -> list[Finding]:
    """The energy of a real training, predicted by the powers of its computations in an earlier part of it.

    Nothing sets a clock: it is observed. Both parts wait between iterations, the second one half as often.
    Under GPipe all computations of a kind follow each other; the stage has as many layers as that takes.
    """
    with alone():
        schedule, step = make_step("GPipe", device, _long(width, device, synchronize), width)
        attachment = attach(schedule, job_id="test-training", connect=lambda **_: probe)
        step()  # the first one registers
        recordings = [
            record(gpu, partial(_train, step, synchronize, probe, duration_s, every))
            for duration_s, every in zip(durations_s, (1, 2), strict=True)
        ]
        attachment.detach()
    return predicted("energy of a training", [Kind.FORWARD.name, Kind.BACKWARD.name], *recordings)


def _long(width: int, device: torch.device, synchronize: Callable[[], None]) -> Callable[[int], nn.Module]:
    """Repeat a stage so often that the forwards of an iteration take `_RUN_S`."""
    stage, tensor = layers(width).to(device), torch.randn(4, width, device=device)
    times_s = []
    for _ in range(5):
        synchronize()
        begun_s = time.monotonic()
        stage(tensor)
        synchronize()
        times_s.append(time.monotonic() - begun_s)
    return lambda _width: nn.Sequential(*[stage] * math.ceil(_RUN_S / MICROBATCHES / min(times_s)))


def _train(
    step: Callable[[], None],
    synchronize: Callable[[], None],
    probe: NotedProbe,
    duration_s: float,
    every: int,
) -> list[Span[str]]:
    begun, end_s = len(probe.begins_ns), time.monotonic() + duration_s
    for number in itertools.count():
        step()
        synchronize()
        if time.monotonic() > end_s:
            break
        if number % every == 0:
            time.sleep(_WAIT_S)
    time.sleep(_MARKS_S)
    return [
        Span(kind.name, begin_ns / 1e9, end_ns / 1e9)
        for columns in zip(probe.kinds[begun:], probe.begins_ns[begun:], probe.ends_ns[begun:], strict=True)
        for kind, begin_ns, end_ns in zip(*columns, strict=True)
    ]


def _host_time_s(step: Callable[[], None], synchronize: Callable[[], None], iterations: int) -> float:
    times_s = []
    for _ in range(iterations):
        synchronize()
        begun_s = time.perf_counter()
        step()
        times_s.append(time.perf_counter() - begun_s)
    synchronize()
    return median(times_s[iterations // 3 :])


def capture_findings(device: torch.device) -> list[Finding]:
    """Graphs captured while the helper asks about events; one around a whole iteration. CUDA only."""
    from torch import cuda

    placement = Placement(0, 1, 0, 1)
    probe = NotedProbe()
    marks = attach_marks(probe, device)
    attachment = Attachment(placement, marks, LocalExchange())
    matrix = torch.randn(4096, 4096, device=device)
    static = torch.randn(256, 256, device=device)
    side = cuda.Stream(device)
    with cuda.stream(side):
        static @ static  # makes the stream's workspace, which can't be made in a capture
    cuda.synchronize(device)
    right_count, problem, count = 0, "", 10
    for _ in range(count):
        attachment.begin_iteration()
        for microbatch in range(8):
            attachment.begin(Kind.FORWARD, microbatch)
            matrix @ matrix
            attachment.end(Kind.FORWARD, microbatch)
        # In the default, global mode; meanwhile the helper looks at what has not completed.
        graph = cuda.CUDAGraph()
        try:
            with cuda.stream(side):
                graph.capture_begin()
                product = static @ static
                time.sleep(0.02)
                graph.capture_end()
            graph.replay()
            cuda.synchronize(device)
            right_count += torch.allclose(product, static @ static, rtol=1e-2, atol=1e-2)
        except RuntimeError as error:
            problem = f": {str(error).splitlines()[0]}"
        attachment.end_iteration()
        cuda.synchronize(device)
    time.sleep(0.05)
    marked = sum(map(len, probe.ends_ns))
    findings = [
        judged(
            "graphs captured beside the marks",
            f"{right_count} of {count} right, {marked} of {8 * count} computations marked{problem}",
            "all",
            right_count == count and marked == 8 * count,
        )
    ]
    graph = cuda.CUDAGraph()
    with cuda.stream(side):
        graph.capture_begin()
        attachment.begin_iteration()
        attachment.begin(Kind.FORWARD, 0)
        static @ static
        attachment.end(Kind.FORWARD, 0)
        attachment.end_iteration()
        graph.capture_end()
    graph.replay()
    cuda.synchronize(device)
    found = "recognised, marking ended" if probe.is_closed else "not recognised"
    findings.append(judged("an iteration captured whole", found, "recognised", probe.is_closed))
    attachment.detach()
    return findings


def attach_marks(probe: NotedProbe, device: torch.device) -> DeviceMarks:
    """Device marks before a probe that only notes."""
    from perseus.agent.probe.torch_marks import connect_marks

    marks = connect_marks(lambda **_: probe, "test", Placement(0, 1, 0, 1), device)
    assert isinstance(marks, DeviceMarks)
    return marks
