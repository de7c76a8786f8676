"""How computations varied in a job's latest iterations, for plans that hold nevertheless. In memory only.

A rank's computations arrive with its iteration, but are added only after that was judged. So those of an
iteration are kept when the next one is complete.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perseus.service.domain.measured import JobIteration
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import ComputationColumns
from perseus.solver import Kind, Pipeline, Schedule, Variation, highest

MIN_ITERATIONS = 8
"""Iterations from which on the variation is known."""

_KEPT = 32
_RECENT = 4
"""Iterations kept of each rank until all have reported them."""

_LATER = 7
"""Once that many are kept, only every such iteration is."""

_MAX_PIPELINES = 4
"""Pipelines of each iteration that are kept, which bounds memory and the solver's time."""

_NEGLIGIBLE = 0.003
"""Standard deviation of relative times up to which plans on mean times hold within 0.1 %."""


Rows = tuple[Sequence[float], Sequence[int]]


class VariationMemory:
    """The times and clocks of computations in the latest regular iterations without a known straggler."""

    def __init__(self, schedule: Schedule, pipeline_count: int) -> None:
        self._computations = tuple(schedule.computations)
        self._places = [
            (pipeline, stage)
            for pipeline in range(0, pipeline_count, -(-pipeline_count // _MAX_PIPELINES))
            for stage in range(schedule.stage_count)
        ]
        # By pipeline and stage, and iteration: times in s and clocks in MHz.
        self._latest: dict[tuple[int, int], dict[int, Rows]] = {place: {} for place in self._places}
        # Each of shape (2, pipelines, computations): times in s, and clocks in MHz.
        self._seen: deque[NDArray[np.float32]] = deque(maxlen=_KEPT)
        self._awaited: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether enough iterations were seen."""
        return len(self._seen) >= MIN_ITERATIONS

    def add(self, rank: Coordinates, computations: ComputationColumns) -> None:
        """Add a rank's latest computations; tensor rank 0 represents the stage."""
        latest = self._latest.get((rank.pipeline, rank.stage)) if not rank.tensor else None
        if latest is None:
            return
        for iteration in computations.iterations()[-_RECENT:]:
            own = computations.of_iteration(iteration)
            latest[iteration] = own.duration_s, own.clock_mhz
        while len(latest) > _RECENT:
            del latest[next(iter(latest))]

    def take(self, iteration: JobIteration) -> None:
        """Take a complete iteration of the job."""
        if self._awaited is not None and (seen := self._columns(self._awaited)) is not None:
            self._seen.append(seen)
        is_usable = (
            iteration.is_regular
            and iteration.versions is not None
            and not (iteration.has_clock_change or iteration.has_straggler)
            and (len(self._seen) < _KEPT or iteration.iteration % _LATER == 0)
        )
        self._awaited = iteration.iteration if is_usable else None

    def forget(self) -> None:
        """Forget everything: the job has other work from now on."""
        self._seen.clear()
        for latest in self._latest.values():
            latest.clear()
        self._awaited = None

    def variation(self, profiled: Pipeline, tolerance: float) -> Variation | None:
        """Return the variation relative to a profile; None if it is unknown or negligible.

        `tolerance`: that of plans for it.
        """
        if not self.is_known:
            return None
        times_s, clocks_mhz = np.stack(self._seen, axis=1)
        factors = times_s / self._profiled_s(profiled, clocks_mhz.astype(np.int64))
        factors = factors[np.isfinite(factors).all(axis=(1, 2))]
        if len(factors) < MIN_ITERATIONS:
            return None
        keys = [(c.stage, c.chunk, c.kind) for c in self._computations]
        for key in {*keys}:
            own = np.array([each == key for each in keys])
            factors[:, :, own] /= max(factors[:, :, own].mean(), np.finfo(np.float32).tiny)
        found = Variation(factors, tolerance)
        return found if found.spread > _NEGLIGIBLE else None

    def _columns(self, iteration: int) -> NDArray[np.float32] | None:
        """Return an iteration's times and clocks, shape (2, pipelines, computations); None if any lacks."""
        found = [self._latest[place].get(iteration) for place in self._places]
        rows = [each for each in found if each is not None]
        count = len({pipeline for pipeline, _ in self._places}) * len(self._computations)
        if len(rows) < len(found) or sum(len(times_s) for times_s, _ in rows) != count:
            return None
        columns = np.array([np.concatenate(column) for column in zip(*rows, strict=True)], dtype=np.float32)
        return columns.reshape(2, -1, len(self._computations))

    def _profiled_s(self, profiled: Pipeline, clocks_mhz: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return each computation's time at its clock, NaN if that was not measured; 0 is stock."""
        found = np.full(clocks_mhz.shape, np.nan, dtype=np.float32)
        tables: dict[tuple[int, int, Kind], dict[int, float]] = {}
        for key, measured in profiled.profiles.items():
            tables[key] = {m.clock_mhz: m.time_s for m in measured} | {0: highest(measured).time_s}
        for column, c in enumerate(self._computations):
            if c.kind is Kind.FIXED:
                found[..., column] = profiled.fixed_times_s[c]
                continue
            own_mhz = clocks_mhz[..., column]
            for mhz in np.unique(own_mhz).tolist():
                time_s = tables[c.stage, c.chunk, c.kind].get(mhz)
                if time_s is not None:
                    found[..., column][own_mhz == mhz] = time_s
        return found
