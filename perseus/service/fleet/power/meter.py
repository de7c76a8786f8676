"""Measured power: moving averages, and the ratio of a job's power to its plans' prediction."""

from collections import deque
from collections.abc import Mapping

MIN_RATIO, MAX_RATIO = 0.5, 2.0
"""Plausible range of measured over planned power; beyond it, something else is wrong."""

RECENT_S = 10.0
"""The time over which power without plans is averaged."""


class MovingAverage:
    """A power's mean over the last `window_s` seconds; each sample covers the time before it."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._samples: deque[tuple[float, float, float]] = deque()
        """The end, duration and mean power of each."""

    def take(self, end_s: float, duration_s: float, power_w: float) -> None:
        """Add a mean power over the time until `end_s`."""
        self._samples.append((end_s, duration_s, power_w))
        while self._samples[0][0] <= end_s - self.window_s:
            self._samples.popleft()

    def clear(self) -> None:
        """Drop all samples."""
        self._samples.clear()

    @property
    def covered_s(self) -> float:
        """The part of the window that samples cover."""
        return min(self.window_s, sum(duration_s for _, duration_s, _ in self._samples))

    def mean_w(self, last_s: float | None = None) -> float:
        """Return the mean over the window, or over its last seconds; 0 without samples."""
        left_s = self.window_s if last_s is None else last_s
        energy_j = covered_s = 0.0
        for _, duration_s, power_w in reversed(self._samples):
            used_s = min(duration_s, left_s - covered_s)
            if used_s <= 0:
                break
            energy_j += used_s * power_w
            covered_s += used_s
        return energy_j / covered_s if covered_s else 0.0


class PredictionError:
    """The standard deviation of a feed's mean power over a window from its prediction, as a share of it.

    It is learned from stretches of a third of a window, which cover an iteration, within which power swings.
    They count as independent: a job's lasting error is in its ratio.

    Attributes:
        deviation: the present estimate. It begins with an assumption, which counts like some stretches, and
            is at most twice that: power that follows no plan is no noise.
    """

    _PRIOR_COUNT, _MAX_COUNT = 3, 60
    _PER_WINDOW = 3

    def __init__(self, deviation: float) -> None:
        self.deviation = deviation
        self._max_deviation = 2 * deviation
        self._count = self._PRIOR_COUNT
        self._covered_s = self._error_j = self._predicted_j = 0.0

    def take(self, duration_s: float, measured_w: float, predicted_w: float, window_s: float) -> None:
        """Add a mean power and its prediction; `window_s`: the window of the deviation."""
        self._covered_s += duration_s
        self._error_j += duration_s * (measured_w - predicted_w)
        self._predicted_j += duration_s * predicted_w
        if self._covered_s < window_s / self._PER_WINDOW or self._predicted_j <= 0:
            return
        self._count = min(self._count + 1, self._MAX_COUNT)
        variance = (self._error_j / self._predicted_j) ** 2 * min(1.0, self._covered_s / window_s)
        mean = self.deviation**2 + (variance - self.deviation**2) / self._count
        self.deviation = min(self._max_deviation, mean**0.5)
        self._covered_s = self._error_j = self._predicted_j = 0.0


class JobMeter:
    """One job's power, and its ratio to the power that its points predict.

    Power swings within an iteration, so the ratio is of means over whole iterations since the last change of
    target has settled, and stays in use while the next one settles. The first ratio is learned quickly; later
    ones need more iterations. The ratios of two plans differ by about a tenth of what their powers do. So
    under a similar plan the ratio before still counts: as much as the time after which noise is as small.
    """

    _FIRST_S, _LATER_S, _WINDOW_S, _COUNTED_S = 5.0, 20.0, 60.0, 300.0
    _FIRST_ITERATIONS, _LATER_ITERATIONS = 1, 3
    _NOISE = 0.02
    """Standard deviation of a second's mean power, as a share."""
    _DIFFERENCE = 0.1
    _LATEST_S = 3.0

    def __init__(self) -> None:
        self.ratio = 1.0
        self._recent: dict[str, MovingAverage] = {}
        self._measured = MovingAverage(self._WINDOW_S)
        self._settled_s = 0.0
        self._is_known = False
        self._before, self._before_s, self._measured_s = self.ratio, 0.0, 0.0
        """The ratio before the present measurement, the time that it counts as, and the time since."""

    def changed(self, now_s: float, settle_s: float, change: float = 1.0) -> None:
        """Note a change of the job's target; its power reflects that only after `settle_s`.

        `change`: of its planned power, as a share.
        """
        self._settled_s = now_s + settle_s
        self._restart()
        self._before_s /= 1 + self._before_s * (self._DIFFERENCE * change / self._NOISE) ** 2

    def take(
        self,
        now_s: float,
        duration_s: float,
        power_w: Mapping[str, float],
        planned_w: float | None,
        iteration_time_s: float,
    ) -> None:
        """Add the power on each feed until now; `planned_w`: the plans' total, None without plans."""
        for feed, drawn_w in power_w.items():
            if feed not in self._recent:
                self._recent[feed] = MovingAverage(RECENT_S)
            self._recent[feed].take(now_s, duration_s, drawn_w)
        if planned_w is None or now_s - duration_s < self._settled_s:
            return
        later_s = max(self._LATER_S, self._LATER_ITERATIONS * iteration_time_s)
        first_s = max(self._FIRST_S, self._FIRST_ITERATIONS * iteration_time_s)
        self._measured.window_s = max(self._WINDOW_S, later_s)
        self._measured.take(now_s, duration_s, sum(power_w.values()))
        covered_s = self._measured.covered_s
        if planned_w <= 0 or covered_s < (later_s if self._is_known else first_s):
            return
        whole_s = covered_s - covered_s % iteration_time_s if iteration_time_s else covered_s
        measured = min(MAX_RATIO, max(MIN_RATIO, self._measured.mean_w(whole_s) / planned_w))
        self.ratio = (self._before_s * self._before + whole_s * measured) / (self._before_s + whole_s)
        self._measured_s, self._is_known = whole_s, True
        if covered_s >= self._measured.window_s:
            self._restart()

    def _restart(self) -> None:
        """Begin a measurement; the ratio so far counts, but at most a few windows, as power drifts."""
        self._measured.clear()
        self._before_s = min(self._COUNTED_S - self._WINDOW_S, self._before_s + self._measured_s)
        self._before, self._measured_s = self.ratio, 0.0

    def predicts(self, begin_s: float) -> bool:
        """Return whether the ratio is known and the job's plans have been in force since a time."""
        return self._is_known and begin_s >= self._settled_s

    def forget_recent(self) -> None:
        """Drop recent power, as it no longer predicts the job's power."""
        self._recent.clear()

    @property
    def is_recent_known(self) -> bool:
        """Whether enough recent samples show its power."""
        return any(mean.covered_s >= self._LATEST_S for mean in self._recent.values())

    def recent_w(self) -> dict[str, float]:
        """Return the recent power on each feed; that of the very last seconds, if it is higher."""
        return {feed: max(mean.mean_w(), mean.mean_w(self._LATEST_S)) for feed, mean in self._recent.items()}
