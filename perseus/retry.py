"""The retry policy: delays that double while attempts fail, with jitter where many clients retry. Pure."""

from collections.abc import Callable


class Retry:
    """Consecutive failures of one operation that is retried.

    Args:
        initial_delay_s: the delay after the first failure; each further consecutive one doubles it.
        max_delay_s: the longest delay.
        jitter: the random share of a delay, 0 to 1 (full jitter).
        forget_after_s: a failure this long after the previous one begins a new series.
        give_up_after_s: a series of failures that lasts this long is over (`is_over`).
        random: returns numbers in [0, 1]; by default delays have no jitter.

    Attributes:
        failure_count: consecutive failures so far.
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
        """Note a success, which ends the series of failures."""
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
        """Whether attempts have failed for so long that further ones are useless."""
        return self.failure_count > 0 and now_s - self._failing_since_s >= self._give_up_after_s
