"""Energy per computation and blocking power, from a counter that moves only every 20–100 ms.

A computation is as short as the counter's step, so interpolating the counter at a computation's edges smears
its energy over its neighbours: waiting appears to draw far too much, computing too little. Instead the
counter's increments are regressed on the time that each of its windows (from one change to the next) spent
on each kind of computation and on waiting: the coefficients are powers.

What makes the answer sharp and its standard errors honest is the noise model, generalised least squares on

    increment_i = Σ_key power_key · time_i,key + blocking power · waiting_i + noise_i

- A change is known only to lie between two polls. Times spent are therefore averages over that interval,
  which leaves an error of mean zero that is independent of them (Berkson's case: no bias). Its variance
  follows from the powers that ran in the interval. Neighbouring windows share a change, so their errors are
  opposite: what one gained the other lost. Knowing this is worth a factor of several in precision.
- Power itself varies from one computation to the next. Its share, taken as independent between windows, is
  estimated by restricted maximum likelihood.
"""

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from perseus.agent.gpu import ClockEventReason

Array = NDArray[np.float64]
K = TypeVar("K", bound=Hashable)

_POLL_POINTS = 8  # moments at which a poll interval is looked at, to average over it
_COUNTER_RESOLUTION_J = 0.001  # NVML counts millijoules
_SPARE_WINDOWS = 3  # windows needed beyond one per unknown, to have a scale to judge the residuals by
_REWEIGHTINGS = 3  # the noise depends on the powers; it settles in two or three rounds
_POWER_VARIATIONS = np.array([0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2])  # of mean power, per 100 ms
# A power with a larger standard error than this share of the mean power is not determined. (A share of the
# power itself would favour overestimates.)
_MAX_ERROR_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class CounterChange:
    """The counter moved to `energy_j` at `time_s` (CLOCK_MONOTONIC) ± `uncertainty_s`, half a poll interval.

    `clock_event_reasons`: all those seen since the change before.
    """

    time_s: float
    energy_j: float
    uncertainty_s: float
    clock_event_reasons: int = 0


