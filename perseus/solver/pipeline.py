"""The problem statement: one pipeline's iteration, all its figures checked."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from perseus.solver.bounds import MAX_CLOCK_MHZ, MAX_POWER_W, MAX_TIME_S
from perseus.solver.computation import Computation, Kind
from perseus.solver.errors import PipelineError, ProfileError
from perseus.solver.profile import Measurement
from perseus.solver.scale import Range, Scale, fitting_scale
from perseus.solver.schedule import Schedule
from perseus.solver.setting import clock_of, name_of

MAX_TOTAL_TIME_S = 4e6
"""Limit on the sum of an iteration's computations and transfers: in picoseconds it fits 63 bits."""

ProfileKey = tuple[int, int, Kind]
"""(stage, chunk, kind): computations that share it share their measurements."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One pipeline's iteration: its computations, their times and their energies.

    Attributes:
        schedule: each stage's order of computations.
        profiles: measurements by (stage, chunk, kind), for every computation that is not FIXED.
        blocking_power_w: per stage, the power of all its GPUs together while they wait, at any clock.
        blocking_powers_w: the same by the clock in MHz that they hold meanwhile, in between linear, if that
            is known. Plans are searched for as if waiting drew ``blocking_power_w`` at every clock, so that
            is the least of them, and bounds stay bounds; what plans cost counts these.
        activation_lags_s: by (sending stage, receiving stage), from the end of a forward to the earliest
            start of the one that needs its activations. Pairs that are not named have no lag.
        gradient_lags_s: the same from backward to backward.
        fixed_times_s: the time of each FIXED computation. It draws blocking power: its effective energy is 0.
        extra_lags_s: by (earlier, later) computation, from the end of the one to the earliest start of the
            other, for dependencies beyond orders, activations and gradients. A waiting stage draws blocking
            power.
        scale: the units in which it is solved.

    Raises:
        ProfileError: a computation has no measurements, or a clock (or setting) is measured twice.
        ScheduleError: an extra lag names a missing computation, or deadlocks the orders.
        PipelineError: a power, lag or fixed time is out of bounds (`perseus.solver.bounds`), or matches
            nothing in the schedule; a power by clock is below that at any clock; or the total time exceeds
            MAX_TOTAL_TIME_S.
    """

    schedule: Schedule
    profiles: Mapping[ProfileKey, tuple[Measurement, ...]]
    blocking_power_w: tuple[float, ...]
    activation_lags_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    gradient_lags_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    fixed_times_s: Mapping[Computation, float] = field(default_factory=dict)
    extra_lags_s: Mapping[tuple[Computation, Computation], float] = field(default_factory=dict)
    blocking_powers_w: tuple[Mapping[int, float], ...] = ()
    scale: Scale = field(init=False, compare=False, repr=False)

    @property
    def stock_blocking_power_w(self) -> tuple[float, ...]:
        """Each stage's blocking power at stock, its highest clock."""
        if not self.blocking_powers_w:
            return self.blocking_power_w
        return tuple(by_clock[max(by_clock)] for by_clock in self.blocking_powers_w)

    def __post_init__(self) -> None:
        stage_count = self.schedule.stage_count
        if len(self.blocking_power_w) != stage_count:
            raise PipelineError(
                f"blocking_power_w: expected one value for each of {stage_count} stages, "
                f"found {len(self.blocking_power_w)}",
                field="blocking_power_w",
                expected=stage_count,
                found=len(self.blocking_power_w),
            )
        for stage, power_w in enumerate(self.blocking_power_w):
            _check_amount(power_w, "blocking_power_w", f"stage {stage}", MAX_POWER_W)
        self._check_blocking_powers()
        for name in ("activation_lags_s", "gradient_lags_s"):
            for (sender, receiver), lag_s in getattr(self, name).items():
                _check_amount(lag_s, name, f"stages {sender} → {receiver}", MAX_TIME_S)
                if not (0 <= sender < stage_count and 0 <= receiver < stage_count):
                    raise PipelineError(
                        f"{name}: expected stages 0 to {stage_count - 1}, found {sender} → {receiver}",
                        field=name,
                        found=f"{sender} → {receiver}",
                    )
        for (earlier, later), lag_s in self.extra_lags_s.items():
            _check_amount(lag_s, "extra_lags_s", f"{earlier} → {later}", MAX_TIME_S)
        if self.extra_lags_s:
            self.schedule.check_dependencies(self.extra_lags_s)
        self._check_fixed_times()
        self._check_profiles()
        object.__setattr__(self, "scale", self._fitting_scale())

    def _check_blocking_powers(self) -> None:
        if len(self.blocking_powers_w) not in (0, len(self.blocking_power_w)):
            raise PipelineError(
                f"blocking_powers_w: expected none, or those of each of {len(self.blocking_power_w)} stages, "
                f"found {len(self.blocking_powers_w)}",
                field="blocking_powers_w",
                found=len(self.blocking_powers_w),
            )
        for stage, by_clock in enumerate(self.blocking_powers_w):
            least_w = self.blocking_power_w[stage]
            if not by_clock:
                raise PipelineError(
                    f"blocking_powers_w, stage {stage}: expected a power at one clock or more, found none",
                    field="blocking_powers_w",
                    stage=stage,
                )
            for clock_mhz, power_w in by_clock.items():
                if not (1 <= clock_mhz <= MAX_CLOCK_MHZ and least_w <= power_w <= MAX_POWER_W):
                    raise PipelineError(
                        f"blocking_powers_w, stage {stage}: expected {least_w:g} to {MAX_POWER_W:g} W "
                        f"at 1 to {MAX_CLOCK_MHZ} MHz, found {power_w:g} W at {clock_mhz} MHz",
                        field="blocking_powers_w",
                        stage=stage,
                        found=power_w,
                    )

    def _check_fixed_times(self) -> None:
        fixed = {computation for computation in self.schedule.computations if computation.kind is Kind.FIXED}
        for computation in sorted(fixed | self.fixed_times_s.keys()):
            if computation not in self.fixed_times_s:
                raise PipelineError(
                    f"fixed_times_s: {computation} has no time",
                    field="fixed_times_s",
                    computation=computation,
                )
            if computation not in fixed:
                raise PipelineError(
                    f"fixed_times_s: {computation} is not a fixed-time computation of the schedule",
                    field="fixed_times_s",
                    computation=computation,
                )
            _check_amount(self.fixed_times_s[computation], "fixed_times_s", str(computation), MAX_TIME_S)

    def _check_profiles(self) -> None:
        for stage, chunk, kind in sorted(
            {(c.stage, c.chunk, c.kind) for c in self.schedule.computations if c.kind is not Kind.FIXED}
        ):
            where = f"stage {stage}, chunk {chunk}, {kind.value}"
            measurements = self.profiles.get((stage, chunk, kind), ())
            if not measurements:
                raise ProfileError(
                    f"{where}: expected at least one measured clock, found none",
                    stage=stage,
                    chunk=chunk,
                    kind=kind.value,
                )
            for setting, count in Counter(m.setting for m in measurements).items():
                if count > 1:
                    each = "clock" if isinstance(setting, int) else "setting"
                    raise ProfileError(
                        f"{where}: expected one measurement per {each}, found {count} at {name_of(setting)}",
                        stage=stage,
                        chunk=chunk,
                        kind=kind.value,
                        clock_mhz=clock_of(setting),
                    )

    def _fitting_scale(self) -> Scale:
        """Return the scale, after a check of the total time."""
        counts = Counter(
            (c.stage, c.chunk, c.kind) for c in self.schedule.computations if c.kind is not Kind.FIXED
        )
        slowest_s = {key: max(m.time_s for m in self.profiles[key]) for key in counts}
        longest_lag_s = max([0.0, *self.activation_lags_s.values(), *self.gradient_lags_s.values()])
        rest_s = math.fsum(
            [
                *self.fixed_times_s.values(),
                *self.extra_lags_s.values(),
                len(self.schedule.dependencies) * longest_lag_s,
            ]
        )
        total_s = rest_s + math.fsum(count * slowest_s[key] for key, count in counts.items())
        if total_s > MAX_TOTAL_TIME_S:
            raise PipelineError(
                f"expected computations and transfers of at most {MAX_TOTAL_TIME_S:g} s together, "
                f"found {total_s:g} s",
                found=total_s,
            )
        # Only measurements that are worth choosing count: adding others changes nothing.
        scaled_s, range_s, range_j, steepest_w, total_j = rest_s, 0.0, 0.0, 0.0, 0.0
        for key, count in counts.items():
            power_w = self.blocking_power_w[key[0]]
            options = [(m.time_s, m.energy_j - power_w * m.time_s) for m in self.profiles[key]]
            fastest_s, highest_j = min(options)
            least_s, lowest_j = min(options, key=lambda option: option[::-1])
            scaled_s += count * least_s
            range_s += count * (least_s - fastest_s)
            range_j += count * (highest_j - lowest_j)
            total_j += count * max(abs(highest_j), abs(lowest_j))
            steepest_w += count * max(
                (highest_j - effective_j) / (time_s - fastest_s) if time_s > fastest_s else 0.0
                for time_s, effective_j in options
            )
        return fitting_scale(scaled_s, Range(range_s, range_j, steepest_w, total_j, counts.total()))


def _check_amount(value: float, name: str, where: str, maximum: float) -> None:
    if not 0 <= value <= maximum:
        raise PipelineError(
            f"{name}, {where}: expected a finite number from 0 to {maximum:g}, found {value}",
            field=name,
            where=where,
            found=value,
        )
