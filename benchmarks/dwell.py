"""The cost of set latency for plans that hold their clocks accordingly.

The frontier of GPT-3 175B on the A100, as a coordinator solves it for a job, with latencies from 0 to 50 ms,
at the published file's times (50 to 280 ms a computation; the real ones are ten times as long, the easier
case). All figures compare the job's plans with those whose clocks change at once.
"""

from collections.abc import Sequence

from benchmarks.harness import GPUS, Cell, Column, Table, main, published_pipeline, timed
from perseus.solver import Frontier, replay_with_latency, solve

_LATENCIES_MS = (0, 10, 20, 50)
_MICROBATCH_COUNTS = (12, 48)

_COLUMNS = (
    Column("microbatches", "d"),
    Column("latency, ms", "d"),
    Column("plans", "d"),
    Column("solving, ×", ".1f"),
    Column("T_min: instant plan slower, %", ".2f"),
    Column("its energy, +%", ".2f"),
    Column("T_min: plan slower, %", ".2f"),
    Column("its energy, +%", ".2f"),
    Column("on clock, %", ".1f"),
    Column("saving, %", ".2f"),
    Column("1.1 × T_min: energy, +%", ".2f"),
    Column("T*: energy, +%", ".2f"),
)


def run() -> Sequence[Table]:
    rows: list[tuple[Cell, ...]] = []
    for microbatch_count in _MICROBATCH_COUNTS:
        pipeline = published_pipeline("a100-sxm", microbatch_count)
        with timed() as instant_watch:
            instant = solve(pipeline)
        for latency_ms in _LATENCIES_MS:
            with timed() as watch:
                kept = solve(pipeline, set_latency_s=latency_ms / 1000)
            ratio = watch.seconds / instant_watch.seconds
            rows.append((microbatch_count, latency_ms, len(kept.points), ratio, *_figures(instant, kept)))
    note = (
        "Slower, energy: with the latency, against the plan for the same time whose clocks change at "
        "once. "
        "Instant plan: that plan on GPUs with the latency. Saving: against the highest clock throughout. "
        "Plans: number of realised plans. Solving: CPU time relative to solving without latency."
    )
    return [Table(f"Minimum dwell on the {GPUS['a100-sxm']}", _COLUMNS, tuple(rows), note)]


def _figures(instant: Frontier, kept: Frontier) -> tuple[Cell, ...]:
    t_min_s, latency_s = instant.t_min_s, kept.set_latency_s
    ideal, plan = instant.plan_within(t_min_s), kept.plan_within(t_min_s)
    cells: list[Cell] = []
    for each in (ideal, plan):
        late = replay_with_latency(kept.pipeline, each, latency_s)
        until_s = max(late.iteration_time_s, t_min_s)
        energy_j = late.effective_energy_j + late.blocking_power_w * until_s
        cells += [
            _more_percent(late.iteration_time_s, t_min_s),
            _more_percent(energy_j, ideal.energy_until_j(until_s)),
        ]
    return (
        *cells,
        100 * late.share_on_clock,
        100 * (1 - energy_j / kept.baseline.energy_j),
        kept.point_within(1.1 * t_min_s).latency_cost_percent,
        kept.points[kept.t_star_index].latency_cost_percent,
    )


def _more_percent(figure: float, reference: float) -> float:
    """Return a figure's excess in percent, rounded so that summation errors don't make it negative."""
    return round(100 * (figure / reference - 1), 9) + 0.0


if __name__ == "__main__":
    main("dwell", run)
