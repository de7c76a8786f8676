"""Time and watts of an engine's steps by clock: a monotone piecewise-linear surface, fitted to measurements.

A step is one forward pass of the whole batch: tokens of prompts (prefill), one token for each request that is
decoding, and the tokens of context that these read. At every clock

    time  = g(tokens in the batch) + a × decoding requests + b × tokens of context
    watts = h(tokens in the batch)

with g and h piecewise linear. Every coefficient is at least 0 and changes with the clock in one direction, so
more work never takes less time, and a higher clock never takes longer or draws less. A non-negative
least-squares fit of relative errors keeps that (Lawson and Hanson 1974, by coordinate descent).

Matrix multiplications compute whole tiles of 64 or 128 rows, so measured times jump where another tile
begins: up to 35 % from one token to the next. The fit measures tokens in whole tiles where that predicts
left-out shapes better.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perseus.serving.errors import ServingError

Floats = NDArray[np.float64]

_SMALL_TILE, _TILE = 64, 128
"""Rows of tensor-core tiles: libraries use the smaller one for batches up to the larger."""
_MAX_KNOTS = 9
"""Clocks and token counts between which the surface is linear: enough for the bend where memory slows down,
few enough that neighbouring measurements average out their noise."""
_CONTEXT_UNIT = 1e5
"""Tokens of context per unit of its column, so that all columns are of similar size."""
_SEPARABLE = 1 / _TILE
"""One decoding request, in the unit of its column."""
_SWEEPS = 1_000
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One kind of step, measured at a clock. `energy_j`: of all the instance's GPUs."""

    clock_mhz: int
    prefill_tokens: float
    decoding_count: float
    context_tokens: float
    time_s: float
    energy_j: float

    @property
    def tokens(self) -> float:
        """Tokens in the batch."""
        return self.prefill_tokens + self.decoding_count


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a profile was measured on. Another model, GPU, parallelism or engine is another profile."""

    model: str
    gpu: str
    tensor_parallel: int
    pipeline_parallel: int
    engine: str
    """Name and version, as in `vllm 0.10.2`."""

    def __str__(self) -> str:
        return f"{self.model}, {self.gpu}, TP {self.tensor_parallel}, PP {self.pipeline_parallel}"


@dataclass(frozen=True, slots=True)
class StepModel:
    """Time and watts of steps at `clocks_mhz`, ascending.

    `time_weights` and `power_weights`: shape (clocks, features). `time_error` and `power_error`: root mean
    square of the relative errors at shapes that were left out of the fit.
    """

    clocks_mhz: tuple[int, ...]
    knots: tuple[float, ...]
    is_tiled: bool
    time_weights: Floats
    power_weights: Floats
    idle_power_w: float
    time_error: float
    power_error: float

    def time_s(
        self, prefill_tokens: ArrayLike, decoding_count: ArrayLike, context_tokens: ArrayLike
    ) -> Floats:
        """Return the time of steps at every clock, shape (…, clocks).

        The arguments broadcast together; their last axis has length 1, or is the clocks', for steps that have
        another shape at each clock.
        """
        features = _features(prefill_tokens, decoding_count, context_tokens, self.knots, self.is_tiled)
        times: Floats = (features * self.time_weights).sum(axis=-1)
        return times

    def power_w(self, prefill_tokens: ArrayLike, decoding_count: ArrayLike) -> Floats:
        """Return the watts during steps at every clock, shape (…, clocks), as in `time_s`."""
        features = _features(prefill_tokens, decoding_count, 0.0, self.knots, self.is_tiled)
        powers: Floats = (features[..., : len(self.knots)] * self.power_weights).sum(axis=-1)
        return powers

    def at_clocks(self, clocks_mhz: Sequence[int]) -> "StepModel":
        """Return the model at other clocks, interpolated; between the lowest and the highest measured one.

        Raises:
            ServingError: there is no clock, or one is outside of the measured range.
        """
        clocks = tuple(sorted(set(clocks_mhz)))
        if not clocks or clocks[0] < self.clocks_mhz[0] or clocks[-1] > self.clocks_mhz[-1]:
            raise ServingError(
                f"clocks: expected some in {self.clocks_mhz[0]} to {self.clocks_mhz[-1]} MHz, found {clocks}"
            )

        def weights(table: Floats, knots: Floats, wanted: Floats) -> Floats:
            return np.stack([np.interp(wanted, knots, column) for column in table.T], axis=1)

        knots, wanted = np.array(self.clocks_mhz, dtype=float), np.array(clocks, dtype=float)
        return replace(
            self,
            clocks_mhz=clocks,
            time_weights=weights(self.time_weights, -1 / knots, -1 / wanted),
            power_weights=weights(self.power_weights, knots, wanted),
        )

    def scaled(self, time: float, power: float) -> "StepModel":
        """Return the model with all times, and all watts while computing, multiplied."""
        return replace(self, time_weights=self.time_weights * time, power_weights=self.power_weights * power)


def fit_step_model(steps: Sequence[MeasuredStep], idle_power_w: float) -> StepModel:
    """Fit a model to measured steps. `idle_power_w`: of all the instance's GPUs, with no request.

    Raises:
        ServingError: a figure is impossible, or there are fewer than two clocks or token counts.
    """
    _check(steps, idle_power_w)
    counts = sorted({step.tokens for step in steps})
    inner = counts[1:-1]
    folds = [set(inner[0::2]), set(inner[1::2])]
    errors = {is_tiled: _errors_left_out(steps, folds, is_tiled) for is_tiled in (False, True)}
    is_tiled = errors[True][0] < errors[False][0]
    fitted = _fit(steps, is_tiled)
    time_error, power_error = errors[is_tiled]
    return replace(fitted, idle_power_w=idle_power_w, time_error=time_error, power_error=power_error)


def _errors_left_out(
    steps: Sequence[MeasuredStep], folds: list[set[float]], is_tiled: bool
) -> tuple[float, float]:
    """Return the root mean square relative errors of time and watts at the folds' token counts."""
    times, powers = [], []
    for fold in folds:
        rest = [step for step in steps if step.tokens not in fold]
        if fold:
            for time, power in relative_errors(_fit(rest, is_tiled), [s for s in steps if s.tokens in fold]):
                times.append(time)
                powers.append(power)
    if not times:
        return 0.0, 0.0
    return float(np.sqrt(np.mean(np.square(times)))), float(np.sqrt(np.mean(np.square(powers))))


