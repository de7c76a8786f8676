"""Energy per computation and blocking power, from a counter that moves only every 20–100 ms.

A computation is as short as the counter's step, so interpolating the counter at a computation's edges smears
its energy over its neighbours: waiting appears to draw far too much, computing too little. Instead the
counter's increments are regressed on the time that each of its windows (from one move to the next) spent on
each kind of computation and on waiting: the coefficients are powers.

The noise model makes the estimate precise and its standard errors honest: generalised least squares on

    increment_i = Σ_key power_key · time_i,key + blocking power · waiting_i + noise_i

- Polls locate each move of the counter only to a few milliseconds; the counter's own update period
  (`energy.update_times`) locates most of them to a fraction of that. Times spent are averages over the
  remaining uncertainty, which leaves an error of mean zero. Its variance follows from the powers around the
  move. Neighbouring windows share a move, so its errors in them are opposite.
- Power itself varies from one computation to the next. Its share, taken as independent between windows, is
  estimated by restricted maximum likelihood.
- The change of the powers when the moves shift within their uncertainty is an error, too. It reveals windows
  that differ by little more than that uncertainty, as they do if the training iteration is a whole number of
  counter periods.

Computations much shorter than a window may leave single powers undetermined. What the windows still say about
all powers together, such as their sum by time, is their joint information: the inverse of their covariance.
That of ranks with the same work adds up.
"""

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from perseus.agent.energy.counter import CounterChange
from perseus.agent.energy.least_squares import generalised_least_squares
from perseus.agent.energy.update_times import find_update_times
from perseus.gpu import ClockEventReason

Array = NDArray[np.float64]
K = TypeVar("K", bound=Hashable)

_ERROR_POINTS = np.linspace(-7, 7, 8) / 8  # points within a move's uncertainty: midpoints of eighths
_COUNTER_RESOLUTION_J = 0.001  # NVML counts millijoules
_SPARE_WINDOWS = 3  # windows needed beyond one per unknown, to have a scale to judge the residuals by
_OUTLIER_ROUNDS = 2
_OUTLIER_MISFIT = 8.0  # times the median misfit; that is 5.4 standard deviations of a normal distribution
_OUTLIER_SHARE = 0.02  # of the mean increment: smaller misfits do no harm
_REWEIGHTINGS = 2  # the noise depends on the powers; it settles in two rounds
_POWER_VARIATIONS = np.array([0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2])  # of mean power, per 100 ms
# A power with a larger standard error than this share of the mean power counts as not determined. (A share of
# the power itself would favour overestimates.)
_MAX_ERROR_SHARE = 0.1
_QUARTILES_APART = 1.349  # standard deviations, of a normal distribution
_MEDIAN_ERROR = 1.2533  # standard error of its median against that of its mean: √(π / 2)


@dataclass(frozen=True, slots=True)
class Span(Generic[K]):
    """One computation of a key, such as (kind, chunk, clock), on the GPU from `begin_s` to `end_s`."""

    key: K
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its standard error."""

    value: float
    standard_error: float


@dataclass(frozen=True, slots=True)
class JointInformation(Generic[K]):
    """What the windows say about the powers of `keys` and, last, blocking power, determined or not.

    `matrix` is the inverse of the powers' covariance, 1/W²; times the powers it gives `vector`, 1/W.
    """

    keys: tuple[K, ...]
    matrix: Array
    vector: Array

    def of(self, keys: Sequence[K]) -> "JointInformation[K]":
        """Return the information on some of the keys, in this order, and waiting, whatever the others are."""
        kept = [*map(self.keys.index, keys), len(self.keys)]
        others = [row for row in range(len(self.keys)) if row not in kept]
        through = self.matrix[np.ix_(kept, others)] @ np.linalg.pinv(self.matrix[np.ix_(others, others)])
        return JointInformation(
            tuple(keys),
            self.matrix[np.ix_(kept, kept)] - through @ self.matrix[np.ix_(others, kept)],
            self.vector[kept] - through @ self.vector[others],
        )


@dataclass(frozen=True, slots=True)
class PowerFit(Generic[K]):
    """Powers in watts. Keys that the windows do not separate (yet) are absent; blocking power may be None."""

    power_w: Mapping[K, Estimate]
    blocking_power_w: Estimate | None
    joint: JointInformation[K]
    window_count: int
    dropped_window_count: int


@dataclass(frozen=True, slots=True)
class NotDetermined:
    """The measurements do not suffice for an estimate."""

    reason: str
    window_count: int
    dropped_window_count: int


def cumulative_energy_j(changes: Sequence[CounterChange], time_s: float) -> float | None:
    """Return the counter's value at a moment, interpolated between changes (in order of time); None outside
    of them.

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


def typical_duration_s(durations_s: Sequence[float]) -> Estimate:
    """Return the median of durations, which occasional late marks do not stretch.

    Its standard error is that of a normal distribution's median, with the deviation from the quartiles.
    """
    lower_s, median_s, upper_s = np.quantile(durations_s, (0.25, 0.5, 0.75))
    deviation_s = (upper_s - lower_s) / _QUARTILES_APART
    return Estimate(float(median_s), float(_MEDIAN_ERROR * deviation_s / len(durations_s) ** 0.5))


