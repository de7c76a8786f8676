"""Profiles: a computation's time and energy at each setting, and the curve that the solver plans on.

Everything is measured; nothing is fitted to a family of curves. The solver plans on *effective* energy,
energy minus blocking power × time: the cost of a computation beyond the waiting that it replaces.

Options and hulls are scaled (:mod:`perseus.solver.scale`). Their times are whole picoseconds and their slopes
whole microwatts, so that igraph's sums in doubles are exact.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from perseus.solver.bounds import MAX_CLOCK_MHZ, MAX_ENERGY_J, MAX_TIME_S, MIN_ENERGY_J, MIN_TIME_S
from perseus.solver.errors import ProfileError
from perseus.solver.scale import PS_PER_SCALED_S, UW_PER_W, Scale
from perseus.solver.setting import Further, Setting, check_further, clock_of, further_of

_MAX = {
    "clock_mhz": MAX_CLOCK_MHZ,
    "time_s": MAX_TIME_S,
    "energy_j": MAX_ENERGY_J,
    "time_se_s": MAX_TIME_S,
    "energy_se_j": MAX_ENERGY_J,
    "time_common_se_s": MAX_TIME_S,
}

_ROUNDED = 1 + 1e-6
"""Estimates are rounded to nine digits (`round_estimate`)."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Time and energy of one computation at one clock.

    ``energy_j`` is that of the whole stage (the sum over its GPUs), ``time_s`` the largest over its ranks.
    The standard errors are those of the same two figures; 0 means unknown. ``interpolated`` marks a clock
    that was not measured itself (see :mod:`perseus.solver.measurements`). ``time_common_se_s`` is the part of
    ``time_se_s`` that is the same error in all computations of the pipeline (the root of its share in the
    square, so at most all of it), 0 for what was measured by itself.

    Raises:
        ProfileError: a figure is not finite, not positive (standard errors: negative), or out of bounds
            (`perseus.solver.bounds`).
    """

    clock_mhz: int
    time_s: float
    energy_j: float
    time_se_s: float = 0.0
    energy_se_j: float = 0.0
    interpolated: bool = False
    time_common_se_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("clock_mhz", "time_s", "energy_j"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ProfileError(
                    f"{name}: expected a positive, finite number, found {value}", field=name, found=value
                )
        for name in ("time_se_s", "energy_se_j", "time_common_se_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ProfileError(
                    f"{name}: expected a finite number of 0 or more, found {value}", field=name, found=value
                )
        for name, maximum in _MAX.items():
            value = getattr(self, name)
            if value > maximum:
                raise ProfileError(
                    f"{name}: expected at most {maximum:g}, found {value:g}", field=name, found=value
                )
        if self.time_common_se_s > _ROUNDED * self.time_se_s:
            raise ProfileError(
                f"time_common_se_s: expected at most time_se_s, {self.time_se_s:g}, "
                f"found {self.time_common_se_s:g}",
                field="time_common_se_s",
                found=self.time_common_se_s,
            )
        if self.energy_j < MIN_ENERGY_J:
            raise ProfileError(
                f"energy_j: expected at least {MIN_ENERGY_J:g}, found {self.energy_j}",
                field="energy_j",
                found=self.energy_j,
            )
        if self.time_s < MIN_TIME_S:
            raise ProfileError(
                f"time_s: expected at least {MIN_TIME_S:g}, found {self.time_s}",
                field="time_s",
                found=self.time_s,
            )

    @property
    def setting(self) -> int | Setting:
        """The setting, which identifies the measurement among those of its computation: the clock in MHz."""
        return self.clock_mhz


@dataclass(frozen=True, slots=True)
class MeasuredSetting(Measurement):
    """Time and energy of one computation at a clock and further settings: offline only.

    Several may share a clock. It is a separate type, so that a running job's measurements, which are sent and
    stored, don't carry these fields.

    Raises:
        ProfileError: as in `Measurement`, or a further setting is invalid (`perseus.solver.setting`).
    """

    further: Further = field(kw_only=True)

    def __post_init__(self) -> None:
        Measurement.__post_init__(self)  # a dataclass with slots is not the class that super() looks for
        check_further(self.further)

    @property
    def setting(self) -> int | Setting:
        """The clock and the further settings."""
        return Setting(self.clock_mhz, self.further)


def round_estimate(value: float) -> float:
    """Return a figure that linear algebra has estimated, rounded to nine digits.

    Its last digits depend on the order in which a processor's BLAS kernels add. They must decide nothing,
    such as whether a plan takes exactly its target time or a picosecond less.
    """
    return float(f"{value:.8e}")


def refuse_further(measurements: Iterable[Measurement], where: str) -> None:
    """Refuse settings of more than a clock, for operations that only clocks allow.

    Raises:
        ProfileError: there are some. ``where`` names the reason in the message.
    """
    for m in measurements:
        if isinstance(m, MeasuredSetting):
            names = ", ".join(name for name, _ in m.further)
            raise ProfileError(
                f"expected clocks alone {where}, found the further settings {names}", found=names
            )


def highest(measurements: Iterable[Measurement]) -> Measurement:
    """Return the measurement at the highest clock, at which a computation runs without Perseus.

    Of several settings with that clock, take the fastest, and of equally fast ones the cheapest: savings
    against it are rather understated.
    """
    return max(measurements, key=lambda m: (m.clock_mhz, -m.time_s, -m.energy_j))


@dataclass(frozen=True, slots=True)
class Option:
    """A measured setting that is worth choosing: no other is both as fast and as cheap."""

    setting: int | Setting
    time_ps: int
    energy_j: float
    effective_energy_j: float

    @property
    def clock_mhz(self) -> int:
        """The setting's clock."""
        return clock_of(self.setting)


