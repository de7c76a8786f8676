"""Savings with a straggler, beside the published ones, in the published accounting.

One of many pipelines takes 1.05 to 1.5 × as long. It stays at its plan for T_min, its energy grows with its
time, and the others wait for it at blocking power. The reference has every pipeline at its highest clocks.
Ours are measured points; the published energies are those of a fitted curve.
"""

import csv
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness import DATA, GPUS, Cell, Column, Table, main, published_pipeline
from perseus.solver import Pipeline, Plan, solve
from perseus.solver.study import EmulatedIteration, Replicas, emulate, envpipe, zeus_global, zeus_per_stage

_Key = tuple[str, int, str, str]


@dataclass(frozen=True, slots=True)
class _Cluster:
    """``count`` pipelines, one of which takes ``slowdown`` × as long."""

    pipeline: Pipeline
    baseline: Plan
    count: int
    slowdown: float

    def saved_percent(self, waiting: Plan, straggling: Plan) -> tuple[float, float]:
        """Return the saving of the waiting pipelines, and of all."""
        before, after = self._emulate(self.baseline, self.baseline), self._emulate(waiting, straggling)
        others = 100 * (1 - after.pipelines[0].energy_j / before.pipelines[0].energy_j)
        return others, 100 * (1 - after.energy_j / before.energy_j)

    def _emulate(self, waiting: Plan, straggling: Plan) -> EmulatedIteration:
        cluster = [Replicas(waiting, self.count - 1), Replicas(straggling, 1, self.slowdown)]
        return emulate(self.pipeline, cluster)


def run() -> Sequence[Table]:
    published = _read_published()
    perseus_rows: list[tuple[Cell, ...]] = []
    baseline_rows: list[tuple[Cell, ...]] = []
    for gpu, label in GPUS.items():
        for microbatch_count, count in _cluster_sizes(published, gpu):
            pipeline = published_pipeline(gpu, microbatch_count)
            frontier = solve(pipeline, point_count=3)
            baseline, plan_at = frontier.baseline, functools.cache(frontier.plan)
            at_t_min = plan_at(frontier.t_min_s)
            env, one_clock, stage_clocks = envpipe(pipeline), zeus_global(pipeline), zeus_per_stage(pipeline)
            for factor in ("1.05", "1.1", "1.2", "1.3", "1.4", "1.5"):
                slowdown = float(factor)
                time_s = slowdown * baseline.iteration_time_s
                theirs = published[gpu, microbatch_count, "Perseus", factor]
                their_env = published[gpu, microbatch_count, "EnvPipe", factor]
                saved = _Cluster(pipeline, baseline, count, slowdown).saved_percent
                plan = plan_at(min(time_s, frontier.t_slow_s))
                at_t_star = plan_at(min(time_s, frontier.t_star_s))
                where = (label, microbatch_count, count, slowdown)
                perseus_rows.append(
                    (
                        *where,
                        plan.iteration_time_s / baseline.iteration_time_s,
                        *saved(plan, at_t_min),
                        saved(at_t_star, at_t_min)[0],
                        float(theirs["chosen_time_ratio"]),
                        *_published_percent(theirs),
                    )
                )
                baseline_rows.append(
                    (
                        *where,
                        *saved(env, env),
                        *_published_percent(their_env),
                        *saved(_slowest_within(one_clock, time_s), baseline),
                        *saved(_slowest_within(stage_clocks, time_s), baseline),
                    )
                )
    where_columns = (
        Column("GPU"),
        Column("microbatches", "d"),
        Column("pipelines", "d"),
        Column("straggler, ×", ".2f"),
    )
    return [
        Table(
            "Perseus: saving with a straggler, %",
            (
                *where_columns,
                Column("time, × T_min", ".3f"),
                Column("others", ".2f"),
                Column("all", ".2f"),
                Column("others, at most T*", ".2f"),
                Column("published: time", ".2f"),
                Column("others", ".2f"),
                Column("all", ".2f"),
            ),
            tuple(perseus_rows),
            "Others: the pipelines that wait for the straggler. Ours run at min(T_slow, T'), the published "
            "ones at min(T*, T'); the column *at most T\\** shows ours with their policy.",
        ),
        Table(
            "Baselines: saving with a straggler, %",
            (
                *where_columns,
                Column("EnvPipe: others", ".2f"),
                Column("all", ".2f"),
                Column("published: others", ".2f"),
                Column("all", ".2f"),
                Column("Zeus global: others", ".2f"),
                Column("all", ".2f"),
                Column("Zeus per stage: others", ".2f"),
                Column("all", ".2f"),
            ),
            tuple(baseline_rows),
            "Zeus takes the plan of least energy on its own frontier that is not slower than the straggler, "
            "whose own pipeline stays at the highest clocks. The published *all* charges a straggler its "
            "energy times its slowdown, as here, but with EnvPipe it adds twice the blocking power over the "
            "delay.",
        ),
    ]


def _slowest_within(plans: Sequence[Plan], time_s: float) -> Plan:
    """Return the last plan within the time: they are sorted, and slower ones cost less."""
    return [plan for plan in plans if plan.iteration_time_s <= time_s][-1]


def _read_published() -> dict[_Key, dict[str, str]]:
    with (DATA / "reference" / "published-savings.csv").open(encoding="utf-8", newline="") as file:
        return {
            (row["gpu"], int(row["microbatches"]), row["system"], row["straggler_slowdown"]): row
            for row in csv.DictReader(file)
        }


def _cluster_sizes(published: dict[_Key, dict[str, str]], gpu: str) -> list[tuple[int, int]]:
    """Return the published (microbatches, pipelines) of one kind of GPU."""
    return sorted({(key[1], int(row["pipelines"])) for key, row in published.items() if key[0] == gpu})


def _published_percent(row: dict[str, str]) -> tuple[float, float]:
    return float(row["saving_percent_non_straggler_pipeline"]), float(row["saving_percent_all_pipelines"])


if __name__ == "__main__":
    main("stragglers", run)