def computation_energy_j(power_w: Estimate, duration_s: Estimate) -> Estimate:
    """Return the energy of a computation of this power and duration, with both uncertainties propagated."""
    return Estimate(
        power_w.value * duration_s.value,
        float(np.hypot(power_w.standard_error * duration_s.value, power_w.value * duration_s.standard_error)),
    )


def estimate_power(
    changes: Sequence[CounterChange],
    spans: Sequence[Span[K]],
    *,
    begin_s: float,
    end_s: float,
    unknown: Sequence[tuple[float, float]] = (),
) -> PowerFit[K] | NotDetermined:
    """Estimate power per key and blocking power from the counter's windows between `begin_s` and `end_s`.

    The GPU is assumed to wait outside of spans, except in the `unknown` intervals (such as after a lost
    mark). Changes and spans come in order of time; spans must not overlap (ValueError). Windows are dropped
    if they touch an unknown interval, if the GPU was throttled in them, or if they differ from the others
    beyond all noise (a late mark).
    """
    _check_order(spans)
    moves = _moves(changes).within(begin_s, end_s)
    edges: dict[K, list[tuple[float, float]]] = {}
    for span in spans:
        edges.setdefault(span.key, []).append((span.begin_s, span.end_s))
    keys, edges_s = list(edges), [np.array(some) for some in edges.values()]
    usable = moves.usable_windows(unknown)
    needed = len(keys) + 1 + _SPARE_WINDOWS
    if usable.sum() >= needed:
        usable = _without_outliers(moves, usable, edges_s, needed)
    window_count = int(usable.sum())
    dropped_window_count = len(usable) - window_count
    if window_count < needed:
        reason = f"expected at least {needed} windows for {len(keys)} keys and waiting, found {window_count}"
        return NotDetermined(reason, window_count, dropped_window_count)

    (*powers, blocking), joint = _with_errors(moves, usable, edges_s, keys)
    power_w = {key: power for key, power in zip(keys, powers, strict=True) if power is not None}
    return PowerFit(power_w, blocking, joint, window_count, dropped_window_count)


@dataclass(frozen=True, slots=True)
class _Moves:
    """The counter's moves in columns; `own_error_s` and `common_error_s` are half-widths."""

    times_s: Array
    energy_j: Array
    throttled: NDArray[np.bool_]
    own_error_s: Array
    common_error_s: float

    @property
    def error_s(self) -> Array:
        return self.own_error_s + self.common_error_s

    def within(self, begin_s: float, end_s: float) -> "_Moves":
        inside = (begin_s <= self.times_s - self.error_s) & (self.times_s + self.error_s <= end_s)
        return _Moves(
            self.times_s[inside],
            self.energy_j[inside],
            self.throttled[inside],
            self.own_error_s[inside],
            self.common_error_s,
        )

    def error_shifts_s(self) -> list[Array]:
        """Return shifts of one standard deviation, shape (moves,): of each move, of all, of their period."""
        count = len(self.times_s)
        chance = np.random.default_rng(0).uniform(-1.0, 1.0, count)
        return [
            chance * self.own_error_s,
            np.full(count, self.common_error_s / 3**0.5),
            np.linspace(-1.0, 1.0, count) * self.common_error_s / 3**0.5,
        ]

    def usable_windows(self, unknown: Sequence[tuple[float, float]]) -> NDArray[np.bool_]:
        earliest_s, latest_s = (self.times_s - self.error_s)[:-1], (self.times_s + self.error_s)[1:]
        usable = ~self.throttled[1:]
        for lost_s, found_s in unknown:
            usable &= (latest_s <= lost_s) | (found_s <= earliest_s)
        return usable


def _moves(changes: Sequence[CounterChange]) -> _Moves:
    times_s = np.array([change.time_s for change in changes])
    own_error_s = np.array([change.uncertainty_s for change in changes])
    common_error_s = 0.0
    updates = find_update_times(times_s, own_error_s)
    if updates is not None:
        times_s, own_error_s = updates.times_s, np.full(len(changes), updates.jitter_s)
        common_error_s = updates.phase_error_s
    return _Moves(
        times_s,
        np.array([change.energy_j for change in changes]),
        np.array([bool(change.clock_event_reasons & ClockEventReason.THROTTLED) for change in changes], bool),
        own_error_s,
        common_error_s,
    )


def _check_order(spans: Sequence[Span[K]]) -> None:
    previous_end_s = -np.inf
    for span in spans:
        if not previous_end_s <= span.begin_s <= span.end_s:
            raise ValueError(
                f"spans: {span.key}: expected begin_s >= {previous_end_s} and end_s >= begin_s, "
                f"found {span.begin_s} to {span.end_s}"
            )
        previous_end_s = span.end_s