def pareto_options(
    measurements: Iterable[Measurement], blocking_power_w: float, scale: Scale
) -> tuple[Option, ...]:
    """Return the settings not beaten in both time and effective energy, fastest first, in scaled units.

    Times rise and effective energies fall strictly along the result. Of equal settings the one with the
    higher clock is kept.
    """
    candidates = sorted(
        (
            Option(
                m.setting,
                max(1, scale.to_ps(m.time_s)),
                m.energy_j * scale.energy,
                scale.in_units_j(m.energy_j - blocking_power_w * m.time_s) * scale.energy,
            )
            for m in measurements
        ),
        key=lambda option: (
            option.time_ps,
            option.effective_energy_j,
            -option.clock_mhz,
            further_of(option.setting),
        ),
    )
    kept: list[Option] = []
    for option in candidates:
        if not kept or option.effective_energy_j < kept[-1].effective_energy_j:
            kept.append(option)
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class Hull:
    """Convex, piecewise-linear effective energy over duration, flat beyond the last vertex.

    ``times_ps``: the n vertices, rising. ``slopes_uw``: the n − 1 positive slopes between them (the cost of
    one second less), strictly falling. ``slowest_effective_energy_j``: the value at and beyond the last
    vertex.
    """

    times_ps: tuple[int, ...]
    slopes_uw: tuple[int, ...]
    slowest_effective_energy_j: float


def convex_hull(options: Sequence[Option], steepest_uw: float = math.inf) -> Hull:
    """Return the lower convex hull of Pareto options.

    Slopes are rounded down to whole microwatts, and steeper ones are limited to ``steepest_uw``, which keeps
    the hull convex and below every option.
    """
    vertices: list[Option] = []
    for option in options:
        while len(vertices) >= 2 and _saving_w(vertices[-1], option) >= _saving_w(vertices[-2], vertices[-1]):
            vertices.pop()
        vertices.append(option)
    times_ps = [vertices[0].time_ps]
    slopes_uw: list[int] = []
    for fast, slow in pairwise(vertices):
        slope_uw = int(min(_saving_w(fast, slow) * UW_PER_W, steepest_uw))
        if slope_uw == 0:
            break  # Savings below a microwatt round to 0: the curve is flat from here.
        if slopes_uw and slope_uw == slopes_uw[-1]:
            times_ps.pop()
        else:
            slopes_uw.append(slope_uw)
        times_ps.append(slow.time_ps)
    return Hull(tuple(times_ps), tuple(slopes_uw), vertices[-1].effective_energy_j)


def _saving_w(fast: Option, slow: Option) -> float:
    """Effective energy saved per second of slowing down from one option to the other."""
    saved_j = fast.effective_energy_j - slow.effective_energy_j
    return saved_j / (slow.time_ps - fast.time_ps) * PS_PER_SCALED_S
