"""Two hours of requests, replayed under a controller of clocks and beside it; and what goes wrong meanwhile.

`python -m benchmarks.serving` also draws `docs/images/serving-*.png`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import Cell, Column, Table, main, timed
from benchmarks.serving_data import HOUR_S, HOURS, QWEN_14B, QWEN_32B_STAGE, measured_steps, requests
from perseus.serving.controller import Controller
from perseus.serving.engine import Engine, Request, StepTable
from perseus.serving.model import StepModel, fit_step_model
from perseus.serving.replay import (
    Controlled,
    Disturbance,
    FixedClock,
    Foreseen,
    LowestClock,
    Policy,
    ReplayResult,
    replay,
)
from perseus.serving.stats import EngineLimits, LatencyObjective, Objectives

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
_OBJECTIVES = Objectives(LatencyObjective.parse("p99 <= 2 s"), LatencyObjective.parse("p95 <= 100 ms"))
_STRICTER = Objectives(_OBJECTIVES.ttft, LatencyObjective.parse("p99 <= 100 ms"))
_LIMITS = EngineLimits(max_batched_tokens=512, kv_capacity_tokens=220_000)
"""As measured batches end; and what 80 GB leave beside the weights, at 196,608 bytes a token."""
_IDLE_POWER_W = 60.0
_CLOCKS_MHZ = tuple(range(510, 1411, 60))
_LOADS = (0.30, 0.60, 0.85)
_DRAWN_LOADS = (0.60, 0.85)
_NOISE = 0.02
"""Of a step's time; relative standard deviation."""
_KNOWN_TOKENS = {1, 32, 64, 128, 256, 512}
_KNOWN_CLOCKS_MHZ = {510, 690, 870, 990, 1110, 1260, 1410}
_QUICK_S = 0.05
"""Between two choices of a policy that chooses at each request, in a fork of the engine."""
_MIN_ATTAINMENT = 0.99


class _Site:
    """The engine as measured, and the profile that the controller has of it."""

    def __init__(self) -> None:
        steps = measured_steps(QWEN_14B)
        self.table = StepTable(fit_step_model(steps, _IDLE_POWER_W).at_clocks(_CLOCKS_MHZ), _LIMITS)
        known = [s for s in steps if s.tokens in _KNOWN_TOKENS and s.clock_mhz in _KNOWN_CLOCKS_MHZ]
        self.known_share = len(known) / len(steps)
        self.profile = fit_step_model(known, _IDLE_POWER_W).at_clocks(_CLOCKS_MHZ)
        self._noise = np.random.default_rng(0).lognormal(0, _NOISE, 4093).tolist()

    def run(
        self,
        load: Sequence[Request],
        policy: Policy,
        end_s: float = HOUR_S,
        disturbance: Disturbance | None = None,
    ) -> ReplayResult:
        engine = Engine(self.table, _LIMITS, load, self._noise)
        interval_s = {"interval_s": _QUICK_S} if isinstance(policy, LowestClock) else {}
        return replay(engine, policy, _OBJECTIVES, end_s, disturbance, **interval_s)

    def controlled(
        self,
        objectives: Objectives = _OBJECTIVES,
        profile: StepModel | None = None,
        refused_s: tuple[float, float] = (0.0, 0.0),
    ) -> Controlled:
        steps = profile or self.profile
        return Controlled(lambda now_s: Controller(steps, _LIMITS, objectives, now_s), refused_s)

    def capacity(self, hour: str) -> float:
        """Return the largest factor on the hour's rate, within 3 %, at which stock attains both at 99 %."""
        low, high = 0.01, inf
        while high / low > 1.03:
            middle = min(4 * low, (low * high) ** 0.5)
            result = self.run(requests(hour, middle), FixedClock(None))
            attained = min(result.ttft_attainment, result.itl_attainment)
            low, high = (middle, high) if attained >= _MIN_ATTAINMENT else (low, middle)
        return low

    def best_fixed(self, load: Sequence[Request]) -> tuple[int, ReplayResult]:
        """Return the clock of least energy for the whole hour among those that keep the objectives."""
        best: tuple[int, ReplayResult] | None = None
        for column in reversed(range(len(_CLOCKS_MHZ))):
            result = self.run(load, FixedClock(column))
            # Latencies only grow as the clock falls, and energy has one minimum.
            if best and (not _is_kept(result) or result.energy_j > 1.01 * best[1].energy_j):
                break
            if best is None or result.energy_j < best[1].energy_j:
                best = _CLOCKS_MHZ[column], result
        assert best is not None
        return best