def relative_errors(model: StepModel, steps: Sequence[MeasuredStep]) -> list[tuple[float, float]]:
    """Return each step's errors of predicted time and watts, relative to those measured."""
    clocks = np.array([step.clock_mhz for step in steps])
    at_clocks = model.at_clocks([int(clock) for clock in clocks])
    columns = np.searchsorted(at_clocks.clocks_mhz, clocks)
    rows = np.arange(len(steps))
    prefill, decoding, context = (
        np.array(values)[:, None]
        for values in zip(
            *((s.prefill_tokens, s.decoding_count, s.context_tokens) for s in steps), strict=True
        )
    )
    times = at_clocks.time_s(prefill, decoding, context)[rows, columns]
    powers = at_clocks.power_w(prefill, decoding)[rows, columns]
    return [
        (time / step.time_s - 1, power * step.time_s / step.energy_j - 1)
        for time, power, step in zip(times.tolist(), powers.tolist(), steps, strict=True)
    ]


def _fit(steps: Sequence[MeasuredStep], is_tiled: bool) -> StepModel:
    rows = [
        (s.prefill_tokens, s.decoding_count, s.context_tokens, s.clock_mhz, s.time_s, s.energy_j / s.time_s)
        for s in steps
    ]
    prefill, decoding, context, clocks, times, powers = np.array(rows).T
    tokens = prefill + decoding
    knots = _knots(_in_tiles(tokens) if is_tiled else tokens)
    features = _features(prefill, decoding, context, knots, is_tiled)
    if not _is_separable(features):
        features[:, -2] = 0.0
    clock_knots = _knots(clocks)
    # A ramp from one clock knot to the next: its weight is what the coefficient gains there. Times are linear
    # in 1 / clock, as work is, and watts in the clock.
    up = _ramps(clocks, clock_knots, goes_on=False)
    down = _ramps(1 / clocks, tuple(1 / clock for clock in reversed(clock_knots)), goes_on=False)
    gains = _non_negative(down, features, times)
    time_weights = np.cumsum(gains, axis=0)[::-1]
    power_weights = np.cumsum(_non_negative(up, features[:, : len(knots)], powers), axis=0)
    return StepModel(
        tuple(int(clock) for clock in clock_knots),
        knots,
        is_tiled,
        time_weights,
        power_weights,
        0.0,
        0.0,
        0.0,
    )


