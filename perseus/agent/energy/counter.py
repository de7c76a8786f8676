"""The changes of a GPU's energy counter.

The counter moves only every 20–100 ms, so it is polled more often and only its changes are kept: a change
holds the energy *when the counter moved*, which was between two polls.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CounterChange:
    """The counter moved to `energy_j` at `time_s` (CLOCK_MONOTONIC) ± `uncertainty_s`, half a poll interval.

    `clock_event_reasons`: all reasons seen since the previous change; `capped_clock_mhz`: the highest clock
    seen under a throttling reason, 0 without one.
    """

    time_s: float
    energy_j: float
    uncertainty_s: float
    clock_event_reasons: int = 0
    capped_clock_mhz: int = 0


class ChangeDetector:
    """Derives changes from polls."""

    def __init__(self) -> None:
        self._energy_j: float | None = None
        self._unchanged_at_s = 0.0
        self._clock_event_reasons = 0
        self._capped_clock_mhz = 0

    def poll(
        self,
        before_s: float,
        after_s: float,
        energy_j: float,
        clock_event_reasons: int,
        capped_clock_mhz: int = 0,
    ) -> CounterChange | None:
        """Add a reading made between two moments; return the change, if the counter has moved.

        The change contains all clock-event reasons seen since the previous change, and the highest clock seen
        under a throttling reason.
        """
        self._clock_event_reasons |= clock_event_reasons
        self._capped_clock_mhz = max(self._capped_clock_mhz, capped_clock_mhz)
        change = None
        if self._energy_j is not None and energy_j != self._energy_j:
            change = CounterChange(
                time_s=(self._unchanged_at_s + after_s) / 2,
                energy_j=energy_j,
                uncertainty_s=(after_s - self._unchanged_at_s) / 2,
                clock_event_reasons=self._clock_event_reasons,
                capped_clock_mhz=self._capped_clock_mhz,
            )
            self._clock_event_reasons = clock_event_reasons
            self._capped_clock_mhz = capped_clock_mhz
        self._energy_j = energy_j
        self._unchanged_at_s = before_s
        return change
