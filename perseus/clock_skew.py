"""Whether the wall clocks of two hosts agree: one reports its time between two times of the other. Pure."""

MAX_SKEW_S = 1.0
"""Largest skew between two clocks that NTP keeps; the network's share is known."""


def clock_ahead_s(sent_s: float, reported_s: float, received_s: float) -> float:
    """Return how far the clock that was asked is ahead of the asking one, below 0 if it is behind.

    That is as far as the transit, from the request to the response, does not explain it.
    """
    return max(reported_s - received_s, min(0.0, reported_s - sent_s))


class SkewWatch:
    """Notices when a clock begins to differ too much, and when it no longer does.

    Attributes:
        ahead_s: how far it was ahead when it was last compared; None before.
        is_large: whether it differs too much; until it differs by half of that.
    """

    def __init__(self) -> None:
        self.ahead_s: float | None = None
        self.is_large = False

    def take(self, ahead_s: float) -> bool:
        """Take a comparison; return whether `is_large` has changed."""
        self.ahead_s, was_large = ahead_s, self.is_large
        self.is_large = abs(ahead_s) > (MAX_SKEW_S / 2 if was_large else MAX_SKEW_S)
        return self.is_large is not was_large
