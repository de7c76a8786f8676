"""Known loads for a real GPU: matrix products at stock, of a size and type at which it keeps its clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from perseus.agent.gpu import ClockEventReason, Gpu

_UNIT_S = (0.05, 0.08)
_GRAPH_S = 0.002
_TRIED_S = 2.0  # on an H200, a reason lasts half a second longer than its cause
_WARM_UP_S = 8.0


@dataclass(frozen=True, slots=True)
class _Products:
    """Products of one kind, captured in a graph: how fast the host launches doesn't change their power.

    `matrices` are what the graph reads and writes; it doesn't keep them.
    """

    graph: Any
    matrices: tuple[Any, Any]
    replay_s: float


class MatrixProducts:
    """Two kinds of products (implements `Loads`): the heaviest and the lightest that nothing throttles.

    Power limits keep most GPUs from running large half-precision products at their full clock, and windows
    under a limit are no evidence. ValueError where fewer than two are left.
    """

    def __init__(self, torch: Any, device: Any, gpu: Gpu) -> None:
        self._torch = torch
        self._device = device
        self._products = {
            f"{name} {size}": self._capture(torch.randn(size, size, device=device, dtype=dtype))
            for size in (8192, 2048, 512)
            for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32))
        }
        self._run_for(next(iter(self._products)), _WARM_UP_S, gpu)  # power rises with the temperature
        power_w = {kind: self._run_for(kind, _TRIED_S, gpu) for kind in self._products}
        calm = sorted((power, kind) for kind, power in power_w.items() if power is not None)
        if len(calm) < 2:
            raise ValueError(f"known loads: expected two that nothing throttles, found {len(calm)}")
        self._kinds = calm[-1][1], calm[0][1]
        self._unit_s = dict(zip(self._kinds, _UNIT_S, strict=True))

    @property
    def kinds(self) -> tuple[str, str]:
        """The heavier, the lighter."""
        return self._kinds

    def run(self, kind: str) -> None:
        """Execute a unit of products and wait for them."""
        self._execute(kind, self._unit_s[kind])

    def _capture(self, matrix: Any) -> _Products:
        cuda, product = self._torch.cuda, self._torch.empty_like(matrix)
        multiply = partial(self._torch.mm, matrix, matrix, out=product)

        def time_s(run: Callable[[], object], count: int) -> float:
            cuda.synchronize(self._device)
            begun_s = time.monotonic()
            for _ in range(count):
                run()
            cuda.synchronize(self._device)
            return time.monotonic() - begun_s

        time_s(multiply, 3)
        count = max(1, round(10 * _GRAPH_S / time_s(multiply, 10)))
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            for _ in range(count):
                multiply()
        time_s(graph.replay, 1)
        return _Products(graph, (matrix, product), time_s(graph.replay, 10) / 10)

    def _execute(self, kind: str, duration_s: float) -> None:
        products = self._products[kind]
        for _ in range(max(1, round(duration_s / products.replay_s))):
            products.graph.replay()
        self._torch.cuda.synchronize(self._device)

    def _run_for(self, kind: str, duration_s: float, gpu: Gpu) -> float | None:
        """Run units and return the power at their end; None if the clock was lowered in the second half."""
        reasons, end_s = 0, time.monotonic() + duration_s
        settled_s = end_s - duration_s / 2
        while time.monotonic() < end_s:
            self._execute(kind, _UNIT_S[0])
            if time.monotonic() > settled_s:
                reasons |= gpu.clock_event_reasons()
        return None if reasons & ClockEventReason.THROTTLED else gpu.power_w()
