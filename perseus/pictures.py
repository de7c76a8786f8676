"""Plots: a time-energy frontier, a pipeline's timelines coloured by power, and a fleet over days.

They take plain numbers, so measured and predicted iterations are drawn the same way. matplotlib comes with
the extra `[plot]`; it is imported only here, and only for drawing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import cycle
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

_POWER_COLOURS = "YlOrRd"
_OTHERS_COLOURS = ("tab:orange", "tab:purple", "tab:brown", "tab:cyan")
_DPI = 150


@dataclass(frozen=True, slots=True)
class FrontierPicture:
    """The data of a frontier plot: parallel sequences of seconds and joules, fastest first."""

    iteration_time_s: Sequence[float]
    energy_j: Sequence[float]
    bound_energy_j: Sequence[float]
    t_star_index: int
    baseline_time_s: float
    baseline_energy_j: float
    blocking_power_w: float
    """Of the whole pipeline: the slope of the baseline's waiting line."""
    others: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """Other plans' (iteration time, energy) by name, fastest first. Those slower than all points are drawn
    only if there are no others."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One computation on a timeline."""

    stage: int
    label: str
    start_s: float
    duration_s: float
    power_w: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One iteration of one pipeline. `blocking_power_w` has one value per stage."""

    title: str
    iteration_time_s: float
    bars: Sequence[Bar]
    blocking_power_w: Sequence[float]


@dataclass(frozen=True, slots=True)
class Supply:
    """A feed's power over time, watts. `limit_w` and `power_cap_w` are infinite where there is no limit."""

    name: str
    power_w: Sequence[float]
    limit_w: Sequence[float]
    power_cap_w: Sequence[float]


@dataclass(frozen=True, slots=True)
class FleetPicture:
    """The data of a fleet plot. All sequences are parallel to `times`, the end of each step, in `unit`.

    `speeds` and `signals` are by name, with NaN for missing values. A speed of 1 is the speed at stock.
    """

    title: str
    times: Sequence[float]
    supplies: Sequence[Supply]
    speeds: Mapping[str, Sequence[float]]
    signals: Mapping[str, Sequence[float]]
    unit: str = "h"


@dataclass(frozen=True, slots=True)
class SweepPicture:
    """The data of a sweep's plot: of each figure, in percent of stock, the runs of each setting."""

    title: str
    settings: Sequence[str]
    percents: Mapping[str, Sequence[Sequence[float]]]


def image_format(path: Path) -> str:
    """Return the image format of a path's suffix; PNG if it has none.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the suffix is not an image format.
    """
    known = _figure(1.0, 1.0).canvas.get_supported_filetypes()
    suffix = path.suffix.removeprefix(".").lower() or "png"
    if suffix not in known:
        raise ValueError(f"expected a suffix of {', '.join(sorted(known))}, found {suffix}")
    return suffix


