"""The offers of a job's planner to pipelines that wait for a straggler, at once and in the end.

They are compared with a plan made from scratch for exactly T', and with published savings.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.harness import DATA, GPUS, Cell, Column, Table, main, published_pipeline
from perseus.service.domain.commands import Refine
from perseus.service.job.command_buffer import CommandBuffer
from perseus.service.job.planning.exact_plans import ExactPlans
from perseus.solver import Frontier, plan_at, solve

MICROBATCHES = (12, 24, 48, 96)
FACTORS = (1.02, 1.05, 1.1, 1.2, 1.3, 1.5)


def run() -> Sequence[Table]:
    published = _published_percent()
    rows: list[tuple[Cell, ...]] = []
    for gpu in GPUS:
        for microbatch_count in MICROBATCHES:
            frontier = solve(published_pipeline(gpu, microbatch_count))
            rows += [
                (GPUS[gpu], microbatch_count, *figures, published.get((gpu, microbatch_count, figures[0])))
                for figures in _figures(frontier)
            ]
    return [
        Table(
            "Savings of a pipeline that waits for a straggler, GPT-3 175B, 8 stages, 1F1B",
            (
                Column("GPU"),
                Column("microbatches", "d"),
                Column("T', × T_min", ".2f"),
                Column("offered at once, %", ".2f"),
                Column("offered in the end, %", ".2f"),
                Column("plan made from scratch for T', %", ".2f"),
                Column("bound, %", ".2f"),
                Column("published, %", ".2f"),
            ),
            tuple(rows),
            "Against every computation at its highest clock, waiting until T', in percent of the pipeline's "
            "energy.",
        )
    ]


def _figures(frontier: Frontier) -> Iterator[tuple[float, float, float, float, float]]:
    buffer = CommandBuffer(1)
    buffer.begin(0.0, 0.0)
    plans = ExactPlans(buffer)
    for factor in FACTORS:
        time_s = factor * frontier.t_min_s
        stock_j = frontier.baseline.energy_until_j(time_s)
        at_once = plans.plan_within(frontier, time_s)
        plans.want(frontier, [time_s])
        for command in buffer.take():
            if isinstance(command, Refine):
                plans.take(frontier, command.refinement, command.refinement.plan())
        in_the_end = plans.plan_within(frontier, time_s)
        blocking_w = sum(frontier.pipeline.blocking_power_w)
        bound_s = min(time_s, frontier.t_slow_s)
        bound_j = frontier.bound_energy_j(bound_s) + blocking_w * (time_s - bound_s)
        made = plan_at(frontier.pipeline, time_s)
        energies_j = [each.energy_until_j(time_s) for each in (at_once, in_the_end, made)]
        first, last, from_nothing, bound = (100 * (1 - j / stock_j) for j in (*energies_j, bound_j))
        yield factor, first, last, from_nothing, bound


def _published_percent() -> Mapping[tuple[str, int, float], float]:
    with (DATA / "reference" / "published-savings.csv").open(encoding="utf-8") as file:
        return {
            (row["gpu"], int(row["microbatches"]), float(row["straggler_slowdown"])): float(
                row["saving_percent_non_straggler_pipeline"]
            )
            for row in csv.DictReader(file)
            if row["system"] == "Perseus"
        }


if __name__ == "__main__":
    main("offers", run)
