"""Fit the parts of an iteration that computations don't explain: transfers and fixed-time computations.

Measured iterations take longer than their computations: activations and gradients travel, data is loaded, the
optimizer steps. From iterations under several plans, each with its computations' times, the fit finds
non-negative lags (per stage boundary and direction) and fixed times with which the emulated iteration times
match the measured ones (:mod:`perseus.solver.study.iteration_model`). It also finds whether transfers overlap
with computations or occupy both of their stages (:mod:`perseus.solver.study.transfers`).

If something else makes iterations long (such as a slow host), some lags may still match the measurements, but
they mean nothing. So each fit is tested on iterations that it has not seen. Finer lags, and transfers that
occupy stages, are used only if they predict these better than the simpler model, and no lags at all if even
the best predict them badly. The error is part of the fit.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from perseus.solver.bounds import MAX_TIME_S
from perseus.solver.computation import Computation
from perseus.solver.errors import ScheduleError, SolverError
from perseus.solver.pipeline import Pipeline
from perseus.solver.schedule import Schedule
from perseus.solver.study.critical_paths import CriticalPaths
from perseus.solver.study.iteration_model import (
    IN_PS,
    Estimate,
    FloatArray,
    IterationModel,
    durations_ps,
)
from perseus.solver.study.transfers import Transfers, lagged_arcs, with_occupying_transfers

EXPLAINED_WITHIN = 0.02
"""The error, as a share of the iteration time, up to which fitted times explain the measurements."""

_FOLDS = 4
"""Number of folds in cross-validation: each is tested on the fit to the others."""

_WORTH = 0.9
"""A finer or less simple model has to reduce the mean error to this share."""


@dataclass(frozen=True, slots=True)
class MeasuredIteration:
    """The times of one iteration.

    Attributes:
        times_s: the time of each computation. Missing FIXED ones are fitted.
        iteration_time_s: from the first start to the last end.
    """

    times_s: Mapping[Computation, float]
    iteration_time_s: float


@dataclass(frozen=True, slots=True)
class FittedTimes:
    """Lags by (sending stage, receiving stage) and times of FIXED computations, as a pipeline takes them.

    Attributes:
        transfers: how transfers keep stages waiting.
        residuals: per fitted iteration, the relative excess of the emulated time over the measured one.
        error: the root mean square of this share over iterations that were not fitted to, or over the
            fitted ones if there are too few.
    """

    activation_lags_s: Mapping[tuple[int, int], float]
    gradient_lags_s: Mapping[tuple[int, int], float]
    fixed_times_s: Mapping[Computation, float]
    residuals: tuple[float, ...] = field(default=(), compare=False)
    error: float = field(default=0.0, compare=False)
    transfers: Transfers = Transfers.OVERLAPPING

    @property
    def explains(self) -> bool:
        """Whether these times explain the measurements; otherwise they contain no lags."""
        return self.error <= EXPLAINED_WITHIN


def fit_times(schedule: Schedule, iterations: Sequence[MeasuredIteration]) -> FittedTimes:
    """Fit the lags, and the times of FIXED computations without a measurement. None is negative.

    If the fit does not explain the iterations (`FittedTimes.explains`), lags are 0, as they would mean
    nothing.

    Raises:
        SolverError: there is no iteration, a time is impossible, or a computation has none.
    """
    if not iterations:
        raise SolverError("iterations: expected at least one, found none")
    for n, one in enumerate(iterations):
        if not 0 < one.iteration_time_s <= MAX_TIME_S:
            raise SolverError(
                f"iteration {n}: expected a positive, finite iteration_time_s of at most {MAX_TIME_S:g}, "
                f"found {one.iteration_time_s}"
            )
    candidates = _simple_first(schedule, iterations)
    unknown = _unknown(schedule, iterations, candidates)
    # By the mean, because otherwise one unpredictable iteration would decide.
    means = [math.fsum(map(abs, shares)) for shares in unknown]
    chosen = 0
    for finer in range(1, len(candidates)):
        if means[finer] <= _WORTH * means[chosen]:
            chosen = finer
    error = math.sqrt(math.fsum(share**2 for share in unknown[chosen]) / len(unknown[chosen]))
    if error > EXPLAINED_WITHIN:
        chosen = 0
    fitted = candidates[chosen]
    return replace(fitted, residuals=tuple(_residuals(schedule, iterations, fitted)), error=error)


def emulated_iteration_time_s(
    schedule: Schedule, times_s: Mapping[Computation, float], fitted: FittedTimes
) -> float:
    """Return the iteration time for computations' ``times_s``, with the fitted lags and times.

    Raises:
        SolverError: a time is impossible, or a computation has none.
    """
    return float(_emulated_s(schedule, [times_s], fitted)[0])


def with_fitted_times(pipeline: Pipeline, fitted: FittedTimes) -> Pipeline:
    """Return the pipeline with the fitted lags, kind of transfers, and fixed times.

    The pipeline has the fitted schedule, so its FIXED computations already have some time.

    Raises:
        PipelineError: a fitted fixed time matches nothing in the pipeline's schedule.
        ScheduleError: transfers that occupy their stages would deadlock in it.
    """
    fitted_to = replace(
        pipeline,
        activation_lags_s=fitted.activation_lags_s,
        gradient_lags_s=fitted.gradient_lags_s,
        fixed_times_s={**pipeline.fixed_times_s, **fitted.fixed_times_s},
    )
    return with_occupying_transfers(fitted_to) if fitted.transfers is Transfers.OCCUPYING else fitted_to


def _unknown(
    schedule: Schedule, iterations: Sequence[MeasuredIteration], fits: Sequence[FittedTimes]
) -> list[list[float]]:
    """Return each fit's relative errors on iterations that it has not seen, in the order of the fits."""
    if len(iterations) < _FOLDS:
        return [_residuals(schedule, iterations, fitted) for fitted in fits]
    missed: list[list[float]] = [[] for _ in fits]
    for fold in range(_FOLDS):
        seen = [one for n, one in enumerate(iterations) if n % _FOLDS != fold]
        for own, fitted in zip(missed, _simple_first(schedule, seen), strict=True):
            own += _residuals(schedule, iterations[fold::_FOLDS], fitted)
    return missed


