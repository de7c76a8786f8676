"""Measured watts: means over the last so many seconds, and how far a job is from what its plans promise."""

from collections import deque
from collections.abc import Mapping

MIN_RATIO, MAX_RATIO = 0.5, 2.0
"""Of measured to planned power that is believed; beyond that something else is wrong."""

RECENT_S = 10.0
"""The time over which what is drawn without plans is a mean."""


class MovingAverage:
    """The mean of a power over the last so many seconds; each sample holds for the time before it."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._samples: deque[tuple[float, float, float]] = deque()
        """When each ended, how long it was and its power."""

    def take(self, end_s: float, duration_s: float, power_w: float) -> None:
        """Take a mean power over the time until `end_s`."""
        self._samples.append((end_s, duration_s, power_w))
        while self._samples[0][0] <= end_s - self.window_s:
            self._samples.popleft()

    def clear(self) -> None:
        """What was measured until now counts no more."""
        self._samples.clear()

    @property
    def covered_s(self) -> float:
        """How much of the window is covered."""
        return min(self.window_s, sum(duration_s for _, duration_s, _ in self._samples))

    def mean_w(self, last_s: float | None = None) -> float:
        """Return the mean over the window, or over its last seconds; 0 if nothing was measured."""
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
    """What one job draws, and the ratio of that to what its points say.

    Power swings within an iteration, so the ratio is of means over whole iterations since the last change of
    pace has settled, and goes on being used while the next one settles. The first one is learned quickly;
    later ones are of more, and small differences are noise.
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
        """The job is told another pace, and draws what belongs to it that much later."""
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
        """Take what was drawn on each feed until now; `planned_w`: in all, None for a job without plans."""
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
        """What it drew until now says nothing of what it will draw."""
        self._recent.clear()

    @property
    def is_recent_known(self) -> bool:
        """Whether the last seconds tell what it draws."""
        return any(mean.covered_s >= self._LATEST_S for mean in self._recent.values())

    def recent_w(self) -> dict[str, float]:
        """Return what was drawn on each feed in the last seconds; in the very last ones, if that is more."""
        return {feed: max(mean.mean_w(), mean.mean_w(self._LATEST_S)) for feed, mean in self._recent.items()}
