"""The stock baseline: what an iteration takes without Perseus. Part of the state machine."""

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
        """What was measured, None until it is."""
        return self._record.baseline

    @property
    def time_s(self) -> float:
        """How long an iteration takes, 0 until that is measured."""
        return self._record.baseline.time_s if self._record.baseline is not None else 0.0

    def restart(self) -> None:
        """What is under way counts for nothing; what was measured stays."""
        self._seen.clear()

    def forget(self) -> None:
        """It is to be measured again."""
        self._record.baseline = None
        self.restart()

    def take(self, iterations: Iterable[JobIteration], wanted: tuple[int, ...]) -> None:
        """Take regular ones under the versions of stock; not the first, which may have begun otherwise."""
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
                # The usual one: an evaluation in between must not pass for it.
                median(each.gap_time_s or 0.0 for each in measured),
            )
