"""Edges by events on the device, held against timing that synchronises it."""

import time
from collections.abc import Callable
from statistics import mean
from typing import Any

from perseus.agent.link.computation import Kind
from perseus.agent.probe.client import Probe
from perseus.agent.probe.device_marks import DeviceMarks, EventSource
from tests.agent.marks_stub import MarksStub
from tests.gpu.report import Finding, judged

LIMIT_S = 50e-6
ITERATIONS, COMPUTATIONS = 40, 100
_SETTLING = 20


class NotedProbe(MarksStub, Probe):
    """Notes the times of computations, the host's where marks have none, and sends nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[list[Kind]] = []
        self.begins_ns: list[list[int]] = []
        self.ends_ns: list[list[int]] = []
        self.is_closed = False

    @property
    def is_connected(self) -> bool:
        return not self.is_closed

    def note(self, name: str, *arguments: Any) -> None:
        if name == "begin_iteration":
            for column in (self.kinds, self.begins_ns, self.ends_ns):
                column.append([])
        elif name in ("begin", "end"):
            kind, _microbatch, _chunk, *time_ns = arguments
            times_ns = self.begins_ns if name == "begin" else self.ends_ns
            times_ns[-1] += time_ns or [time.monotonic_ns()]
            self.kinds[-1] += [kind] * (name == "begin")
        self.is_closed |= name == "close"


def edge_findings(
    source: EventSource,
    launch: Callable[[int], None],
    synchronize: Callable[[], None],
    *,
    has_helper: bool = True,
    monotonic_ns: Callable[[], int] = time.monotonic_ns,
) -> list[Finding]:
    """Time computations both ways at once; `launch` takes how many were launched before.

    The first iterations are left out: their anchors had few looks, and what those were late wears off slowly.
    Without a helper the events are looked at whenever the device is synchronised.
    """
    probe = NotedProbe()
    marks = DeviceMarks(probe, source, has_helper=has_helper, monotonic_ns=monotonic_ns)
    begun_ns: list[list[int]] = []
    ended_ns: list[list[int]] = []

    def synchronized_ns() -> int:
        synchronize()
        if not has_helper:
            marks.poll()
        return monotonic_ns()

    for _ in range(ITERATIONS):
        begun_ns.append([])
        ended_ns.append([])
        marks.begin_iteration()
        for each in range(COMPUTATIONS):
            begun_ns[-1].append(synchronized_ns())
            marks.begin_computation(Kind.FORWARD, each, 0)
            launch(each)
            marks.end_computation(Kind.FORWARD, each, 0)
            ended_ns[-1].append(synchronized_ns())
        marks.end_iteration()
    marks.finish()
    marks.close()
    if [len(times) for times in probe.ends_ns] != ITERATIONS * [COMPUTATIONS]:
        found = f"{sum(map(len, probe.ends_ns))} of {ITERATIONS * COMPUTATIONS} marks"
        return [judged("edges by events", found, "all", False)]
    durations_s, edges_s = [], []
    for iteration in range(_SETTLING, ITERATIONS):
        columns = (probe.begins_ns, probe.ends_ns, begun_ns, ended_ns)
        for begin, end, begun, ended in zip(*(times[iteration] for times in columns), strict=True):
            durations_s.append(((end - begin) - (ended - begun)) / 1e9)
            edges_s += [(begin - begun) / 1e9, (end - ended) / 1e9]
    return [_difference("durations by events", durations_s), _difference("edges by events", edges_s)]


def _difference(name: str, differences_s: list[float]) -> Finding:
    mean_us, min_us, max_us = (1e6 * of(differences_s) for of in (mean, min, max))
    found = f"{mean_us:+.1f} µs on average ({min_us:+.0f} to {max_us:+.0f})"
    expected = f"within {1e6 * LIMIT_S:.0f} µs of synchronised timing on average"
    return judged(name, found, expected, abs(mean_us) < 1e6 * LIMIT_S)
