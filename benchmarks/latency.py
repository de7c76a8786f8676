"""The cost of 10 and 20 ms of set latency, with and without minimum dwell.

The plans are those at T_min and 1.1 × T_min of GPT-3 175B. The published file's times are a tenth of the real
ones (the publication multiplies times and energies by 10). At the file's times, 50 to 280 ms a computation,
latency weighs ten times as much as in reality: the harder case. The second table has the real times.

Energies run until the planned iteration time: a pipeline that is faster than planned waits for the others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.harness import GPUS, Cell, Column, Table, main, published_pipeline
from perseus.solver import Pipeline, Plan, dwell, fastest_clock_plan, plan_at, replay, replay_with_latency

_LATENCIES_MS = (10, 20)
_REAL_TIMES = 10

_COLUMNS = (
    Column("GPU"),
    Column("microbatches", "d"),
    Column("× T_min", ".1f"),
    Column("latency, ms", "d"),
    Column("slower, %", ".3f"),
    Column("energy, +%", ".2f"),
    Column("on clock, %", ".1f"),
    Column("sets", "d"),
    Column("dwell: slower, %", ".3f"),
    Column("energy, +%", ".2f"),
    Column("of it without latency, +%", ".2f"),
    Column("on clock, %", ".1f"),
    Column("sets", "d"),
)


def run() -> Sequence[Table]:
    file_rows: list[tuple[Cell, ...]] = []
    real_rows: list[tuple[Cell, ...]] = []
    for gpu, label in GPUS.items():
        for microbatch_count in (12, 24, 48, 96):
            pipeline = published_pipeline(gpu, microbatch_count)
            t_min_s = fastest_clock_plan(pipeline).iteration_time_s
            for slowdown in (1.0, 1.1):
                plan = plan_at(pipeline, slowdown * t_min_s)
                where = (label, microbatch_count, slowdown)
                file_rows += [(*where, *cells) for cells in _compare(pipeline, plan)]
                if microbatch_count in (12, 96):
                    real = _slow_down(pipeline)
                    real_plan = replay(real, plan.clocks_mhz)
                    real_rows += [(*where, *cells) for cells in _compare(real, real_plan)]
    note = (
        "Slower, energy: relative to the plan's own time and energy. On clock: share of computation time "
        "at the planned clock. Sets: per iteration, all stages."
    )
    return [
        Table("Clock-set latency at the profile's times", _COLUMNS, tuple(file_rows), note),
        Table("Clock-set latency at the real times, ten times as long", _COLUMNS, tuple(real_rows)),
    ]


def _compare(pipeline: Pipeline, plan: Plan) -> Iterator[tuple[Cell, ...]]:
    for latency_ms in _LATENCIES_MS:
        latency_s = latency_ms / 1000
        dwelled = dwell(pipeline, plan, latency_s)
        without_latency = 100 * (dwelled.energy_until_j(plan.iteration_time_s) / plan.energy_j - 1)
        yield (
            latency_ms,
            *_replay(pipeline, plan, plan, latency_s),
            *_replay(pipeline, plan, dwelled, latency_s)[:2],
            without_latency,
            *_replay(pipeline, plan, dwelled, latency_s)[2:],
        )


def _replay(
    pipeline: Pipeline, plan: Plan, run_plan: Plan, latency_s: float
) -> tuple[float, float, float, int]:
    late = replay_with_latency(pipeline, run_plan, latency_s)
    until_s = max(late.iteration_time_s, plan.iteration_time_s)
    energy_j = late.effective_energy_j + late.blocking_power_w * until_s
    return (
        100 * (late.iteration_time_s / plan.iteration_time_s - 1),
        100 * (energy_j / plan.energy_j - 1),
        100 * late.share_on_clock,
        late.set_count,
    )


def _slow_down(pipeline: Pipeline) -> Pipeline:
    profiles = {
        key: tuple(replace(m, time_s=_REAL_TIMES * m.time_s, energy_j=_REAL_TIMES * m.energy_j) for m in some)
        for key, some in pipeline.profiles.items()
    }
    return replace(pipeline, profiles=profiles)


if __name__ == "__main__":
    main("latency", run)
