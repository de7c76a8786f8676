"""The cost of set latency: the agent's sessions on emulated GPUs, with and without latency and dwell.

Four stages, 1F1B, plans at T_min. Every figure is relative to the same plan on the same iterations with
clocks that change at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.harness import Column, Table, main
from benchmarks.training_simulation import Job, Machine, Outcome, train
from perseus import solver
from perseus.agent.link.computation import Computation, Kind
from perseus.emulation.physics import A100_SXM, GpuModel, Work

_KINDS = {solver.Kind.FORWARD: Kind.FORWARD, solver.Kind.BACKWARD: Kind.BACKWARD}
STAGE_WEIGHTS = (0.84, 0.90, 0.87, 1.0)
SETTLING_ITERATIONS = 5
"""Iterations left out at the start of a plan, in which nothing can be predicted yet."""
_ITERATIONS = 20


def job(forward_s: float, *, microbatch_count: int, clock_count: int = 24) -> Job:
    """Four stages, the heaviest with forwards of `forward_s` and backwards of twice that, at best."""
    schedule = solver.one_forward_one_backward(len(STAGE_WEIGHTS), microbatch_count)
    return Job(
        model=A100_SXM.with_clocks(clock_count),
        orders=[[Computation(_KINDS[c.kind], c.microbatch) for c in order] for order in schedule.orders],
        works=[
            {
                Kind.FORWARD: Work(0.82 * forward_s * weight, 0.18 * forward_s * weight, 0.85),
                Kind.BACKWARD: Work(1.65 * forward_s * weight, 0.35 * forward_s * weight, 0.95),
            }
            for weight in STAGE_WEIGHTS
        ],
    )


def pipeline(job: Job) -> solver.Pipeline:
    """Return the job's pipeline from a perfect profile."""
    model = job.model
    lowest_mhz = model.clocks_mhz[-1]
    return solver.Pipeline(
        schedule=solver.one_forward_one_backward(
            len(job.orders), sum(c.kind is Kind.FORWARD for c in job.orders[0])
        ),
        profiles={
            (stage, 0, kind): tuple(
                _measurement(model, job.works[stage][_KINDS[kind]], c) for c in model.clocks_mhz
            )
            for stage in range(len(job.orders))
            for kind in _KINDS
        },
        blocking_power_w=(model.blocking_power_w(lowest_mhz),) * len(job.orders),
    )


def _measurement(model: GpuModel, work: Work, clock_mhz: int) -> solver.Measurement:
    time_s = model.time_s(work, clock_mhz)
    return solver.Measurement(clock_mhz, time_s, time_s * model.power_w(work.activity, clock_mhz))


def stage_clocks(plan: solver.Plan) -> list[list[int]]:
    """Each stage's clocks, in order."""
    return [[planned.clock_mhz for planned in stage] for stage in plan.stages]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A plan with latency relative to the same plan with instant clock changes, as shares."""

    slowdown: float
    extra_energy: float
    on_clock_share: float


def compare(
    job: Job,
    clocks_mhz: Sequence[Sequence[int]],
    latency_s: float,
    seeds: Sequence[int],
    machine: Machine = Machine(),  # noqa: B008 - frozen
) -> Comparison:
    """Train with both, and compare them after the first iterations."""
    late, at_once, settling = (
        [
            train(job, clocks_mhz, latency_s=each_s, iteration_count=count, seed=seed, machine=machine)
            for seed in seeds
        ]
        for each_s, count in ((latency_s, _ITERATIONS), (None, _ITERATIONS), (latency_s, SETTLING_ITERATIONS))
    )
    on_clock_s, computation_s = (
        sum(getattr(stage, figure) for outcome in late for stage in outcome.statistics)
        - sum(getattr(stage, figure) for outcome in settling for stage in outcome.statistics)
        for figure in ("on_clock_time_s", "computation_time_s")
    )
    return Comparison(
        slowdown=_mean(late, "iteration_times_s") / _mean(at_once, "iteration_times_s") - 1,
        extra_energy=_mean(late, "energies_j") / _mean(at_once, "energies_j") - 1,
        on_clock_share=on_clock_s / computation_s,
    )


def _mean(outcomes: Sequence[Outcome], figure: str) -> float:
    return fmean(fmean(getattr(outcome, figure)[SETTLING_ITERATIONS:]) for outcome in outcomes)


def run() -> list[Table]:
    """Simulate plans with and without dwell."""
    rows = []
    for forward_s in (0.020, 0.030, 0.050):
        each = job(forward_s, microbatch_count=8)
        problem = pipeline(each)
        plan = solver.plan_at(problem, solver.fastest_clock_plan(problem).iteration_time_s)
        stock = [[each.model.highest_clock_mhz] * len(order) for order in each.orders]
        stock_j = _mean([train(each, stock, latency_s=None, iteration_count=8, seed=0)], "energies_j")
        for latency_s in (0.010, 0.020):
            for name, chosen in (("plan", plan), ("dwell", solver.dwell(problem, plan, latency_s))):
                clocks_mhz = stage_clocks(chosen)
                found = compare(each, clocks_mhz, latency_s, range(5))
                late = train(each, clocks_mhz, latency_s=latency_s, iteration_count=_ITERATIONS, seed=0)
                rows.append(
                    (
                        1e3 * forward_s,
                        1e3 * latency_s,
                        name,
                        100 * found.slowdown,
                        100 * found.extra_energy,
                        100 * found.on_clock_share,
                        100 * (1 - _mean([late], "energies_j") / stock_j),
                    )
                )
    columns = (
        Column("forward, ms", ".0f"),
        Column("latency, ms", ".0f"),
        Column("plan"),
        Column("slowdown, %", "+.2f"),
        Column("extra energy, %", "+.2f"),
        Column("time on clock, %", ".1f"),
        Column("saving against stock, %", ".1f"),
    )
    return [Table("The agent's clocks with latency", columns, tuple(rows), __doc__ or "")]


if __name__ == "__main__":
    main("clock_latency", run)
