"""The stock baseline: time and energy of an iteration without Perseus. Part of the state machine."""

import math
from collections.abc import Iterable
from statistics import median

from perseus.service.domain.measured import JobIteration
from perseus.service.domain.model import StockIteration
from perseus.service.domain.records import JobRecord
from perseus.service.job.retry_delay import INITIAL_DELAY_S

MAX_WAIT_S = INITIAL_DELAY_S
"""How long a baseline waits for the end of a disturbance."""


class Baseline:
    """Measures a few iterations at stock."""

    def __init__(self, record: JobRecord, iteration_count: int) -> None:
        self._record = record
        self._iteration_count = iteration_count
        self._seen: list[StockIteration] = []
        self._disturbed_since_s: float | None = None

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
        self._disturbed_since_s = None

    def forget(self) -> None:
        """Discard the baseline so that it is measured again."""
        self._record.baseline = None
        self.restart()

    def disturb(self, now_s: float) -> bool:
        """Discard what was measured so far, as something slows the job; return whether to wait for its end.

        What lasts for `MAX_WAIT_S` belongs to the job: its stock is no faster.
        """
        if self._disturbed_since_s is None:
            self._disturbed_since_s = now_s
        if now_s >= self._disturbed_since_s + MAX_WAIT_S:
            return False
        self._seen.clear()
        return True

    def take(self, iterations: Iterable[JobIteration], wanted: tuple[int, ...], more_count: int = 0) -> None:
        """Take regular iterations under stock's versions; the first is left out.

        It may have begun under other clocks. They count once `more_count` have followed: while it is
        doubtful whether they are stock's usual ones, that may show.
        """
        self._seen.extend(
            StockIteration(
                iteration.iteration_time_s, math.fsum(iteration.pipeline_energy_j), iteration.gap_time_s
            )
            for iteration in iterations
            if iteration.is_regular and iteration.versions == wanted
        )
        if len(self._seen) > self._iteration_count + more_count:
            measured = self._seen[1 : self._iteration_count + 1]
            self._record.baseline = StockIteration(
                math.fsum(each.time_s for each in measured) / len(measured),
                math.fsum(each.energy_j for each in measured) / len(measured),
                # The median, so that an evaluation in between does not count as the usual gap.
                median(each.gap_time_s or 0.0 for each in measured),
            )