def _is_kept(result: ReplayResult) -> bool:
    return (
        result.ttft_attainment >= 1 - _OBJECTIVES.ttft.allowed_share
        and result.itl_attainment >= 1 - _OBJECTIVES.itl.allowed_share
    )


def run() -> Sequence[Table]:
    site = _Site()
    energies: list[tuple[Cell, ...]] = []
    attainments: list[tuple[Cell, ...]] = []
    capacity = {hour: site.capacity(hour) for hour in HOURS}
    for hour in HOURS:
        for load in _LOADS:
            arrivals = requests(hour, load * capacity[hour])
            with timed() as without:
                stock = site.run(arrivals, FixedClock(None))
            clock_mhz, fixed = site.best_fixed(arrivals)
            with timed() as controlled:
                ours = site.run(arrivals, site.controlled())
            stricter = site.run(arrivals, site.controlled(_STRICTER))
            foreseen = site.run(arrivals, Foreseen(_OBJECTIVES))
            lowest = site.run(arrivals, LowestClock(site.profile, _LIMITS, _OBJECTIVES))
            saved = [
                100 * (1 - each.energy_j / stock.energy_j)
                for each in (fixed, ours, foreseen, lowest, stricter)
            ]
            name = (hour, f"{load:.0%}")
            energies.append(
                (
                    *name,
                    len(arrivals),
                    100 * stock.busy_share,
                    stock.joules_per_token,
                    ours.joules_per_token,
                    saved[1],
                    saved[4],
                    saved[0],
                    str(clock_mhz),
                    saved[2],
                    100 * (ours.energy_j / foreseen.energy_j - 1),
                    saved[3],
                    len(ours.clocks),
                    100 * (controlled.seconds - without.seconds) / HOUR_S,
                )
            )
            of = (stock, ours, stricter, fixed, foreseen, lowest)
            attainments.append(
                (
                    *name,
                    *(100 * each.ttft_attainment for each in of),
                    *(100 * each.itl_attainment for each in of),
                )
            )
            if hour == "conversations" and load in _DRAWN_LOADS:
                _draw_hour(stock, ours, load, IMAGES / f"serving-hour-{load:.0%}.png".replace("%", ""))
    disturbed, picture = _disturbances(site, capacity["conversations"])
    _draw_disturbances(picture, IMAGES / "serving-disturbances.png")
    rates = ", ".join(f"{hour} {factor:.3g} × its rate" for hour, factor in capacity.items())
    return [
        Table(
            f"Energy, {QWEN_14B}, objectives TTFT p99 ≤ 2 s and ITL p95 ≤ 100 ms",
            (
                Column("hour"),
                Column("load"),
                Column("requests", ",d"),
                Column("busy at stock, %", ".0f"),
                Column("stock, J/token", ".2f"),
                Column("controller, J/token", ".2f"),
                Column("controller: less, %", ".1f"),
                Column("with ITL p99: less, %", ".1f"),
                Column("best fixed clock: less, %", ".1f"),
                Column("it is, MHz"),
                Column("forecast: less, %", ".1f"),
                Column("controller above it, %", ".1f"),
                Column("lowest clock: less, %", ".1f"),
                Column("changes of the clock", ",d"),
                Column("controller, % of a core", ".2f"),
            ),
            tuple(energies),
            "Less: energy than stock, idle times included, for the same requests. With ITL p99: the same "
            "with ITL p99 ≤ 100 ms. Load: of the largest rate at which stock attains both limits for 99 % "
            f"({rates}; requests dropped or repeated at random, "
            "repeated ones up to 30 s apart). Best fixed clock: of least energy for the hour in hindsight "
            "among those that keep both objectives. Forecast: each minute the best clock for its requests, "
            "all known. Lowest clock: throttLL'eM's rule, every 50 ms on the controller's profile. The "
            f"engine's steps follow the measured ones with {_NOISE:.0%} noise; the controller knows "
            f"{site.known_share:.0%} of these. Idle power is not in the published data: {_IDLE_POWER_W:.0f} "
            "W at every clock are assumed.",
        ),
        Table(
            "Attainment, %",
            (
                Column("hour"),
                Column("load"),
                *(
                    Column(f"{of}: {policy}", ".2f")
                    for of in ("TTFT", "ITL")
                    for policy in ("stock", "controller", "with ITL p99", "best fixed", "forecast", "lowest")
                ),
            ),
            tuple(attainments),
            "Requests whose first token came within 2 s (the objective asks for 99 %), and further tokens "
            "within 100 ms of the one before (95 %).",
        ),
        disturbed,
    ]


