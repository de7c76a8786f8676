"""The cost of a framework's hook for each of the trainer's computations, with and without an agent.

A stage object of `torch.distributed.pipelining` has an empty forward. Its call is timed without the hook,
with it, and after `detach`. A small model's forward, backward and step are timed with `attach_model`, and
with torch's own hooks alone that it needs. The hooks into Megatron-Core and DeepSpeed are timed on stand-ins
for the functions that they hook. `make test-frameworks` makes the environment with torch:

    .venv-frameworks/bin/python -m benchmarks.adapters
"""

import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any, ClassVar

from benchmarks.harness import Cell, Column, Table, main
from benchmarks.probe import COMPUTATION_TIME_S, COMPUTATIONS, TRAINER_CORE, UUID, compute, running_agent
from perseus.agent.deepspeed import mark_engine
from perseus.agent.link.address import SOCKET_VARIABLE
from perseus.agent.megatron import MarkedSchedules, MarkedTimers
from perseus.agent.probe.attachment import Attachment
from perseus.agent.probe.client import Probe
from perseus.agent.probe.device_marks import DeviceMarks
from perseus.agent.probe.exchange import LocalExchange
from perseus.agent.probe.placement import Placement

_MICROBATCHES = 100
AT_DEVICE_TIME = "attached, agent reads, at the device's time"


def run() -> list[Table]:
    """Measure all conditions."""
    os.sched_setaffinity(0, {TRAINER_CORE})
    rows = []
    for condition in (
        "not attached",
        "attached, agent reads",
        AT_DEVICE_TIME,
        "attached, no agent",
        "detached again",
    ):
        costs_us = _measure(condition)
        rows.append((condition, median(costs_us), quantiles(costs_us, n=100)[98]))
    columns = (Column("condition"), Column("median, µs", ".2f"), Column("99 %, µs", ".2f"))
    note = (
        "Begin and end together. Every row includes the empty forward itself and the clock that times it. "
        "At the device's time a helper thread sends the marks; its events are stand-ins without CUDA."
    )
    return [
        Table("One empty computation of a stage of torch's pipelining", columns, tuple(rows), note),
        _model(),
        _others(),
    ]


def _model() -> Table:
    rows: list[tuple[Cell, ...]] = []
    for is_cold in (False, True):
        medians_us = {kind: _measure_model(kind, is_cold) for kind in _MODEL_HOOKS}
        rows.extend(
            ("cold" if is_cold else "warm", part, *(medians_us[kind][part] for kind in _MODEL_HOOKS))
            for part in ("forward", "backward", "step")
        )
    columns = (Column("caches"), Column("part"), *(Column(f"{kind}, µs", ".1f") for kind in _MODEL_HOOKS))
    note = (
        f"Medians of a layer of 8 by 8 with {_MODEL_MICROBATCHES} microbatches a step. Cold: {_SWEPT_MIB} "
        "MiB are written before each part. Torch's own: a tensor hook on the output, which queues a callback "
        "for the backward's end."
    )
    return Table("`attach_model`: each part of a step", columns, tuple(rows), note)


_MODEL_HOOKS = ("no hook", "torch's own hooks", "attached")
_MODEL_MICROBATCHES = 8
_SWEPT_MIB = 64


