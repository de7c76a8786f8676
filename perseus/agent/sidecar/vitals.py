"""What an agent counts of its GPUs, however many ranks come and go on them. Pure; read at a scrape."""

from collections import Counter

from perseus.agent.rank.messages import GpuErrorReason
from perseus.metrics.distribution import Distribution

_SET_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0)

NOT_SERVED = ""
"""Stands for GPUs that were never opened: whoever asks for one may name anything."""


class GpuVitals:
    """Of one GPU, since the agent started.

    Attributes:
        sets: what sets took, from their begin until the clock was in force.
        dropped_mark_count: marks that trainers dropped.
        error_counts: errors that were met.
    """

    def __init__(self) -> None:
        self.sets = Distribution(_SET_BOUNDS_S)
        self.dropped_mark_count = 0
        self.error_counts: Counter[GpuErrorReason] = Counter()


class Vitals:
    """Of all GPUs that were opened, by UUID; and of trainers.

    Attributes:
        gpus: the GPUs.
        refusal_counts: trainers that were turned away, or had to go, by the stable reason.
    """

    def __init__(self) -> None:
        self.gpus: dict[str, GpuVitals] = {}
        self.refusal_counts: Counter[str] = Counter()

    def opened(self, gpu_uuid: str) -> GpuVitals:
        """Return what is counted of a GPU that was opened."""
        return self.gpus.setdefault(gpu_uuid, GpuVitals())

    def note_error(self, gpu_uuid: str, reason: GpuErrorReason) -> None:
        """Count an error."""
        known = self.gpus.get(gpu_uuid)
        (known if known is not None else self.opened(NOT_SERVED)).error_counts[reason] += 1

    def note_dropped(self, gpu_uuid: str, mark_count: int) -> None:
        """Count marks that a trainer dropped."""
        if (known := self.gpus.get(gpu_uuid)) is not None:
            known.dropped_mark_count += mark_count