# ---------------------------------------------------------------------- disturbances

_BEGIN_S, _END_S = 600.0, 1200.0
_DISTURBED_S = 120.0


@dataclass(frozen=True)
class _Case:
    name: str
    load: Sequence[Request]
    end_s: float = _END_S
    disturbance: Disturbance | None = None
    refused_s: tuple[float, float] = (0.0, 0.0)
    profile: StepModel | None = None
    """Of the controller, if it is a wrong one."""


def _cases(site: _Site, capacity: float) -> Iterator[_Case]:
    half = requests("conversations", 0.5 * capacity, _END_S)
    low = requests("conversations", 0.28 * capacity, _END_S)
    high = requests("conversations", 0.84 * capacity, _END_S)
    during = _BEGIN_S, _BEGIN_S + _DISTURBED_S
    step = [r for r in low if r.arrival_s < _BEGIN_S] + [r for r in high if r.arrival_s >= _BEGIN_S]
    burst = [Request(_BEGIN_S + i / 40, 450, 100) for i in range(40)]
    later = [Request(r.arrival_s + HOUR_S, r.prompt_tokens, r.generated_tokens) for r in half]
    idle = [r for r in half if r.arrival_s < _BEGIN_S] + [
        r for r in later if r.arrival_s >= _BEGIN_S + HOUR_S
    ]
    yield _Case("none", half)
    yield _Case("load × 3 within a second", step)
    yield _Case("40 requests within a second", sorted([*half, *burst], key=lambda r: r.arrival_s))
    yield _Case("an idle hour", idle, _END_S + HOUR_S)
    yield _Case("engine away for a minute", half, disturbance=Disturbance(engine_away_s=(600.0, 660.0)))
    yield _Case("no statistics for 2 minutes", half, disturbance=Disturbance(no_stats_s=during))
    yield _Case("agent killed, back after 2 minutes", half, disturbance=Disturbance(no_agent_s=during))
    yield _Case("load × 3, clocks refused meanwhile", step, refused_s=during)
    for time in (0.8, 1.2):
        for power in (0.8, 1.2):
            profile = site.profile.scaled(time, power)
            yield _Case(f"profile's times × {time}, watts × {power}", half, profile=profile)
    other = fit_step_model(measured_steps(QWEN_32B_STAGE), _IDLE_POWER_W).at_clocks(_CLOCKS_MHZ)
    yield _Case("profile of another model and GPU", half, profile=other)


def _disturbances(site: _Site, capacity: float) -> tuple[Table, list[tuple[str, ReplayResult, ReplayResult]]]:
    rows: list[tuple[Cell, ...]] = []
    pictures = []
    for case in _cases(site, capacity):
        policy = site.controlled(_OBJECTIVES, case.profile, case.refused_s)
        strict = site.controlled(_STRICTER, case.profile, case.refused_s)
        stock = site.run(case.load, FixedClock(None), case.end_s, case.disturbance)
        ours = site.run(case.load, policy, case.end_s, case.disturbance)
        stricter = site.run(case.load, strict, case.end_s, case.disturbance)
        at_stock = [time_s for time_s, column in ours.clocks if column is None and time_s >= _BEGIN_S]
        rows.append(
            (
                case.name,
                100 * stock.ttft_attainment,
                100 * ours.ttft_attainment,
                100 * ours.itl_attainment,
                100 * (1 - ours.energy_j / stock.energy_j),
                100 * stricter.ttft_attainment,
                100 * stricter.itl_attainment,
                100 * (1 - stricter.energy_j / stock.energy_j),
                at_stock[0] - _BEGIN_S if at_stock else None,
                ", ".join(dict.fromkeys(reason.value for _, reason in policy.reasons)) or None,
            )
        )
        if case.profile is None:
            pictures.append((case.name, stock, ours))
    table = Table(
        "Disturbances after ten minutes, conversations at 50 % of the capacity",
        (
            Column("disturbance"),
            Column("TTFT: stock, %", ".2f"),
            Column("TTFT: controller, %", ".2f"),
            Column("ITL: controller, %", ".2f"),
            Column("energy: less, %", ".1f"),
            Column("with ITL p99: TTFT, %", ".2f"),
            Column("ITL, %", ".2f"),
            Column("energy: less, %", ".1f"),
            Column("at stock after, s", ".2f"),
            Column("why"),
        ),
        tuple(rows),
        "Each replay takes 20 minutes, the idle one 80. Stock's ITL attainment is 100 % throughout. At stock "
        "after: since the disturbance began; a dash: it was never there again. A killed agent's supervisor "
        f"restores stock within a second. The profile of another model and GPU: {QWEN_32B_STAGE}.",
    )
    return table, pictures


