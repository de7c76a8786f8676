"""The stock baseline: what an iteration takes without Perseus. Part of the state machine."""

import math
from collections.abc import Iterable
from statistics import median

from perseus.service.domain.measured import JobIteration
from perseus.service.domain.model import StockIteration


class Baseline:
    """Measures a few iterations at stock.

    Attributes:
        iteration: what was measured, None until it is.
    """

    def __init__(self, iteration_count: int) -> None:
        self.iteration: StockIteration | None = None
        self._iteration_count = iteration_count
        self._seen: list[StockIteration] = []

    @property
    def time_s(self) -> float:
        """How long an iteration takes, 0 until that is measured."""
        return self.iteration.time_s if self.iteration is not None else 0.0

    def restart(self) -> None:
        """What is under way counts for nothing; what was measured stays."""
        self._seen.clear()

    def forget(self) -> None:
        """It is to be measured again."""
        self.iteration = None
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
            self.iteration = StockIteration(
                math.fsum(each.time_s for each in measured) / len(measured),
                math.fsum(each.energy_j for each in measured) / len(measured),
                # The usual one: an evaluation in between must not pass for it.
                median(each.gap_time_s or 0.0 for each in measured),
            )