def _without_outliers(
    moves: _Moves, usable: NDArray[np.bool_], edges_s: Sequence[Array], needed: int
) -> NDArray[np.bool_]:
    """Return the usable windows without outliers, which no powers explain, but at least `needed` ones."""
    spent_s = _time_spent_s(moves, 0.0, edges_s)
    for _ in range(_OUTLIER_ROUNDS):
        regression = _Regression(moves, np.flatnonzero(usable))
        misfits_j = regression.misfits_j(spent_s, regression.fit(spent_s)[0])
        limit_j = max(_OUTLIER_MISFIT * np.median(misfits_j), _OUTLIER_SHARE * regression.mean_increment_j)
        outlying = misfits_j > limit_j
        if not outlying.any():
            break
        usable = usable.copy()
        usable[regression.rows[outlying]] = False
        if usable.sum() < needed:
            break
    return usable


def _with_errors(
    moves: _Moves, usable: NDArray[np.bool_], edges_s: Sequence[Array], keys: Sequence[K]
) -> tuple[list[Estimate | None], JointInformation[K]]:
    """Return the power of each key and, last, blocking power; None where it is not determined."""
    regression = _Regression(moves, np.flatnonzero(usable))
    powers_w, errors_w, information = regression.fit(_time_spent_s(moves, 0.0, edges_s))
    elsewhere_w = [
        regression.fit(_time_spent_s(moves, shift_s, edges_s))[0] for shift_s in moves.error_shifts_s()
    ]
    changes_w = np.array(elsewhere_w).T - powers_w[:, None]
    errors_w = np.sqrt(errors_w**2 + np.sum(changes_w**2, axis=1))
    # The covariance grows by the changes' products. Woodbury's formula gives the inverse of the sum from the
    # information, which may have no inverse itself.
    seen = information @ changes_w
    lost = seen @ np.linalg.solve(np.eye(changes_w.shape[1]) + changes_w.T @ seen, seen.T)
    matrix = information - lost
    joint = JointInformation(tuple(keys), matrix, matrix @ powers_w)
    found = [
        Estimate(float(power_w), float(error_w))
        if power_w > 0 and error_w <= _MAX_ERROR_SHARE * regression.mean_power_w
        else None
        for power_w, error_w in zip(powers_w, errors_w, strict=True)
    ]
    return found, joint


class _Regression:
    """Fits powers to the increments of the windows `rows`, given the times spent at all moves."""

    def __init__(self, moves: _Moves, rows: NDArray[np.intp]) -> None:
        self.rows = rows
        self._adjacent = np.diff(rows) == 1
        self._increments_j = np.diff(moves.energy_j)[rows]
        self._own_share = (moves.own_error_s / moves.error_s)[:, None]
        window_s = np.diff(moves.times_s)[rows]
        self.mean_increment_j = float(self._increments_j.mean())
        self.mean_power_w = self.mean_increment_j / float(window_s.mean())
        self._variation_j2 = np.outer((_POWER_VARIATIONS * self.mean_power_w) ** 2, 0.1 * window_s)

    def fit(self, spent_s: Array) -> tuple[Array, Array, Array]:
        """Return powers, one per key and, last, of waiting; their standard errors; and their information."""
        exposures_s = self._exposures_s(spent_s)
        powers_w = np.full(spent_s.shape[-1], self.mean_power_w)
        for _ in range(_REWEIGHTINGS):
            drawn_j = spent_s @ powers_w.clip(0, 10 * self.mean_power_w)
            own_j2 = (self._own_share * drawn_j).var(axis=1) + _COUNTER_RESOLUTION_J**2
            powers_w, errors_w, information = generalised_least_squares(
                exposures_s,
                self._increments_j,
                diagonals=own_j2[self.rows] + own_j2[self.rows + 1] + self._variation_j2,
                off_diagonal=np.where(self._adjacent, -own_j2[self.rows[1:]], 0.0),
            )
        return powers_w, errors_w, information

    def misfits_j(self, spent_s: Array, powers_w: Array) -> Array:
        """Return each window's misfit between its increment and that predicted by the powers."""
        misfits_j: Array = np.abs(self._increments_j - self._exposures_s(spent_s) @ powers_w)
        return misfits_j

    def _exposures_s(self, spent_s: Array) -> Array:
        exposures_s: Array = np.diff(spent_s.mean(axis=1), axis=0)[self.rows]
        return exposures_s


def _time_spent_s(moves: _Moves, shift_s: Array | float, edges_s: Sequence[Array]) -> Array:
    """Return cumulative seconds on each key and, last, waiting, at points across each move's uncertainty.

    `edges_s`: for each key the begins and ends of its spans, shape (spans, 2). The moves are shifted by
    `shift_s`. Shape (moves, uncertainty points, keys + 1).
    """
    times_s = (moves.times_s + shift_s)[:, None] + np.multiply.outer(moves.error_s, _ERROR_POINTS)
    spent_s = np.empty((*times_s.shape, len(edges_s) + 1))
    for column, key_edges_s in enumerate(edges_s):
        done_s = np.concatenate([[0.0], np.cumsum(np.diff(key_edges_s))])
        spent_s[..., column] = np.interp(times_s, key_edges_s.ravel(), np.repeat(done_s, 2)[1:-1])
    spent_s[..., -1] = times_s - moves.times_s[0] - spent_s[..., :-1].sum(axis=-1)
    return spent_s