def _measure_model(hooks: str, is_cold: bool) -> dict[str, float]:
    """Return the median of each part of a step, in µs."""
    import torch
    from torch import nn

    from perseus.agent.torch import attach_model

    model, inputs = nn.Linear(8, 8), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    swept = torch.zeros(_SWEPT_MIB << 20, dtype=torch.uint8)
    parts_us: dict[str, list[float]] = {"forward": [], "backward": [], "step": []}

    def timed(part: str, run: Callable[[], Any]) -> Any:
        if is_cold:
            swept.add_(1)
        begun_ns = time.perf_counter_ns()
        result = run()
        parts_us[part].append((time.perf_counter_ns() - begun_ns) / 1000)
        return result

    def forward() -> Any:
        output = model(inputs)
        if hooks == "torch's own hooks":
            queue = torch.autograd.Variable._execution_engine.queue_callback
            output.register_hook(lambda _: queue(lambda: None))
        return output

    with tempfile.TemporaryDirectory(prefix="perseus-") as folder, running_agent(Path(folder)):
        os.environ[SOCKET_VARIABLE] = str(Path(folder, "agent.sock"))
        torch.set_num_threads(1)
        attachment = None
        if hooks == "attached":
            attachment = attach_model(model, optimizer, job_id="job", connect=connect)
        for _ in range(COMPUTATIONS // (_MODEL_MICROBATCHES * (20 if is_cold else 1))):
            for _ in range(_MODEL_MICROBATCHES):
                loss = timed("forward", forward).square().mean()
                timed("backward", loss.backward)
            timed("step", optimizer.step)
            optimizer.zero_grad()
        if attachment is not None:
            attachment.detach()
    return {part: median(times_us[len(times_us) // 10 :]) for part, times_us in parts_us.items()}


def _others() -> Table:
    conditions = ("not attached", "attached, agent reads", "attached, no agent")
    rows: list[tuple[Cell, ...]] = [
        (name, *(median(_measure_stand_in(make, condition)) for condition in conditions))
        for name, make in _STAND_INS.items()
    ]
    columns = (Column("hook"), *(Column(f"{condition}, µs", ".2f") for condition in conditions))
    return Table("The same through the other hooks, on stand-ins, medians", columns, tuple(rows))


def _measure(condition: str) -> list[float]:
    from torch import distributed

    from perseus.agent.torch import attach

    with tempfile.TemporaryDirectory(prefix="perseus-") as folder, running_agent(Path(folder)):
        socket = "nobody.sock" if condition == "attached, no agent" else "agent.sock"
        os.environ[SOCKET_VARIABLE] = str(Path(folder, socket))
        distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        schedule, stage = _schedule()
        if condition != "not attached":
            chosen = _connect_at_device_time if condition == AT_DEVICE_TIME else connect
            attachment = attach(schedule, job_id="job", connect=chosen)
            schedule.step(return_outputs=False)  # the first iteration registers
        if condition == "detached again":
            attachment.detach()
        # Only the calls are timed, so the schedule of the iterations does little else.
        costs_us: list[float] = []
        schedule._step_microbatches = lambda *_, **__: _time_calls(stage.forward_one_chunk, costs_us)
        while len(costs_us) < COMPUTATIONS:
            schedule.step(return_outputs=False)
        if condition.startswith("attached"):
            attachment.detach()
        distributed.destroy_process_group()
    return costs_us


def _schedule() -> tuple[Any, Any]:
    """A pipeline of one stage, and the stage, with empty forward and backward."""
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage = PipelineStage(nn.Identity(), 0, 1, torch.device("cpu"))
    stage.forward_one_chunk = lambda fwd_chunk_id: None
    schedule = ScheduleGPipe(stage, _MICROBATCHES, loss_fn=nn.MSELoss())
    schedule._step_microbatches = lambda *_, **__: stage.forward_one_chunk(0)
    return schedule, stage


def connect(**arguments: Any) -> Probe:
    """Return a probe of the benchmark's GPU."""
    return Probe.connect(**{**arguments, "gpu_uuid": f"{UUID}-0"})


def _connect_at_device_time(**arguments: Any) -> DeviceMarks:
    return DeviceMarks(connect(**arguments), _Events())


class _Events:
    """Events that complete when they are recorded (implements `EventSource`)."""

    def is_capturing(self) -> bool:
        return False

    def make_event(self) -> "_Event":
        return _Event()

    def record(self, event: "_Event", /) -> None:
        event.at_s = time.monotonic()

    def enter_helper(self) -> None:
        """Nothing."""


class _Event:
    at_s = 0.0

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: "_Event", /) -> float:
        return 1000 * (end_event.at_s - self.at_s)


def _time_calls(forward: Callable[[int], object], costs_us: list[float]) -> None:
    for microbatch in range(_MICROBATCHES):
        begun_ns = time.perf_counter_ns()
        forward(microbatch)
        costs_us.append((time.perf_counter_ns() - begun_ns) / 1000)
        compute(COMPUTATION_TIME_S)


# Something to hook: a function that adds the marks, one that runs a body as an iteration, and a forward.
_StandIn = tuple[Callable[[Attachment], None], Callable[[Callable[[], None]], None], Callable[[int], object]]


def _measure_stand_in(make: Callable[[], _StandIn], condition: str) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="perseus-") as folder, running_agent(Path(folder)):
        socket = "nobody.sock" if condition == "attached, no agent" else "agent.sock"
        os.environ[SOCKET_VARIABLE] = str(Path(folder, socket))
        mark, iterate, forward = make()
        attachment = None
        if condition != "not attached":
            marks = connect(job_id="job", pipeline=0, stage=0)
            attachment = Attachment(Placement(0, 1, 0, 1), marks, LocalExchange())
            mark(attachment)
        costs_us: list[float] = []
        iterate(lambda: _time_calls(forward, []))  # the first iteration registers
        while len(costs_us) < COMPUTATIONS:
            iterate(lambda: _time_calls(forward, costs_us))
        if attachment is not None:
            attachment.detach()
    return costs_us


def _megatron_schedules() -> _StandIn:
    bodies: list[Callable[[], None]] = []
    run = lambda **_: bodies.pop()()  # noqa: E731
    schedules = SimpleNamespace(
        forward_step=lambda func, data, model, count, tensor, store, config, current_microbatch, vp_stage: (
            None,
            0,
        ),
        backward_step=lambda input_tensor, output_tensor: None,
        forward_backward_no_pipelining=run,
        forward_backward_pipelining_with_interleaving=run,
        forward_backward_pipelining_without_interleaving=run,
    )

    def iterate(body: Callable[[], None]) -> None:
        bodies.append(body)
        schedules.forward_backward_pipelining_without_interleaving(forward_only=False)

    def forward(microbatch: int) -> object:
        return schedules.forward_step(
            None, None, None, 8, None, None, None, current_microbatch=microbatch, vp_stage=0
        )

    return MarkedSchedules(schedules, lambda: 0).mark, iterate, forward


def _megatron_timers() -> _StandIn:
    config = SimpleNamespace(timers=None)

    def timed(name: str, body: Callable[[], object]) -> None:
        if config.timers is not None:
            config.timers(name, log_level=2).start()
        body()
        if config.timers is not None:
            config.timers(name).stop()

    def iterate(body: Callable[[], None]) -> None:
        def body_and_backward() -> None:
            body()
            timed("backward-compute", lambda: None)

        timed("forward-backward", body_and_backward)

    def mark(attachment: Attachment) -> None:
        attachment.replace(config, "timers", MarkedTimers(attachment, None, lambda: True))

    return mark, iterate, lambda _microbatch: timed("forward-compute", lambda: None)


def _deepspeed() -> _StandIn:
    instruction = type("ForwardPass", (), {})

    class Engine:
        _INSTRUCTION_MAP: ClassVar = {instruction: lambda engine, buffer_id: None}
        pipe_buffers: ClassVar = {"inputs": [None]}

        def train_batch(self, body: Callable[[], None]) -> None:
            body()

    engine = Engine()

    def forward(_microbatch: int) -> object:
        return engine._INSTRUCTION_MAP[instruction](engine, buffer_id=0)

    return lambda attachment: mark_engine(attachment, engine), lambda body: engine.train_batch(body), forward


_STAND_INS = {
    "Megatron-Core, schedules": _megatron_schedules,
    "Megatron-Core, timers": _megatron_timers,
    "DeepSpeed": _deepspeed,
}


if __name__ == "__main__":
    if importlib.util.find_spec("torch") is None:
        print("adapters: skipped, torch is not installed in this environment", file=sys.stderr)
    else:
        main("adapters", run)