def _residuals(
    schedule: Schedule, iterations: Sequence[MeasuredIteration], fitted: FittedTimes
) -> list[float]:
    measured_s = np.array([one.iteration_time_s for one in iterations])
    emulated_s = _emulated_s(schedule, [one.times_s for one in iterations], fitted)
    residuals: list[float] = (emulated_s / measured_s - 1).tolist()
    return residuals


def _emulated_s(
    schedule: Schedule, times_s: Sequence[Mapping[Computation, float]], fitted: FittedTimes
) -> FloatArray:
    paths = CriticalPaths(schedule, fitted.transfers)
    lags_s = [
        (fitted.activation_lags_s if link.is_activation else fitted.gradient_lags_s).get(link[1:], 0.0)
        for link in paths.links
    ]
    durations = durations_ps(paths.computations, [{**fitted.fixed_times_s, **one} for one in times_s])
    emulated_ps = paths.lengths_ps(durations, np.array([IN_PS.to_ps(lag_s) for lag_s in lags_s], np.int64))
    return emulated_ps / IN_PS.ps_per_s


def _simple_first(schedule: Schedule, iterations: Sequence[MeasuredIteration]) -> list[FittedTimes]:
    """Return the fits without lags, with common ones, with all; then with occupying transfers."""
    fits: list[FittedTimes] = []
    for transfers in _possible(schedule):
        model = IterationModel(
            schedule,
            [one.times_s for one in iterations],
            [one.iteration_time_s for one in iterations],
            transfers,
        )
        estimates = model.coarse_to_fine()
        # Without any lag the kind of transfers makes no difference.
        fits += [_fitted(transfers, estimate) for estimate in estimates[1 if fits else 0 :]]
    return fits


def _possible(schedule: Schedule) -> Iterator[Transfers]:
    for transfers in Transfers if schedule.dependencies else (Transfers.OVERLAPPING,):
        try:
            lagged_arcs(schedule, transfers)
        except ScheduleError:
            continue
        yield transfers


def _fitted(transfers: Transfers, estimate: Estimate) -> FittedTimes:
    lags_s = estimate.lags_s.items()
    return FittedTimes(
        activation_lags_s={link[1:]: lag_s for link, lag_s in lags_s if link.is_activation},
        gradient_lags_s={link[1:]: lag_s for link, lag_s in lags_s if not link.is_activation},
        fixed_times_s=estimate.fixed_times_s,
        transfers=transfers,
    )