def draw_frontier(picture: FrontierPicture, image_format: str) -> bytes:
    """Return the frontier as an image.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the image format is unknown.
    """
    figure = _figure(9.0, 5.5)
    axes = figure.add_subplot()
    slowest_s = max(picture.iteration_time_s[-1], picture.baseline_time_s)
    waiting_j = picture.baseline_energy_j + picture.blocking_power_w * (slowest_s - picture.baseline_time_s)
    axes.plot(
        [picture.baseline_time_s, slowest_s],
        [picture.baseline_energy_j, waiting_j],
        "--",
        color="0.55",
        label="all at the highest clock, waiting",
    )
    axes.plot(
        picture.baseline_time_s, picture.baseline_energy_j, "s", color="0.3", label="all at the highest clock"
    )
    axes.plot(picture.iteration_time_s, picture.bound_energy_j, color="tab:green", lw=1, label="lower bound")
    axes.plot(picture.iteration_time_s, picture.energy_j, ".-", color="tab:blue", lw=1, ms=3, label="plans")
    for colour, (name, plans) in zip(cycle(_OTHERS_COLOURS), picture.others.items(), strict=False):
        shown = [plan for plan in plans if plan[0] <= slowest_s] or plans[:1]
        style = "^" if len(plans) == 1 else ".:"
        axes.plot(*zip(*shown, strict=True), style, color=colour, lw=1, ms=5, label=name)
    axes.margins(0.08)
    # Labels on different sides: the points may be close to each other, and other plans above the first. On
    # white: plans for another partition of the layers may be faster than T_min.
    marked = [
        ("$T_{min}$", 0, (-8, -4), "right"),
        ("$T^*$", picture.t_star_index, (0, -17), "center"),
        ("$T_{slow}$", len(picture.energy_j) - 1, (0, 8), "center"),
    ]
    for name, index, offset, side in marked:
        where = picture.iteration_time_s[index], picture.energy_j[index]
        axes.plot(*where, "o", color="tab:red", ms=6)
        axes.annotate(
            name,
            where,
            xytext=offset,
            textcoords="offset points",
            fontsize=11,
            ha=side,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
        )
    axes.set_xlabel("iteration time (s)")
    axes.set_ylabel("energy of one pipeline's iteration (J)")
    axes.set_title("Iteration time-energy frontier")
    axes.grid(alpha=0.3)
    axes.legend()
    image = BytesIO()
    figure.savefig(image, format=image_format)
    return image.getvalue()


