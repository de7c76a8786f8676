"""How computations varied in a job's latest iterations, for plans that hold nevertheless. In memory only."""

import math
from collections import defaultdict, deque

import numpy as np
from numpy.typing import NDArray

from perseus.service.domain.measured import JobIteration
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import ComputationColumns
from perseus.solver import Kind, Schedule, Variation

MIN_ITERATIONS = 24
"""Iterations from which on the variation is known: plans for 8 are 1 % slower in others, for 32 0.3 %."""

MAX_ITERATIONS = 64
"""Iterations that are kept: the latest."""

_LATER = 7
"""Once that many are kept, only every such iteration is."""

_RECENT = 16
"""Iterations of a rank that wait for the other ranks."""

_MAX_PIPELINES = 4
_MAX_COMPUTATIONS = 8192
"""Of each iteration that are kept, if one pipeline does not have more: bounds memory and time."""

Columns = NDArray[np.float32]


class VariationMemory:
    """The times of computations in the latest regular iterations without a known straggler."""

    def __init__(self, schedule: Schedule, pipeline_count: int) -> None:
        computations = tuple(schedule.computations)
        most = max(1, min(_MAX_PIPELINES, _MAX_COMPUTATIONS // max(1, len(computations))))
        self._places = dict.fromkeys(
            (pipeline, stage)
            for pipeline in range(0, pipeline_count, -(-pipeline_count // most))
            for stage in range(schedule.stage_count)
        )
        self._shape = 2, len(self._places) // schedule.stage_count, len(computations)
        # The columns of each kind of a stage's computations.
        self._columns_of: dict[tuple[int, int, Kind], list[int]] = {}
        for column, c in enumerate(computations):
            self._columns_of.setdefault((c.stage, c.chunk, c.kind), []).append(column)
        # By pipeline and stage, and iteration, shape (2, computations): times in s, and clocks in MHz.
        self._latest: defaultdict[tuple[int, int], dict[int, Columns]] = defaultdict(dict)
        # Each of that shape: pipelines and their computations.
        self._seen: deque[Columns] = deque(maxlen=MAX_ITERATIONS)

    @property
    def count(self) -> int:
        """How many iterations were seen, of the latest `MAX_ITERATIONS`."""
        return len(self._seen)

    def add(self, rank: Coordinates, computations: ComputationColumns) -> None:
        """Add a rank's computations, before its iterations are taken; tensor rank 0 represents the stage."""
        place = rank.pipeline, rank.stage
        if rank.tensor or place not in self._places:
            return
        latest = self._latest[place]
        for iteration in computations.iterations()[-_RECENT:]:
            if self._is_wanted(iteration):
                own = computations.of_iteration(iteration)
                latest[iteration] = np.array([own.duration_s, own.clock_mhz], dtype=np.float32)
        while len(latest) > _RECENT:
            del latest[next(iter(latest))]

    def take(self, iteration: JobIteration) -> None:
        """Take a complete iteration of the job."""
        rows = [self._latest[place].pop(iteration.iteration, None) for place in self._places]
        is_usable = (
            iteration.is_regular
            and iteration.versions is not None
            and not (iteration.has_clock_change or iteration.has_straggler)
            and self._is_wanted(iteration.iteration)
        )
        known = [row for row in rows if row is not None]
        if is_usable and len(known) == len(rows):
            columns = np.concatenate(known, axis=1)
            if columns.size == math.prod(self._shape):
                self._seen.append(columns.reshape(self._shape))

    def forget(self) -> None:
        """Forget everything: the job has other work from now on."""
        self._seen.clear()
        self._latest.clear()

    def variation(self) -> Variation | None:
        """Return the variation; None if it is unknown.

        Times are relative to the mean of their kind at their clock: how far the profile is off is no
        variation.
        """
        if self.count < MIN_ITERATIONS:
            return None
        times_s, clocks_mhz = np.stack(self._seen, axis=1)
        for columns in self._columns_of.values():
            own_s, own_mhz = times_s[:, :, columns], clocks_mhz[:, :, columns]
            for clock_mhz in np.unique(own_mhz):
                is_own = own_mhz == clock_mhz
                own_s[is_own] /= max(own_s[is_own].mean(), np.finfo(np.float32).tiny)
            times_s[:, :, columns] = own_s
        return Variation(times_s)

    def _is_wanted(self, iteration: int) -> bool:
        return len(self._seen) < MAX_ITERATIONS or iteration % _LATER == 0
