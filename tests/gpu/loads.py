"""Known loads for a real GPU: matrix products at stock, of a size and type at which it keeps its clock."""

import time
from typing import Any

from perseus.agent.gpu import ClockEventReason, Gpu

_UNIT_S = (0.05, 0.08)
_TRIED_S = 0.7
_WARM_UP_S = 8.0


class MatrixProducts:
    """Two kinds of products (implements `Loads`): the heaviest and the lightest that nothing throttles.

    Tried from the heaviest on: power limits keep most GPUs from running large half-precision products
    at their full clock, and windows under a limit are no evidence. ValueError where fewer than two are left.
    """

    def __init__(self, torch: Any, device: Any, gpu: Gpu) -> None:
        self._torch = torch
        self._device = device
        candidates = {
            f"{name} {size}": torch.randn(size, size, device=device, dtype=dtype)
            for name, dtype, size in (
                ("bfloat16", torch.bfloat16, 8192),
                ("float32", torch.float32, 8192),
                ("bfloat16", torch.bfloat16, 2048),
                ("float32", torch.float32, 2048),
                ("bfloat16", torch.bfloat16, 1024),
                ("float32", torch.float32, 1024),
            )
        }
        self._matrices = candidates
        self._counts = {kind: self._count_for(kind, _UNIT_S[0]) for kind in candidates}
        self._run_for(next(iter(candidates)), _WARM_UP_S, gpu)  # power rises with the temperature
        calm = [kind for kind in candidates if not self._run_for(kind, _TRIED_S, gpu)]
        if len(calm) < 2:
            raise ValueError(f"known loads: expected two that nothing throttles, found {len(calm)}")
        self._kinds = calm[0], calm[-1]
        self._counts = {kind: self._count_for(kind, _UNIT_S[i]) for i, kind in enumerate(self._kinds)}

    @property
    def kinds(self) -> tuple[str, str]:
        """The heavier, the lighter."""
        return self._kinds

    def run(self, kind: str) -> None:
        """Execute a unit of products and wait for them."""
        self._launch(kind, self._counts[kind])
        self._torch.cuda.synchronize(self._device)

    def _launch(self, kind: str, count: int) -> None:
        matrix = self._matrices[kind]
        for _ in range(count):
            self._torch.mm(matrix, matrix)

    def _count_for(self, kind: str, unit_s: float) -> int:
        """How many products take so long."""
        synchronize = self._torch.cuda.synchronize
        self._launch(kind, 3)
        synchronize(self._device)
        begun_s = time.monotonic()
        self._launch(kind, 10)
        synchronize(self._device)
        return max(1, round(unit_s / ((time.monotonic() - begun_s) / 10)))

    def _run_for(self, kind: str, duration_s: float, gpu: Gpu) -> int:
        """Run units; the reasons seen meanwhile, after a first settling, for which the clock was lowered."""
        reasons, end_s = 0, time.monotonic() + duration_s
        settled_s = end_s - duration_s / 2
        while time.monotonic() < end_s:
            self._launch(kind, self._counts[kind])
            if time.monotonic() > settled_s:
                reasons |= gpu.clock_event_reasons()
            self._torch.cuda.synchronize(self._device)
        return reasons & ClockEventReason.THROTTLED
