"""When a source is asked next: after its period; where it fails, sooner at first, then ever later. Pure."""

FIRST_S = 5.0
LONGEST_S = 900.0


class Backoff:
    """Of one source. `period_s`: between two looks while it works."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self.failure_count = 0
        """Since it worked last."""

    def worked(self) -> float:
        """Take note that it works; return when to ask next, seconds from now."""
        self.failure_count = 0
        return self._period_s

    def failed(self, retry_after_s: float, drawn: float) -> float:
        """Take note that it fails; return when to ask next, seconds from now.

        Args:
            retry_after_s: how long it asks to be left alone.
            drawn: from 0 to 1, by lot: half of the time is, so that many do not come at once.
        """
        self.failure_count += 1
        if self._period_s < FIRST_S:  # a file, say: looking at it costs nothing
            return max(retry_after_s, self._period_s)
        wait_s = min(LONGEST_S, FIRST_S * 2.0 ** min(self.failure_count - 1, 10))
        return max(retry_after_s, wait_s * (0.5 + 0.5 * drawn))
