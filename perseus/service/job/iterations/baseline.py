"""The stock baseline: time and energy of an iteration without Perseus. Part of the state machine."""

import math
from collections.abc import Iterable
from statistics import median

from perseus.service.domain.measured import JobIteration
from perseus.service.domain.model import StockIteration
from perseus.service.domain.records import JobRecord


class Baseline:
    """Measures a few iterations at stock."""

    def __init__(self, record: JobRecord, iteration_count: int) -> None:
        self._record = record
        self._iteration_count = iteration_count
        self._seen: list[StockIteration] = []

    @property
    def iteration(self) -> StockIteration | None:
        """The measured baseline; None until it is measured."""
        return self._record.baseline

    @property
    def time_s(self) -> float:
        """The baseline's iteration time; 0 until it is measured."""
        return self._record.baseline.time_s if self._record.baseline is not None else 0.0

    def restart(self) -> None:
        """Discard an unfinished measurement; a finished one is kept."""
        self._seen.clear()

    def forget(self) -> None:
        """Discard the baseline so that it is measured again."""
        self._record.baseline = None
        self.restart()

    def take(self, iterations: Iterable[JobIteration], wanted: tuple[int, ...]) -> None:
        """Take regular iterations under stock's versions; the first is left out.

        It may have begun under other clocks.
        """
        self._seen.extend(
            StockIteration(
                iteration.iteration_time_s, math.fsum(iteration.pipeline_energy_j), iteration.gap_time_s
            )
            for iteration in iterations
            if iteration.is_regular and iteration.versions == wanted
        )
        if len(self._seen) > self._iteration_count:
            measured = self._seen[1 : self._iteration_count + 1]
            self._record.baseline = StockIteration(
                math.fsum(each.time_s for each in measured) / len(measured),
                math.fsum(each.energy_j for each in measured) / len(measured),
                # The median, so that an evaluation in between does not count as the usual gap.
                median(each.gap_time_s or 0.0 for each in measured),
            )