@dataclass(frozen=True, slots=True)
class Span(Generic[K]):
    """The GPU executed one computation of a key, say (kind, chunk, clock), from `begin_s` to `end_s`."""

    key: K
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its standard error."""

    value: float
    standard_error: float


@dataclass(frozen=True, slots=True)
class PowerFit(Generic[K]):
    """Powers in watts. A key that the windows do not tell apart (yet) is absent, blocking power then None."""

    power_w: Mapping[K, Estimate]
    blocking_power_w: Estimate | None
    window_count: int
    dropped_window_count: int


@dataclass(frozen=True, slots=True)
class NotDetermined:
    """Too little was measured to say anything."""

    reason: str
    window_count: int
    dropped_window_count: int


def cumulative_energy_j(changes: Sequence[CounterChange], time_s: float) -> float | None:
    """The counter at a moment, interpolated between changes (in order of time); None outside of them.

    For stretches much longer than a window, such as iterations: differences of consecutive moments add up to
    the whole. Not for single computations (see the module's docstring).
    """
    after = bisect_left(changes, time_s, key=lambda change: change.time_s)
    if after == len(changes) or (after == 0 and changes[0].time_s != time_s):
        return None
    if changes[after].time_s == time_s:
        return changes[after].energy_j
    left, right = changes[after - 1], changes[after]
    share = (time_s - left.time_s) / (right.time_s - left.time_s)
    return left.energy_j + share * (right.energy_j - left.energy_j)


def computation_energy_j(power_w: Estimate, durations_s: Sequence[float]) -> Estimate:
    """Energy of a computation of this power: power × mean duration, both uncertainties propagated."""
    mean_s = float(np.mean(durations_s))
    mean_error_s = (
        float(np.std(durations_s, ddof=1)) / len(durations_s) ** 0.5 if len(durations_s) > 1 else 0.0
    )
    return Estimate(
        power_w.value * mean_s,
        float(np.hypot(power_w.standard_error * mean_s, power_w.value * mean_error_s)),
    )


def estimate_power(
    changes: Sequence[CounterChange],
    spans: Sequence[Span[K]],
    *,
    begin_s: float,
    end_s: float,
    unknown: Sequence[tuple[float, float]] = (),
) -> PowerFit[K] | NotDetermined:
    """Power per key and blocking power from the counter's windows between `begin_s` and `end_s`.

    In that stretch the GPU is taken to have waited whenever no span says otherwise, but for the `unknown`
    intervals (a mark was lost, say). Changes and spans come in order of time; spans must not overlap
    (ValueError). Windows that touch an unknown interval, or in which the GPU was throttled, are dropped.
    """
    _check_order(spans)
    changes = [
        change
        for change in changes
        if begin_s <= change.time_s - change.uncertainty_s and change.time_s + change.uncertainty_s <= end_s
    ]
    keys = list(dict.fromkeys(span.key for span in spans))
    usable = np.array([_usable(*pair, unknown) for pair in pairwise(changes)], bool)
    window_count = int(usable.sum())
    dropped_window_count = len(usable) - window_count
    needed = len(keys) + 1 + _SPARE_WINDOWS
    if window_count < needed:
        reason = f"expected at least {needed} windows for {len(keys)} keys and waiting, found {window_count}"
        return NotDetermined(reason, window_count, dropped_window_count)

    *powers, blocking = _regress(changes, usable, _time_spent_s(changes, spans, keys, begin_s))
    power_w = {key: power for key, power in zip(keys, powers, strict=True) if power is not None}
    if not power_w and blocking is None:
        reason = f"the {window_count} windows do not tell {len(keys)} keys and waiting apart"
        return NotDetermined(reason, window_count, dropped_window_count)
    return PowerFit(power_w, blocking, window_count, dropped_window_count)


def _check_order(spans: Sequence[Span[K]]) -> None:
    previous_end_s = -np.inf
    for span in spans:
        if not previous_end_s <= span.begin_s <= span.end_s:
            raise ValueError(
                f"spans: {span.key}: expected begin_s >= {previous_end_s} and end_s >= begin_s, "
                f"found {span.begin_s} to {span.end_s}"
            )
        previous_end_s = span.end_s


def _usable(left: CounterChange, right: CounterChange, unknown: Sequence[tuple[float, float]]) -> bool:
    begin_s, end_s = left.time_s - left.uncertainty_s, right.time_s + right.uncertainty_s
    throttled = right.clock_event_reasons & ClockEventReason.THROTTLED
    return not throttled and not any(lost_s < end_s and found_s > begin_s for lost_s, found_s in unknown)


def _time_spent_s(
    changes: Sequence[CounterChange], spans: Sequence[Span[K]], keys: Sequence[K], begin_s: float
) -> Array:
    """Seconds since `begin_s` spent on each key and, last, waiting: (changes, poll points, keys + 1)."""
    offsets = (2 * np.arange(_POLL_POINTS) + 1 - _POLL_POINTS) / _POLL_POINTS
    times_s = np.array([change.time_s + change.uncertainty_s * offsets for change in changes]) - begin_s
    spent_s = np.empty((*times_s.shape, len(keys) + 1))
    for column, key in enumerate(keys):
        edges_s = np.array([(span.begin_s, span.end_s) for span in spans if span.key == key]) - begin_s
        done_s = np.concatenate([[0.0], np.cumsum(np.diff(edges_s))])
        spent_s[..., column] = np.interp(times_s, edges_s.ravel(), np.repeat(done_s, 2)[1:-1])
    spent_s[..., -1] = times_s - spent_s[..., :-1].sum(axis=-1)
    return spent_s


def _regress(
    changes: Sequence[CounterChange], usable: NDArray[np.bool_], spent_s: Array
) -> list[Estimate | None]:
    """The power of each column of `spent_s`, None where it is not determined."""
    rows = np.flatnonzero(usable)
    adjacent = np.diff(rows) == 1
    window_s = np.diff([change.time_s for change in changes])[rows]
    increments_j = np.diff([change.energy_j for change in changes])[rows]
    exposures_s = np.diff(spent_s.mean(axis=1), axis=0)[rows]
    mean_power_w = increments_j.sum() / window_s.sum()
    variation_j2 = np.outer((_POWER_VARIATIONS * mean_power_w) ** 2, 0.1 * window_s)

    powers_w = errors_w = np.full(spent_s.shape[-1], mean_power_w)
    for _ in range(_REWEIGHTINGS):
        poll_j2 = (spent_s @ powers_w.clip(0, 10 * mean_power_w)).var(axis=1) + _COUNTER_RESOLUTION_J**2
        powers_w, errors_w = _generalised_least_squares(
            exposures_s,
            increments_j,
            diagonals=poll_j2[rows] + poll_j2[rows + 1] + variation_j2,
            off_diagonal=np.where(adjacent, -poll_j2[rows[1:]], 0.0),
        )
    return [
        Estimate(float(power_w), float(error_w))
        if power_w > 0 and error_w <= _MAX_ERROR_SHARE * mean_power_w
        else None
        for power_w, error_w in zip(powers_w, errors_w, strict=True)
    ]


def _generalised_least_squares(
    design: Array, observed: Array, *, diagonals: Array, off_diagonal: Array
) -> tuple[Array, Array]:
    """Coefficients and standard errors under the likeliest of several tridiagonal noise covariances.

    Shapes: design (n, p), observed (n,), diagonals (covariances, n), off_diagonal (n - 1,). The covariance is
    chosen by restricted likelihood. A coefficient that the design does not determine gets an enormous
    standard error. Residuals larger than the covariance explains widen all standard errors.
    """
    norms = np.linalg.norm(design, axis=0)
    norms[norms == 0] = 1.0
    whitened, log_determinants = _whiten(np.column_stack([design / norms, observed]), diagonals, off_diagonal)
    best_likelihood = -np.inf
    for system, log_determinant in zip(whitened, log_determinants, strict=True):
        left, singular, right = np.linalg.svd(system[:, :-1], full_matrices=False)
        singular = singular.clip(1e-9 * singular[0])
        solution = right.T @ (left.T @ system[:, -1] / singular)
        misfit = float(np.sum((system[:, -1] - system[:, :-1] @ solution) ** 2))
        likelihood = -(log_determinant + 2 * np.log(singular).sum() + misfit) / 2
        if likelihood > best_likelihood:
            best_likelihood = likelihood
            excess = max(1.0, misfit / (design.shape[0] - design.shape[1]))
            coefficients = solution / norms
            errors = np.sqrt(excess * np.sum((right.T / singular) ** 2, axis=1)) / norms
    return coefficients, errors


def _whiten(rows: Array, diagonals: Array, off_diagonal: Array) -> tuple[Array, Array]:
    """`rows` multiplied by L⁻¹ for each covariance L Lᵀ, and the covariances' log determinants."""
    whitened = np.empty((*diagonals.shape, rows.shape[1]))
    pivots = np.empty_like(diagonals)
    whitened[:, 0], pivots[:, 0] = rows[0], diagonals[:, 0]
    for row in range(1, len(rows)):
        factor = off_diagonal[row - 1] / pivots[:, row - 1]
        pivots[:, row] = diagonals[:, row] - factor * off_diagonal[row - 1]
        whitened[:, row] = rows[row] - factor[:, None] * whitened[:, row - 1]
    return whitened / np.sqrt(pivots)[..., None], np.log(pivots).sum(axis=1)
