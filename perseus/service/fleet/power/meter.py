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


class JobMeter:
    """One job's power, and its ratio to the power that its points predict.

    Power swings within an iteration, so the ratio is of means over whole iterations since the last change of
    target has settled, and stays in use while the next one settles. The first ratio is learned quickly; later
    ones need more iterations, and small changes are ignored as noise.
    """

    _FIRST_S, _LATER_S, _WINDOW_S = 5.0, 20.0, 60.0
    _FIRST_ITERATIONS, _LATER_ITERATIONS = 1, 3
    _NOISE = 0.003
    _LATEST_S = 3.0

    def __init__(self) -> None:
        self.ratio = 1.0
        self._recent: dict[str, MovingAverage] = {}
        self._measured = MovingAverage(self._WINDOW_S)
        self._settled_s = 0.0
        self._is_known = False

    def changed(self, now_s: float, settle_s: float) -> None:
        """Note a change of the job's target; its power reflects that only after `settle_s`."""
        self._settled_s = now_s + settle_s
        self._measured.clear()

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
        ratio = min(MAX_RATIO, max(MIN_RATIO, self._measured.mean_w(whole_s) / planned_w))
        if not self._is_known or abs(ratio - self.ratio) > self._NOISE:
            self.ratio, self._is_known = ratio, True

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
