"""Shrink one computation's noisy measurements: each clock's towards those of its neighbours.

A plan picks the clocks that look best. With noisy measurements these tend to be the ones with favourable
errors, so the plan takes longer, and saves less, than predicted: the winner's curse. The remedy is to replace
each figure by its expectation given all clocks of the computation.

The logarithm of a time or an energy, as a function of the logarithm of the clock, is modelled as a straight
line, plus a smooth deviation (an integrated Wiener process, whose posterior mean is a cubic smoothing
spline), plus an individual deviation of each clock, plus the measurement error, whose size is known:

    y_i = a + b x_i + g(x_i) + u_i + e_i,   e_i ~ N(0, s_i²)

The smoothness of the first deviation and the size of the second are unknown; the result averages over a grid
of both, weighted by the measurements' restricted likelihood. Where errors are small against the clocks'
individual deviations, be it jitter or a cliff, u explains these and the measurements stay as they are; where
errors are large, the line and the smooth deviation dominate. Errors that are smaller than all visible
variation shrink nothing.

Computations that were measured at the same clocks of the same GPUs have much of their curves in common, kinks
too. The common part is estimated from all of them together, and each is shrunk towards it.

See G. Wahba, Spline models for observational data, ch. 1 and 4, and B. Efron, Tweedie's formula and selection
bias (2011), for why expectations are not cursed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perseus.solver.computation import Kind
from perseus.solver.pipeline import ProfileKey
from perseus.solver.profile import Measurement, round_estimate
from perseus.solver.setting import Further, further_of, in_order

FloatArray = NDArray[np.float64]

MIN_CLOCKS = 5
"""Fewer clocks are not shrunk: two determine the line."""

_SMOOTH_SCALES = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Scales of the integrated Wiener process: the slope's change over one unit of the clock's logarithm."""

_OWN_SCALES = (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.04)
"""Standard deviations of the clocks' individual deviations, as shares."""

_FARTHEST = 4.0
"""In standard errors: an expectation further from its measurement means that the model does not fit."""

_TRUSTS = (0.0, 0.5, 1.0)
"""Shares of trust in the differences between stated errors, of which the likeliest is taken."""

_ALIKE = 0.01
"""Squared errors of a smaller relative variance are as good as known: estimated from 200 repetitions."""

_MAX_VARIANCE = 2 / 3
"""The relative variance of an error's square at three degrees of freedom; Student's distribution has no
standard deviation with two."""

_MAX_SHARE = 0.5
"""With a larger standard error than this share, the logarithm is meaningless."""


