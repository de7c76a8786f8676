"""How long failures are borne: what fails for a moment is tried again, ever more rarely. Pure.

A driver that is busy, or another of its clients, makes single calls fail that succeed a moment later. A rank
is given up only when nothing has succeeded for a while.
"""

FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 0.5
BORNE_S = 2.0


class Patience:
    """Failures in a row of one thing that is tried again and again."""

    def __init__(
        self,
        *,
        borne_s: float = BORNE_S,
        first_pause_s: float = FIRST_PAUSE_S,
        longest_pause_s: float = LONGEST_PAUSE_S,
    ) -> None:
        self._borne_s = borne_s
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._pause_s = first_pause_s
        self._failing_since_s: float | None = None
        self._failed_at_s = 0.0

    def succeeded(self) -> None:
        """What failed is forgotten."""
        self._failing_since_s = None
        self._pause_s = self._first_pause_s

    def failed(self, now_s: float) -> float:
        """When to try again. What failed long ago, and was not tried since, is another failure."""
        if now_s - self._failed_at_s > self._borne_s:
            self.succeeded()
        self._failed_at_s = now_s
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        retry_at_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
        return retry_at_s

    def is_over(self, now_s: float) -> bool:
        """Whether it has failed for so long that nothing more is to be hoped for."""
        return self._failing_since_s is not None and now_s - self._failing_since_s >= self._borne_s


class Comeback:
    """When a rank is taken up again whose GPU failed: soon at first, then at least once a minute."""

    def __init__(self, *, first_pause_s: float = 1.0, longest_pause_s: float = 60.0) -> None:
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._pause_s = first_pause_s
        self._served_at_s: float | None = None

    def served(self, now_s: float) -> None:
        """The GPU could be opened."""
        self._served_at_s = now_s

    def failed(self, now_s: float) -> float:
        """It could not, or failed since: when to try again. What went well for long enough is no failure."""
        if self._served_at_s is not None and now_s - self._served_at_s > self._longest_pause_s:
            self._pause_s = self._first_pause_s
        self._served_at_s = None
        retry_at_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
        return retry_at_s
