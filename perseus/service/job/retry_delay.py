"""Growing delays between tries of something that a passing disturbance may have prevented. Pure."""

INITIAL_DELAY_S = 1800.0
MAX_DELAY_S = 6 * 3600.0


class RetryDelay:
    """After each failure the wait doubles, from `INITIAL_DELAY_S` up to `MAX_DELAY_S`.

    Attributes:
        failure_count: the number of failures so far.
        until_s: the end of the current wait; None without one.
    """

    def __init__(self) -> None:
        self.failure_count = 0
        self.until_s: float | None = None

    def begin(self, now_s: float) -> float:
        """Take a failure; return how long to wait from now on."""
        delay_s = min(INITIAL_DELAY_S * 2.0 ** min(self.failure_count, 8), MAX_DELAY_S)
        self.failure_count += 1
        self.until_s = now_s + delay_s
        return delay_s

    def is_over(self, now_s: float) -> bool:
        """Return True once when the wait has ended."""
        if self.until_s is None or now_s < self.until_s:
            return False
        self.until_s = None
        return True