# ---------------------------------------------------------------------- pictures


def _clock_line(axes: Axes, result: ReplayResult, end_s: float) -> None:
    times = [time_s / 60 for time_s, _ in result.clocks]
    clocks = [_CLOCKS_MHZ[-1 if column is None else column] for _, column in result.clocks]
    axes.step([*times, end_s / 60], [*clocks, clocks[-1]], where="post", lw=1, color="tab:blue")
    stock = [(t, c) for (t, column), c in zip(result.clocks, clocks, strict=True) if column is None]
    axes.plot([t / 60 for t, _ in stock], [c for _, c in stock], "o", ms=4, color="tab:red")
    axes.set_ylim(480, 1440)


def _by_minute(
    result: ReplayResult, of: Callable[[ReplayResult], Sequence[tuple[float, float]]]
) -> list[float]:
    minutes: dict[int, list[float]] = {}
    for time_s, value in of(result):
        minutes.setdefault(int(time_s // 60), []).append(value)
    return [float(np.percentile(minutes[m], 99)) if m in minutes else np.nan for m in range(max(minutes) + 1)]


def _draw_hour(stock: ReplayResult, ours: ReplayResult, load: float, path: Path) -> None:
    figure = Figure(figsize=(10.0, 6.0), dpi=110, layout="constrained")
    rates, clocks, ttft = figure.subplots(3, 1, sharex=True)
    arrivals = np.array([time_s - latency_s for time_s, latency_s in ours.engine.totals.ttft])
    rates.bar(np.arange(60) + 0.5, np.histogram(arrivals, np.arange(61) * 60)[0] / 60, 1.0, color="tab:gray")
    rates.set_ylabel("requests per s")
    rates.set_title(f"Conversations at {load:.0%} of the capacity")
    _clock_line(clocks, ours, HOUR_S)
    clocks.set_ylabel("clock (MHz)")
    for result, name, colour in ((stock, "stock", "tab:gray"), (ours, "controller", "tab:blue")):
        ttft.plot(np.array(_by_minute(result, lambda r: r.engine.totals.ttft)), label=name, color=colour)
    ttft.axhline(_OBJECTIVES.ttft.limit_s, color="tab:red", lw=1)
    ttft.set_ylabel("TTFT p99 (s)")
    ttft.set_xlabel("minute")
    ttft.legend()
    ttft.set_xlim(0, 60)
    figure.savefig(path)


def _draw_disturbances(cases: list[tuple[str, ReplayResult, ReplayResult]], path: Path) -> None:
    figure = Figure(figsize=(10.0, 1.6 * len(cases)), dpi=110, layout="constrained")
    panels = figure.subplots(len(cases), 1)
    for axes, (name, _, ours) in zip(panels, cases, strict=True):
        end_s = ours.engine.now_s
        _clock_line(axes, ours, end_s)
        axes.axvline(_BEGIN_S / 60, color="tab:red", lw=1, ls=":")
        axes.set_title(name, loc="left", fontsize=9)
        axes.set_ylabel("MHz")
        axes.set_xlim(0, end_s / 60)
    panels[-1].set_xlabel("minute; red: at stock")
    figure.savefig(path)


if __name__ == "__main__":
    main("serving", run)
