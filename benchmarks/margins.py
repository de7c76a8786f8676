"""Do plans keep their promises? Plans made from noisy profiles, replayed on the profiles without noise.

Parts of the published profiles serve as the truth. Every time and energy is measured with an independent
error. How large errors are is known, or estimated from 5 or 3 repetitions. Each draw is shrunk and solved
once, with a margin for 95 %, and its plans are replayed on the truth: late is a plan that takes longer than
it promised. A larger margin always prevents that, so its price stands beside: what the plan costs above one
that knows the truth and is made for the same time. Seeded; the seeds are of no other use.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import GPUS, Column, Table, main, published_pipeline
from perseus.solver import (
    Measurement,
    Pipeline,
    one_forward_one_backward,
    replay,
    shrink_profiles,
    solve,
)

Cell = tuple[str, float, int]
"""GPU, noise as a share, and repetitions."""

STAGES, MICROBATCHES = 4, 4
EVERY_CLOCK = 3
"""Of the published clocks, from the highest on, so that a draw takes a fifth of a second."""
NOISES = (0.005, 0.01, 0.02, 0.05)
REPETITIONS = (0, 5, 3)
"""0: the errors' standard deviation is known."""
SEED_COUNT = 200
SEED = 35_000
"""Of no draw that was looked at before."""
CONFIDENCE = 0.95
POINT_COUNT = 4
TRUE_POINT_COUNT = 300
LATER = 1.05


def run() -> Sequence[Table]:
    cells = list(product(GPUS, NOISES, REPETITIONS))
    with ProcessPoolExecutor() as pool:
        return [table(dict(zip(cells, pool.map(draws, cells), strict=True)))]


def draws(cell: Cell, numbers: range = range(SEED_COUNT), seed: int = SEED) -> NDArray[np.float64]:
    """Return each draw's margin, how much later its plans are than promised, and their extra energies, %."""
    gpu, noise, repetitions = cell
    truth = _truth(gpu)
    informed = solve(truth, point_count=TRUE_POINT_COUNT)
    found = []
    for number in numbers:
        measured = _measured(truth, noise, repetitions, np.random.default_rng([seed, number]))
        shrunk = replace(measured, profiles=shrink_profiles(measured.profiles))
        frontier = solve(shrunk, point_count=POINT_COUNT, confidence=CONFIDENCE)
        assert frontier.margin is not None
        late, extra = [], []
        for time_s in (frontier.t_min_s, frontier.baseline.iteration_time_s, LATER * frontier.t_min_s):
            plan = frontier.plan(time_s)
            promised_s, true = plan.iteration_time_s, replay(truth, plan.clocks_mhz)
            late.append(true.iteration_time_s / promised_s - 1)
            best = informed.plan_within(max(promised_s, informed.t_min_s))
            extra.append(true.energy_until_j(promised_s) / best.energy_until_j(promised_s) - 1)
        found.append([frontier.margin.time_share, *late, *extra])
    return 100 * np.array(found)


def table(found: Mapping[Cell, NDArray[np.float64]]) -> Table:
    """Return the table of all cells' draws."""
    rows = [
        (
            GPUS[gpu],
            100 * noise,
            f"of {repetitions} repetitions" if repetitions else "known",
            *(some[:, 1:4] > 0).sum(axis=0).tolist(),
            *np.quantile(some[:, 1], (0.5, CONFIDENCE)).tolist(),
            float(some[:, 0].mean()),
            *some[:, 4:].mean(axis=0).tolist(),
        )
        for (gpu, noise, repetitions), some in found.items()
    ]
    count = len(next(iter(found.values())))
    return Table(
        f"Plans later than promised, of {count} draws each",
        (
            Column("GPU"),
            Column("noise, %", ".1f"),
            Column("standard errors"),
            Column("late at T_min"),
            Column("at no slowdown"),
            Column(f"at {LATER} × T_min"),
            Column("time over promise at T_min: median, %", "+.2f"),
            Column("95 % below, %", "+.2f"),
            Column("margin: mean, %", ".2f"),
            Column("energy above the informed plan's: at T_min, %", ".2f"),
            Column("at no slowdown, %", ".2f"),
            Column(f"at {LATER} × T_min, %", ".2f"),
        ),
        tuple(rows),
        f"GPT-3 175B, {STAGES} stages, {MICROBATCHES} microbatches, every third clock. "
        f"Promised is that {CONFIDENCE:.0%} are in time. Noise: of each figure, or of the mean of its "
        "repetitions. Energy: mean of what plans take on the true times until the predicted time, above what "
        "a plan takes that was made for the same time, knows the truth and is not late.",
    )


def _truth(gpu: str) -> Pipeline:
    published = published_pipeline(gpu, MICROBATCHES)
    return Pipeline(
        one_forward_one_backward(STAGES, MICROBATCHES),
        {
            key: tuple(sorted(some, key=lambda m: -m.clock_mhz)[::EVERY_CLOCK])
            for key, some in published.profiles.items()
            if key[0] < STAGES
        },
        published.blocking_power_w[:STAGES],
    )


def _measured(truth: Pipeline, noise: float, repetitions: int, random: np.random.Generator) -> Pipeline:
    def figure(true: float) -> tuple[float, float]:
        if not repetitions:
            return true * (1 + noise * random.standard_normal()), noise * true
        found = true * (1 + noise * repetitions**0.5 * random.standard_normal(repetitions))
        return float(found.mean()), float(found.std(ddof=1) / repetitions**0.5)

    def measure(m: Measurement) -> Measurement:
        (time_s, time_se_s), (energy_j, energy_se_j) = figure(m.time_s), figure(m.energy_j)
        return Measurement(m.clock_mhz, time_s, energy_j, time_se_s, energy_se_j)

    return replace(truth, profiles={key: tuple(map(measure, some)) for key, some in truth.profiles.items()})


if __name__ == "__main__":
    main("margins", run)
