"""The stock baseline: time and energy of an iteration without Perseus. Part of the state machine."""

import math
from collections.abc import Iterable
from statistics import median

from perseus.service.domain.measured import JobIteration, Period
from perseus.service.domain.model import StockIteration
from perseus.service.domain.records import JobRecord
from perseus.service.job.retry_delay import INITIAL_DELAY_S, MAX_DELAY_S

MAX_WAIT_S = INITIAL_DELAY_S
"""How long a baseline waits for the end of a disturbance."""


class Baseline:
    """Measures a few iterations at stock.

    Attributes:
        waits_for: what disturbs stock now and is waited for, for people; empty if nothing is.
    """

    def __init__(self, record: JobRecord, iteration_count: int) -> None:
        self._record = record
        self._iteration_count = iteration_count
        self._seen: list[StockIteration] = []
        self.waits_for = ""

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
        self.waits_for = ""

    def forget(self) -> None:
        """Discard the baseline so that it is measured again."""
        self._record.baseline = None
        self.restart()

    def renew(self, period: Period) -> None:
        """Take the iterations at stock beside the plans of a period, once they suffice."""
        if (before := self.iteration) is not None and (stock := period.stock) is not None:
            energy_j = stock.energy_j or before.energy_j
            self._record.baseline = StockIteration(stock.iteration_time_s, energy_j, before.gap_time_s)

    def disturb(self, cause: str, wall_time_s: float) -> bool:
        """Discard what was measured so far, as something slows the job; return whether to wait for its end.

        A baseline waits for `MAX_WAIT_S` in all, over lost ranks and restarts: what lasts belongs to the job.
        """
        since_s = self._record.disturbed_time_s
        if since_s is None or not 0 <= wall_time_s - since_s < MAX_DELAY_S:
            since_s = self._record.disturbed_time_s = wall_time_s
        if wall_time_s >= since_s + MAX_WAIT_S:
            self.waits_for = ""
            return False
        self._seen.clear()
        self.waits_for = cause
        return True

    def take(self, iterations: Iterable[JobIteration], wanted: tuple[int, ...], more_count: int = 0) -> None:
        """Take regular iterations under stock's versions; the first is left out.

        It may have begun under other clocks. They count once `more_count` have followed: while it is
        doubtful whether they are stock's usual ones, that may show.
        """
        self.waits_for = ""
        self._seen.extend(
            StockIteration(
                iteration.iteration_time_s, math.fsum(iteration.pipeline_energy_j), iteration.gap_time_s
            )
            for iteration in iterations
            if iteration.is_regular and iteration.versions == wanted
        )
        if len(self._seen) > self._iteration_count + more_count:
            self._record.disturbed_time_s = None
            measured = self._seen[1 : self._iteration_count + 1]
            self._record.baseline = StockIteration(
                math.fsum(each.time_s for each in measured) / len(measured),
                math.fsum(each.energy_j for each in measured) / len(measured),
                # The median, so that an evaluation in between does not count as the usual gap.
                median(each.gap_time_s or 0.0 for each in measured),
            )