def draw_timelines(path: Path, timelines: Sequence[Timeline]) -> None:
    """Draw timelines below each other with a common time axis and power scale, into a file.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: `path` can't be written.
        ValueError: the suffix is not an image format.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    powers_w = [bar.power_w for timeline in timelines for bar in timeline.bars]
    scale = Normalize(0.0, max(powers_w, default=1.0))
    stage_count = max(len(timeline.blocking_power_w) for timeline in timelines)
    figure = _figure(13.0, 0.9 + len(timelines) * (1.1 + 0.42 * stage_count))
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for axes, timeline in zip(panels, timelines, strict=True):
        _draw_timeline(axes, timeline, scale)
    panels[-1].set_xlabel("time since the iteration's begin (s)")
    panels[-1].set_xlim(0.0, max(timeline.iteration_time_s for timeline in timelines) * 1.01)
    figure.colorbar(ScalarMappable(scale, _POWER_COLOURS), ax=list(panels), label="power (W)", pad=0.01)
    figure.savefig(path)


def draw_fleet(picture: FleetPicture, image_format: str) -> bytes:
    """Return a fleet over time as an image: each feed's power, the jobs' speeds, and the signals.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the image format is unknown.
    """
    panel_count = len(picture.supplies) + 1 + len(picture.signals)
    figure = _figure(11.0, 1.0 + 2.4 * panel_count)
    panels = figure.subplots(panel_count, 1, sharex=True, squeeze=False)[:, 0]
    for axes, supply in zip(panels, picture.supplies, strict=False):
        _draw_supply(axes, picture.times, supply)
    speeds_axes = panels[len(picture.supplies)]
    for name, speeds in picture.speeds.items():
        percent = [100 * speed for speed in speeds]
        speeds_axes.plot(picture.times, percent, lw=1.2, label=name, drawstyle="steps-pre")
    speeds_axes.set_ylabel("speed (% of stock)")
    speeds_axes.legend(fontsize=8, ncols=3, loc="lower left")
    for axes, (name, values) in zip(
        panels[len(picture.supplies) + 1 :], picture.signals.items(), strict=True
    ):
        axes.plot(picture.times, values, color="tab:green", lw=1, drawstyle="steps-pre")
        axes.set_ylabel(name)
    for axes in panels:
        axes.grid(alpha=0.3)
    panels[0].set_title(picture.title)
    panels[-1].set_xlabel(f"time since the start ({picture.unit})")
    panels[-1].set_xlim(0.0, picture.times[-1])
    image = BytesIO()
    figure.savefig(image, format=image_format)
    return image.getvalue()


def draw_panels(
    title: str,
    times_s: Sequence[float],
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    image_format: str,
) -> bytes:
    """Return series over time as an image: a panel for each label of a vertical axis, a line for each series.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the image format is unknown.
    """
    figure = _figure(11.0, 1.0 + 2.4 * len(panels))
    for axes, (label, lines) in zip(
        figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0], panels.items(), strict=True
    ):
        for name, values in lines.items():
            axes.plot(times_s, values, lw=1.4, label=name, drawstyle="steps-pre")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0.0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="best")
    figure.axes[0].set_title(title)
    figure.axes[-1].set_xlabel("time since the start (s)")
    image = BytesIO()
    figure.savefig(image, format=image_format)
    return image.getvalue()


def draw_sweep(picture: SweepPicture, image_format: str) -> bytes:
    """Return a sweep as an image: a panel for each figure, a line for each setting, a point for each run.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the image format is unknown.
    """
    figure = _figure(5.0 + 3.0 * len(picture.percents), 1.2 + 0.25 * len(picture.settings))
    panels = figure.subplots(1, len(picture.percents), sharey=True, squeeze=False)[0]
    for axes, (name, percents) in zip(panels, picture.percents.items(), strict=True):
        for line, runs in enumerate(percents):
            axes.plot(runs, [line] * len(runs), "o", color="tab:blue", ms=5, alpha=0.5)
        axes.set_xlabel(f"{name} (% of stock)")
        axes.grid(alpha=0.3)
    panels[0].set_yticks(range(len(picture.settings)), picture.settings, fontsize=8)
    panels[0].invert_yaxis()
    figure.suptitle(picture.title)
    image = BytesIO()
    figure.savefig(image, format=image_format)
    return image.getvalue()


def _draw_supply(axes: "Axes", times: Sequence[float], supply: Supply) -> None:
    def kilowatts(values_w: Sequence[float]) -> list[float]:
        return [value_w / 1000 if isfinite(value_w) else float("nan") for value_w in values_w]

    axes.plot(times, kilowatts(supply.power_w), color="tab:blue", lw=1, label="drawn")
    axes.plot(times, kilowatts(supply.power_cap_w), "--", color="tab:orange", lw=1, label="power cap")
    axes.plot(times, kilowatts(supply.limit_w), color="tab:red", lw=1.5, label="limit", drawstyle="steps-pre")
    axes.set_ylabel(f"feed {supply.name} (kW)")
    axes.legend(fontsize=8, loc="lower left")


def _figure(width_in: float, height_in: float) -> "Figure":
    # A bare Figure, not pyplot: it needs no window system and leaves nothing open.
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), dpi=_DPI, layout="constrained")


def _draw_timeline(axes: "Axes", timeline: Timeline, scale: "Normalize") -> None:
    from matplotlib import colormaps

    colours = colormaps[_POWER_COLOURS]
    for stage, waiting_w in enumerate(timeline.blocking_power_w):
        axes.barh(stage, timeline.iteration_time_s, height=0.86, color=colours(scale(waiting_w)), lw=0)
    for bar in timeline.bars:
        axes.barh(
            bar.stage,
            bar.duration_s,
            left=bar.start_s,
            height=0.86,
            color=colours(scale(bar.power_w)),
            edgecolor="black",
            lw=0.5,
        )
        axes.text(
            bar.start_s + bar.duration_s / 2,
            bar.stage,
            bar.label,
            ha="center",
            va="center",
            fontsize=6,
            color="white" if scale(bar.power_w) > 0.6 else "black",
            clip_on=True,
        )
    axes.axvline(timeline.iteration_time_s, color="black", lw=1, ls=":")
    axes.set_yticks(
        range(len(timeline.blocking_power_w)), [f"stage {s}" for s in range(len(timeline.blocking_power_w))]
    )
    axes.invert_yaxis()
    axes.set_title(timeline.title, loc="left", fontsize=10)
