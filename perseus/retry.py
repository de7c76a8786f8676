"""One retry policy: delays that double while attempts fail, by lot where many would come at once. Pure."""

from collections.abc import Callable


class Retry:
    """The failures in a row of one thing that is tried again and again.

    Args:
        first_s: the delay after the first failure; each further one in a row doubles it.
        longest_s: the longest delay.
        jitter: the share of a delay that is drawn by lot, 0 to 1 (full jitter).
        forget_after_s: a failure that comes so long after the one before begins a new row.
        give_up_after_s: a row of failures that lasts so long is over (`is_over`).
        random: yields numbers in [0, 1]; by default delays are what they are at most.

    Attributes:
        failure_count: failures in a row so far.
    """

    def __init__(
        self,
        initial_delay_s: float,
        max_delay_s: float,
        *,
        jitter: float = 0.0,
        forget_after_s: float = float("inf"),
        give_up_after_s: float = float("inf"),
        random: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.failure_count = 0
        self._first_s = initial_delay_s
        self._longest_s = max_delay_s
        self._jitter = jitter
        self._forget_after_s = forget_after_s
        self._give_up_after_s = give_up_after_s
        self._random = random
        self._delay_s = initial_delay_s
        self._failing_since_s = 0.0
        self._failed_at_s = 0.0

    def succeeded(self) -> None:
        """An attempt has succeeded: what failed is forgotten."""
        self.failure_count = 0
        self._delay_s = self._first_s

    def failed(self, now_s: float = 0.0) -> float:
        """Note a failed attempt; return the delay before the next, in seconds."""
        if now_s - self._failed_at_s > self._forget_after_s:
            self.succeeded()
        if not self.failure_count:
            self._failing_since_s = now_s
        self.failure_count += 1
        self._failed_at_s = now_s
        delay_s, self._delay_s = self._delay_s, min(2 * self._delay_s, self._longest_s)
        return delay_s * (1 - self._jitter * (1 - self._random()))

    def is_over(self, now_s: float) -> bool:
        """Whether attempts have failed in a row for so long that nothing more is to be hoped for."""
        return self.failure_count > 0 and now_s - self._failing_since_s >= self._give_up_after_s
