"""What the work that trainers' hooks count means for a job's times. Part of the state machine.

A stage's typical work is the mean until the stock baseline is measured, or of its first rows. What is
measured later, of whatever iterations, is compared as if they had that much. How times follow work is learned
from the whole job's iterations under the same clocks. Work that a trainer states is relative already, and its
times are in proportion.
"""

from collections.abc import Iterable
from dataclasses import replace

from perseus.service.domain.measured import JobIteration
from perseus.service.domain.records import JobRecord
from perseus.service.domain.telemetry import EnergyEstimate, EnergySample, IterationColumns
from perseus.work_exponent import WorkExponent

_CHANGE = 0.02
"""Of the exponent, that is worth storing: an iteration of twice the work is 1.4 % off."""

_MIN_ROWS = 4
"""Rows of a stage from which its typical work is known."""

_LEARNED = 0.1
"""Weight of what was learned before a restart: as of ten iterations whose work varies by 10 %."""


class CountedWork:
    """The work of one job's iterations, and what follows from it."""

    def __init__(self, record: JobRecord, stage_count: int) -> None:
        self._record = record
        self._is_stated = False
        is_known = bool(record.typical_work)  # learned before a restart
        self._exponent = WorkExponent(record.work_exponent, _LEARNED) if is_known else WorkExponent()
        self._versions: tuple[int, ...] | None = None
        self._sums = [0.0] * stage_count
        self._counts = [0] * stage_count

    def forget(self) -> None:
        """Forget everything: the job has other work from now on."""
        self._record.typical_work, self._record.work_exponent = (), 1.0
        self._exponent = WorkExponent()
        self._sums, self._counts = [0.0] * len(self._sums), [0] * len(self._counts)

    def related(self, stage: int, rows: IterationColumns) -> IterationColumns:
        """Return a rank's rows with work relative to its stage's typical, and what it makes of times."""
        self._is_stated |= any(rows.relative_work)
        if self._is_stated or not any(rows.work):
            return rows._replace(work=())
        known = [*(self._record.typical_work or [0.0] * len(self._sums))]
        if not known[stage] and self._record.baseline is not None and self._counts[stage] >= _MIN_ROWS:
            known[stage] = self._typical(stage)
            self._record.typical_work = tuple(known)
        elif not known[stage]:
            own = [work for work in rows.work if work]
            self._sums[stage] += sum(own)
            self._counts[stage] += len(own)
        typical = self._typical(stage)
        ratios = [work / typical for work in rows.work]
        return rows._replace(work=ratios, relative_work=[self._effect(ratio) for ratio in ratios])

    def at_typical(self, stage: int, estimate: EnergyEstimate) -> EnergyEstimate:
        """Return a rank's estimate as it would be at its stage's typical work."""
        typical = 1.0 if self._is_stated else self._typical(stage)
        if not (typical and estimate.work):
            return estimate
        ratio = typical / estimate.work
        factor = ratio if self._is_stated else self._effect(ratio)
        return replace(
            estimate,
            samples=_scaled(estimate.samples, factor),
            undetermined=_scaled(estimate.undetermined, factor),
        )

    def learn(self, iteration: JobIteration) -> None:
        """Learn from an iteration of the job how times follow work."""
        if iteration.versions != self._versions:
            self._versions = iteration.versions
            self._exponent.begin_group()
        elif iteration.work and iteration.is_regular and iteration.versions is not None:
            self._exponent.add(iteration.work, iteration.iteration_time_s)
            if abs(self._exponent.value - self._record.work_exponent) > _CHANGE:
                self._record.work_exponent = self._exponent.value

    def _typical(self, stage: int) -> float:
        if self._record.typical_work and self._record.typical_work[stage]:
            return self._record.typical_work[stage]
        return self._sums[stage] / self._counts[stage] if self._counts[stage] else 0.0

    def _effect(self, ratio: float) -> float:
        return ratio**self._record.work_exponent if ratio else 0.0


def _scaled(samples: Iterable[EnergySample], factor: float) -> tuple[EnergySample, ...]:
    return tuple(
        replace(
            sample,
            time_s=factor * sample.time_s,
            time_se_s=factor * sample.time_se_s,
            energy_j=factor * sample.energy_j,
            energy_se_j=factor * sample.energy_se_j,
        )
        for sample in samples
    )
