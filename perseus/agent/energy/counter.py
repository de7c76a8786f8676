"""The changes of a GPU's energy counter.

The counter moves only every 20–100 ms, so it is polled more often and only its changes are kept: a change
holds the energy *when the counter moved*, which was between two polls.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CounterChange:
    """The counter moved to `energy_j` at `time_s` (CLOCK_MONOTONIC) ± `uncertainty_s`, half a poll interval.

    `clock_event_reasons`: all reasons seen since the previous change; `capped_clock_mhz`: the highest clock
    seen under a throttling reason, 0 without one. `sm_clock_mhz`: the clock after the change, read by
    `read_at_s`; 0 if it was not read, or the GPU was idle.
    """

    time_s: float
    energy_j: float
    uncertainty_s: float
    clock_event_reasons: int = 0
    capped_clock_mhz: int = 0
    sm_clock_mhz: int = 0
    read_at_s: float = 0.0


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


@dataclass(frozen=True, slots=True)
class PowerSample:
    """A GPU's energy counter and its power reading at nearly the same time (s)."""

    time_s: float
    energy_j: float
    power_w: float


_MIN_SAMPLES = 20
_TOLERANCE_RATIO, _TOLERANCE_W = 0.25, 25.0


def disagreement(samples: Sequence[PowerSample]) -> str:
    """Say how far a counter's power is from the mean of the power readings; empty if they agree.

    Samples are at random times over a second or more, since regular ones may always meet the same part of a
    training's iterations. The tolerance is wide: readings may be averages of a second, counters lag, and the
    mean of few readings is not exact.
    """
    if len(samples) < _MIN_SAMPLES:
        return ""
    first, last = samples[0], samples[-1]
    counter_w = (last.energy_j - first.energy_j) / (last.time_s - first.time_s)
    powers_w = [sample.power_w for sample in samples]
    power_w = statistics.fmean(powers_w)
    error_w = 4 * statistics.stdev(powers_w) / math.sqrt(len(powers_w))
    if abs(counter_w - power_w) <= max(_TOLERANCE_W, _TOLERANCE_RATIO * power_w) + error_w:
        return ""
    cause = (
        "it counts more than the GPU, as on Grace superchips (the module with CPU and memory), and so do the "
        "energies that Perseus shows"
        if counter_w > power_w
        else "it does not count all of the GPU's energy"
    )
    return (
        f"energy counter: expected the GPU's {power_w:.0f} W of its power readings, "
        f"found {counter_w:.0f} W: {cause}"
    )
