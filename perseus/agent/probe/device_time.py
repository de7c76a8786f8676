"""The host's time of what a device did, from looks that found how far it had come.

A position is a device's own time since some event of it, in nanoseconds. Looks come late: by the time to the
next one, and by whatever else keeps the looking thread from running, as another one that holds Python's lock.
So a look says only by when the device had been where it was found. Of all that looks say the earliest counts,
which is that of the least late one. It ages, as the two clocks run apart.

Standard library only.
"""

DRIFT = 1e-4
"""How much faster one of the clocks may run: two oscillators of 50 ppm each."""


class DeviceTime:
    """How a device's time and the host's go together."""

    def __init__(self) -> None:
        # The least late look: where the device was, and the host's time less that.
        self._position_ns: int | None = None
        self._offset_ns = 0

    def note(self, position_ns: int, now_ns: int) -> None:
        """The device was found to have got to a position."""
        if self._position_ns is None or now_ns <= self.latest_ns(position_ns):
            self._position_ns, self._offset_ns = position_ns, now_ns - position_ns

    def latest_ns(self, position_ns: int) -> int:
        """The latest time at which the device can have got to a position. There has been a look before.

        What was found by that look itself, a moment before its position, is not aged.
        """
        assert self._position_ns is not None
        return position_ns + self._offset_ns + round(DRIFT * max(0, position_ns - self._position_ns))
