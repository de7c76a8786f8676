"""Blocks of iterations at stock beside the plans, at random moments. Part of the state machine.

Stock changes: the work does, heat and neighbours do. So plans are compared with stock in the same minutes:
after some iterations under plans the job runs a block at stock and returns. The block and as many iterations
before and after it are a `Pair`; what drifts slowly is in both sides alike. The first iteration after a
change of clocks counts on neither side.

The first blocks follow each other closely: whether a plan keeps what it promises has to be known soon. Later
ones take `SHARE` of the iterations, at random distances, so that nothing periodic (evaluation, checkpoints,
the length of an epoch) falls on one side. Irregular iterations count on no side. Where trainers state their
iterations' work, or hooks count it, time and energy are as they would be at the mean of a pair's.
"""

import enum
import math
import zlib
from collections import deque

import numpy as np

from perseus.service.domain.measured import JobIteration
from perseus.service.domain.pairs import Figures, Pair, pair_of
from perseus.service.job.rules import Rules

SHARE = 0.03
"""Share of a job's iterations that are at stock for comparison, in the long run."""

EARLY_COUNT = 6
"""Blocks that follow each other closely."""

_PATIENCE = 4
"""A block ends in any case after so many times its iterations."""

Versions = tuple[int, ...]


class BlockStep(enum.Enum):
    """What has to be offered now."""

    STOCK = enum.auto()
    PLANS = enum.auto()


class _Phase(enum.Enum):
    BEFORE = enum.auto()
    STOCK = enum.auto()
    AFTER = enum.auto()


class StockBlocks:
    """One job's blocks. `seed` makes their moments reproducible."""

    def __init__(self, rules: Rules, seed: str) -> None:
        self._length = rules.baseline_iterations
        self._random = np.random.default_rng(zlib.crc32(seed.encode()))
        self._versions: Versions | None = None
        self._phase = _Phase.BEFORE
        self._wait = 0
        self._passed = 0
        self._is_first = True
        self._before: deque[Figures] = deque(maxlen=self._length)
        self._stock: list[Figures] = []
        self._after: list[Figures] = []

    def restart(self) -> None:
        """Begin anew, with nothing of an unfinished block."""
        self._versions = None

    def take(
        self,
        iteration: JobIteration,
        plan_versions: Versions,
        pair_count: int,
        usual_gap_s: float | None,
        *,
        may_begin: bool,
    ) -> BlockStep | Pair | None:
        """Take an iteration of a planned job; return what to offer, or a finished pair.

        `plan_versions`: those of the plans, offered or suspended. `pair_count`: the pairs that they have.
        `usual_gap_s`: at stock; if known, time lost to low clocks in longer gaps counts.
        """
        if plan_versions != self._versions:
            self._versions = plan_versions
            self._begin(pair_count)
        is_planned = iteration.versions == plan_versions
        is_at_stock = iteration.is_at_stock and iteration.versions is not None and not is_planned
        if self._phase is _Phase.STOCK and not is_planned:
            self._passed += 1
            if self._passed > _PATIENCE * self._length:
                self._begin(pair_count)
                return BlockStep.PLANS
        if not iteration.is_regular or not (is_planned or is_at_stock):
            return None
        lost_s = 0.0
        if usual_gap_s is not None and is_planned:
            lost_s = min(iteration.gap_slowed_time_s, max(0.0, iteration.gap_time_s - usual_gap_s))
        known_j = 0.0 if iteration.unmeasured_rank_count else math.fsum(iteration.pipeline_energy_j)
        figures = iteration.iteration_time_s + lost_s, known_j, iteration.relative_work
        match self._phase:
            case _Phase.BEFORE if is_planned:
                self._wait -= 1
                self._before.append(figures)
                if self._wait <= 0 and len(self._before) == self._length and may_begin:
                    self._phase, self._is_first = _Phase.STOCK, True
                    return BlockStep.STOCK
            case _Phase.STOCK if is_planned:
                self._before.append(figures)  # stock is not in force yet
            case _Phase.STOCK if self._has_passed_first():
                self._stock.append(figures)
                if len(self._stock) == self._length:
                    self._phase, self._is_first = _Phase.AFTER, True
                    return BlockStep.PLANS
            case _Phase.AFTER if is_planned and self._has_passed_first():
                self._after.append(figures)
                if len(self._after) == self._length:
                    pair = pair_of(self._before, self._stock, self._after, iteration.iteration)
                    self._begin(pair_count + 1)
                    return pair
        return None

    def _has_passed_first(self) -> bool:
        """Tell whether an iteration is not the first one after a change of clocks."""
        was_first, self._is_first = self._is_first, False
        return not was_first

    def _begin(self, pair_count: int) -> None:
        self._phase, self._passed = _Phase.BEFORE, 0
        self._wait = self._length
        if pair_count >= EARLY_COUNT:
            self._wait += round(self._random.uniform(0.5, 1.5) * (self._length + 1) / SHARE)
        self._before.clear()
        self._stock, self._after = [], []
