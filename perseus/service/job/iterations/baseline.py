"""The stock baseline: how long an iteration takes without Perseus. Part of the state machine."""

import math
from collections.abc import Iterable

from perseus.service.domain.measured import JobIteration


class Baseline:
    """Measures a few iterations at stock.

    Attributes:
        time_s: what an iteration takes, 0 until that is measured.
    """

    def __init__(self, iteration_count: int) -> None:
        self.time_s = 0.0
        self._iteration_count = iteration_count
        self._times_s: list[float] = []

    def restart(self) -> None:
        """What is under way counts for nothing; what was measured stays."""
        self._times_s.clear()

    def forget(self) -> None:
        """It is to be measured again."""
        self.time_s = 0.0
        self.restart()

    def take(self, iterations: Iterable[JobIteration], wanted: tuple[int, ...]) -> None:
        """Take regular ones under the versions of stock; not the first, which may have begun otherwise."""
        self._times_s.extend(
            iteration.iteration_time_s
            for iteration in iterations
            if iteration.is_regular and iteration.versions == wanted
        )
        if len(self._times_s) > self._iteration_count:
            measured_s = self._times_s[1 : self._iteration_count + 1]
            self.time_s = math.fsum(measured_s) / len(measured_s)
