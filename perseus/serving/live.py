"""What live measurements change in a profile: its scale, and how much the clock matters.

At one clock only the scale can be learned: whether steps at another clock differ by as much as the profile
says, depends on how far they are bound by memory. Both are one Bayesian linear regression,

    measured / prior at the highest clock = scale + slope × (prior at the clock / prior at the highest - 1)

whose uncertainty grows with the distance from the clocks that were measured.
"""

import numpy as np
from numpy.typing import NDArray

from perseus.serving.model import Floats, StepModel

SCALE_SD, SLOPE_SD = 0.2, 0.2
"""Of the prior: boards, coolers and engine versions make up to a fifth; how much a lower clock slows the two
published profiles differs by 15 to 30 %."""
_FORGETTING = 0.98
"""Per measurement: some fifty count. Contents of batches drift within minutes."""
_BOUNDS = 0.3, 3.0
"""Of scale and slope: beyond, it is no profile of this engine."""
_CONFIDENCE = 1.64
"""Standard deviations of a one-sided bound of 95 %."""


class LiveScale:
    """The regression, for times or for watts. `error`: relative standard deviation of one measurement."""

    def __init__(self, error: float) -> None:
        self._variance = error**2
        self._mean = np.ones(2)
        scale, slope = SCALE_SD**2, SLOPE_SD**2
        # The slope belongs to the scaled profile: it is scale × (how much the clock matters).
        self._prior: NDArray[np.float64] = np.linalg.inv(np.array([[scale, scale], [scale, scale + slope]]))
        self._precision = self._prior.copy()
        self._evidence = self._precision @ self._mean

    def learn(self, measured: float, prior: float, prior_at_highest: float) -> None:
        """Take a measurement into account, at any clock; all three in one unit."""
        row = np.array([1.0, prior / prior_at_highest - 1])
        value = measured / prior_at_highest
        if not _BOUNDS[0] / 2 < value / (1 + row[1]) < _BOUNDS[1] * 2:
            return
        # What is forgotten gives way to the prior, so that a clock never seen again becomes uncertain again.
        self._precision = _FORGETTING * self._precision + (1 - _FORGETTING) * self._prior
        self._evidence = _FORGETTING * self._evidence + (1 - _FORGETTING) * (self._prior @ np.ones(2))
        self._precision += np.outer(row, row) / self._variance
        self._evidence += row * value / self._variance
        self._mean = np.clip(np.linalg.solve(self._precision, self._evidence), *_BOUNDS)

    @property
    def scale(self) -> float:
        """Measured over prior, at the highest clock."""
        return float(self._mean[0])

    def expected(self, prior: Floats) -> Floats:
        """Return what to expect; `prior` of shape (…, clocks), the highest clock last."""
        highest = prior[..., -1:]
        expected: Floats = self._mean[0] * highest + self._mean[1] * (prior - highest)
        return expected

    def upper(self, prior: Floats, model_error: float) -> Floats:
        """Return an upper bound of times, as in `expected`; `model_error`: the profile's at other shapes."""
        relative = prior / prior[..., -1:] - 1
        covariance = np.linalg.inv(self._precision)
        variance = covariance[0, 0] + 2 * covariance[0, 1] * relative + covariance[1, 1] * relative**2
        expected = self.expected(prior)
        deviation = np.sqrt(variance * prior[..., -1:] ** 2 + (model_error * expected) ** 2)
        bound: Floats = np.maximum.accumulate((expected + _CONFIDENCE * deviation)[..., ::-1], axis=-1)[
            ..., ::-1
        ]
        return bound


class LiveModel:
    """A profile's steps with what was learned of time and watts."""

    def __init__(self, steps: StepModel) -> None:
        self.steps = steps
        # A measured interval has no fixed shape: it errs by at least as much as the profile does.
        self.time = LiveScale(max(steps.time_error, 0.03))
        self.power = LiveScale(max(steps.power_error, 0.03))

    def time_s(self, prefill_tokens: Floats, decoding_count: Floats, context_tokens: Floats) -> Floats:
        """Return the expected time of steps at every clock."""
        return self.time.expected(self.steps.time_s(prefill_tokens, decoding_count, context_tokens))

    def power_w(self, prefill_tokens: Floats, decoding_count: Floats) -> Floats:
        """Return the expected watts of steps at every clock."""
        return self.power.expected(self.steps.power_w(prefill_tokens, decoding_count))