def shrink(measurements: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """Return one computation's measurements, by rising clock, each replaced by its expectation.

    Their standard errors become those of the expectations. Times and energies are treated separately; either
    stays as it is where a clock's standard error is unknown (0), is more than half of the figure, or where
    there are fewer than `MIN_CLOCKS`.

    Where settings are more than a clock, settings that differ only in the clock form a curve of their own.
    """
    return _joined(
        curve for (curve,) in map(_shrink_alike, ([one] for one in _curves(measurements).values()))
    )


def shrink_profiles(
    profiles: Mapping[ProfileKey, tuple[Measurement, ...]],
) -> dict[ProfileKey, tuple[Measurement, ...]]:
    """Return the profiles with all measurements shrunk, as `shrink` does.

    Computations that were measured at the same clocks inform each other: the common part of their curves
    (such as a GPU that no longer gets faster at its highest clocks) is estimated from all of them first, and
    each is shrunk towards it. FIXED computations are treated alone, as clocks don't affect them.
    """
    curves = {
        (key, further): curve
        for key, measured in profiles.items()
        for further, curve in _curves(measured).items()
    }
    alike: dict[object, list[tuple[ProfileKey, Further]]] = {}
    for (key, further), curve in curves.items():
        clocks_mhz = tuple(sorted(m.clock_mhz for m in curve))
        alike.setdefault(key if key[2] is Kind.FIXED else (clocks_mhz, further), []).append((key, further))
    found = {
        place: shrunk
        for places in alike.values()
        for place, shrunk in zip(places, _shrink_alike([curves[place] for place in places]), strict=True)
    }
    return {
        key: _joined(found[key, further] for further in _curves(measured))
        for key, measured in profiles.items()
    }


def _curves(measurements: Sequence[Measurement]) -> dict[Further, list[Measurement]]:
    """Return the measurements by their further settings."""
    curves: dict[Further, list[Measurement]] = {}
    for m in measurements:
        curves.setdefault(further_of(m.setting), []).append(m)
    return curves


def _joined(curves: Iterable[Sequence[Measurement]]) -> tuple[Measurement, ...]:
    return tuple(sorted(chain.from_iterable(curves), key=lambda m: in_order(m.setting)))


def _shrink_alike(curves: Sequence[Sequence[Measurement]]) -> list[tuple[Measurement, ...]]:
    """Return the measurements of curves over the same clocks, shrunk."""
    measured = [sorted(curve, key=lambda m: m.clock_mhz) for curve in curves]
    x = np.log([m.clock_mhz for m in measured[0]])
    times = _shrink(x, [[(m.time_s, m.time_se_s) for m in curve] for curve in measured])
    energies = _shrink(x, [[(m.energy_j, m.energy_se_j) for m in curve] for curve in measured])
    return [
        tuple(
            replace(
                m,
                time_s=time.value,
                time_se_s=time.error,
                time_common_se_s=time.common_error,
                energy_j=energy.value,
                energy_se_j=energy.error,
            )
            for m, time, energy in zip(curve, *figures, strict=True)
        )
        for curve, *figures in zip(measured, times, energies, strict=True)
    ]


class _Figure(NamedTuple):
    """A time or an energy, its standard error, and the part of that that all curves have in common."""

    value: float
    error: float
    common_error: float = 0.0


def _shrink(x: FloatArray, curves: Sequence[Sequence[tuple[float, float]]]) -> list[list[_Figure]]:
    """Return each clock's figure on each curve."""
    found = [[_Figure(*figure) for figure in curve] for curve in curves]
    values = np.array([[value for value, _ in curve] for curve in curves])
    shares = np.array([[error for _, error in curve] for curve in curves]) / values
    known = np.flatnonzero(((shares > 0) & (shares <= _MAX_SHARE)).all(axis=1))
    if len(x) < MIN_CLOCKS or not len(known):
        return found
    y = np.log(values[known])
    fits = [_expect_alike(x, y, *trusted) for trusted in _trusted(shares[known])]
    expected, errors, common_errors = max(fits, key=lambda fit: fit[0])[1]
    for row, *figures in zip(known.tolist(), np.exp(expected), errors, common_errors, strict=True):
        found[row] = [
            _Figure(round_estimate(value), round_estimate(value * error), round_estimate(value * common))
            for value, error, common in zip(*figures, strict=True)
        ]
    return found


def _trusted(shares: FloatArray) -> Iterator[tuple[FloatArray, float]]:
    """Yield what the measurements' errors may be, by how far the stated ones are trusted; a row per curve.

    Also yield by how much the uncertainty of these errors widens all others.
    """
    squares = shares**2
    means = squares.mean(axis=1, keepdims=True)
    # Of errors that are estimated from r repetitions it is 2 / (r - 1), if all truly are alike.
    scatter = float((squares.var(axis=1, ddof=1) / means[:, 0] ** 2).mean())
    if scatter < _ALIKE:
        yield shares, 1.0
        return
    for trust in _TRUSTS:
        mixed = squares**trust * means ** (1 - trust)
        mixed *= means / mixed.mean(axis=1, keepdims=True)
        # The relative variance of an error's square: 2 / (degrees of freedom) of Student's distribution.
        variance = (1 - trust) * scatter * (trust**2 + 1 / shares.shape[1])
        yield np.sqrt(mixed), 1 / np.sqrt(1 - min(variance, _MAX_VARIANCE))


def _expect_alike(
    x: FloatArray, y: FloatArray, shares: FloatArray, widening: float
) -> tuple[float, FloatArray]:
    """Return the curves' log likelihood; and their expectations and the errors of these, all and common."""
    likelihood, common, common_errors = 0.0, np.zeros(len(x)), np.zeros(len(x))
    if len(y) > 1:
        weights = shares**-2.0
        weighed = (weights * (y - y.mean(axis=1)[:, None])).sum(axis=0) / weights.sum(axis=0)
        likelihood, common, common_errors = _expect(x, weighed, weights.sum(axis=0) ** -0.5)
    rows = []
    for own, own_shares in zip(y, shares, strict=True):
        own_likelihood, means, deviations = _expect(x, own - common, own_shares)
        likelihood += own_likelihood
        farthest = _FARTHEST * own_shares
        errors = np.hypot(deviations, common_errors)
        # No expectation is less certain than the measurement itself.
        narrowing = np.minimum(1.0, own_shares / errors)
        rows.append(
            (
                np.clip(means + common, own - farthest, own + farthest),
                widening * narrowing * errors,
                widening * narrowing * common_errors,
            )
        )
    return likelihood, np.array(rows).swapaxes(0, 1)


def _expect(x: FloatArray, y: FloatArray, errors: FloatArray) -> tuple[float, FloatArray, FloatArray]:
    """Return the log likelihood of a curve, and its values' posterior means and standard deviations.

    x must rise.
    """
    line = np.stack([np.ones_like(x), x - x.mean()], axis=1)
    from_first = x - x[0]
    lower = np.minimum(from_first[:, None], from_first)
    wiener = lower**3 / 3 + np.abs(x[:, None] - x) * lower**2 / 2
    error_variances = errors**2
    smooth, own = np.array(list(product(_SMOOTH_SCALES, _OWN_SCALES))).T[:, :, None, None]
    covariances = smooth**2 * wiener + np.eye(len(x)) * (own**2 + error_variances)
    weights, means, variances = _posteriors(covariances, line, y, error_variances)
    weight = np.exp(weights - weights.max())
    likelihood = float(weights.max() + np.log(weight.sum()))
    weight /= weight.sum()
    expected = weight @ means
    # The variance within the models plus that between them.
    spread = weight @ (variances + (means - expected) ** 2)
    return likelihood, expected, np.sqrt(np.maximum(spread, 0.0))


def _posteriors(
    covariances: FloatArray, line: FloatArray, y: FloatArray, error_variances: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return each model's restricted log likelihood, and mean and variance of the error-free values."""
    # All models in one call each: for a few clocks, call overhead dominates.
    roots = np.linalg.cholesky(covariances)
    inverses = np.linalg.solve(roots, np.eye(len(y))[None])
    white_lines, white_ys = inverses @ line, inverses @ y[:, None]
    grams = white_lines.swapaxes(1, 2) @ white_lines
    rests = white_ys - white_lines @ np.linalg.solve(grams, white_lines.swapaxes(1, 2) @ white_ys)
    diagonals = np.diagonal(roots, axis1=1, axis2=2)
    likelihoods = (
        -np.log(diagonals).sum(axis=1) - np.linalg.slogdet(grams)[1] / 2 - (rests**2).sum(axis=(1, 2)) / 2
    )
    # The measurements minus the errors' part: y - S V⁻¹ (y - line).
    means = y - error_variances * (inverses.swapaxes(1, 2) @ rests)[:, :, 0]
    bases = inverses.swapaxes(1, 2) @ white_lines
    # Only the diagonals are needed.
    precisions = (inverses**2).sum(axis=1) - (
        bases * np.linalg.solve(grams, bases.swapaxes(1, 2)).swapaxes(1, 2)
    ).sum(axis=2)
    return likelihoods, means, error_variances - error_variances**2 * precisions
