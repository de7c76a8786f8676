"""Convert device time to host time, from polls of the device's progress.

A position is device time since some event of the device, in nanoseconds. Polls are late: by the polling
interval, and by delays of the polling thread, such as another thread that holds Python's lock. So a poll only
gives an upper bound on the host time at which the device reached the position. The tightest bound counts,
which comes from the least late poll. It ages, because the two clocks drift apart.

Standard library only.
"""

DRIFT = 1e-4
"""Largest relative drift between the clocks: two oscillators of 50 ppm each."""


class DeviceTime:
    """The relation of device time to host time."""

    def __init__(self) -> None:
        # The least late poll: the device's position, and host time minus position.
        self._position_ns: int | None = None
        self._offset_ns = 0

    def note(self, position_ns: int, now_ns: int) -> None:
        """Record that a poll found the device at a position."""
        if self._position_ns is None or now_ns <= self.latest_ns(position_ns):
            self._position_ns, self._offset_ns = position_ns, now_ns - position_ns

    def latest_ns(self, position_ns: int) -> int:
        """Return the latest host time at which the device can have reached a position, after at least one
        poll.

        Positions found by that poll itself, just before its own, are not aged.
        """
        assert self._position_ns is not None
        return position_ns + self._offset_ns + round(DRIFT * max(0, position_ns - self._position_ns))