def _knots(values: Floats) -> tuple[float, ...]:
    found = np.unique(values)
    return tuple(
        found[np.linspace(0, len(found) - 1, min(_MAX_KNOTS, len(found))).round().astype(int)].tolist()
    )


def _is_separable(features: Floats) -> bool:
    """Whether the decoding requests of steps do not follow from their tokens."""
    others, decoding = features[:, :-2], features[:, -2]
    left = decoding - others @ np.linalg.lstsq(others, decoding, rcond=None)[0]
    return bool(np.abs(left).max() > _SEPARABLE)


def _features(
    prefill_tokens: ArrayLike,
    decoding_count: ArrayLike,
    context_tokens: ArrayLike,
    knots: tuple[float, ...],
    is_tiled: bool,
) -> Floats:
    """Return the columns: ramps between knots, tokens, decoding requests, context; shape (…, features)."""
    decoding, context = np.asarray(decoding_count, dtype=float), np.asarray(context_tokens, dtype=float)
    tokens = np.atleast_1d(prefill_tokens + decoding)
    shape = np.broadcast_shapes(tokens.shape, context.shape)
    features = np.empty((*shape, len(knots) + 3))
    features[..., :-3] = _ramps(_in_tiles(tokens) if is_tiled else tokens, knots, goes_on=True)
    features[..., -3] = tokens / _TILE
    features[..., -2] = decoding / _TILE
    features[..., -1] = context / _CONTEXT_UNIT
    return features


def _in_tiles(tokens: Floats) -> Floats:
    tile = np.where(tokens <= _TILE, _SMALL_TILE, _TILE)
    whole: Floats = np.ceil(tokens / tile) * tile
    return whole


def _ramps(values: Floats, knots: tuple[float, ...], goes_on: bool) -> Floats:
    """Return a column of ones, and one per pair of knots that rises from 0 to 1 between them.

    The last one goes on beyond its upper knot, if wanted.
    """
    points = np.array(knots)
    ramps = np.ones((*values.shape, len(knots)))
    ramps[..., 1:] = np.maximum((values[..., None] - points[:-1]) / (points[1:] - points[:-1]), 0.0)
    bounded = ramps[..., 1:-1] if goes_on else ramps[..., 1:]
    np.minimum(bounded, 1.0, out=bounded)
    return ramps


def _non_negative(clock_ramps: Floats, features: Floats, measured: Floats) -> Floats:
    """Return weights ≥ 0, shape (clock ramps, features), with the least squares of relative errors."""
    shape = clock_ramps.shape[1], features.shape[1]
    columns = (clock_ramps[:, :, None] * features[:, None, :]).reshape(len(measured), -1) / measured[:, None]
    gram = columns.T @ columns
    # What hardly varies tells nothing, whatever it is divided by: its weight stays 0.
    diagonal = gram.diagonal()
    diagonal = np.where(diagonal > _TOLERANCE * diagonal.max(), diagonal, np.inf)
    weights = np.zeros(len(gram))
    gradient = -columns.sum(axis=0)
    for _ in range(_SWEEPS):
        largest = 0.0
        for i in range(len(weights)):
            change = max(-weights[i], -gradient[i] / diagonal[i])
            if change:
                weights[i] += change
                gradient += gram[i] * change
                largest = max(largest, change * change * diagonal[i])
        if largest < _TOLERANCE * len(measured):
            break
    return weights.reshape(shape)


def _check(steps: Sequence[MeasuredStep], idle_power_w: float) -> None:
    for step in steps:
        amounts = (step.prefill_tokens, step.decoding_count, step.context_tokens)
        if not all(isfinite(amount) and amount >= 0 for amount in amounts) or step.tokens < 1:
            raise ServingError(f"step: expected at least one token and no negative amount, found {step}")
        if not all(
            isfinite(figure) and figure > 0 for figure in (step.clock_mhz, step.time_s, step.energy_j)
        ):
            raise ServingError(f"step: expected a positive clock, time and energy, found {step}")
    for name, values in (
        ("clocks", {s.clock_mhz for s in steps}),
        ("token counts", {s.tokens for s in steps}),
    ):
        if len(values) < 2:
            raise ServingError(f"profile: expected steps at two {name} or more, found {len(values)}")
    if not isfinite(idle_power_w) or idle_power_w < 0:
        raise ServingError(f"idle power: expected 0 W or more, found {idle_power_w}")
