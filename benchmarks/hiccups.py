"""Rare, large hiccups: false detections of stragglers, the delay of real ones, and the cost of answers.

The noise is that of a job whose bulk jitter is 4.3 % and of which 0.7 % of the values take 1.5 to 2 × as
long: alone or several in a row, each of another size or all of the same.

`python -m benchmarks.hiccups` takes some ten minutes of one core, `--quick` a fifth of that.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.detection import ITERATIONS, LEARNED, Array, lost_percent, simulate
from benchmarks.harness import Cell, Column, Table, main

BULK, SHARE = 0.043, 0.007
FIRST_SEED = 900_000
"""The detector was developed with seeds below 2,000."""

FACTORS = (1.05, 1.1, 1.3, 2.0)


@dataclass(frozen=True, slots=True)
class Noise:
    """A setting.

    Attributes:
        freedom: Student's degrees of freedom of the bulk.
        clustering: probability that a hiccup goes on in the next iteration.
        is_alike: whether it keeps its size then.
    """

    pipelines: int
    freedom: float = math.inf
    clustering: float = 0.0
    is_alike: bool = False

    def __call__(self, rng: np.random.Generator, count: int) -> Array:
        """Return log ratios of shape (count, pipelines)."""
        shape = count, self.pipelines
        values = BULK * rng.standard_normal(shape)
        if math.isfinite(self.freedom):
            values *= np.sqrt(self.freedom / rng.chisquare(self.freedom, shape))
        begins = SHARE * (1 - self.clustering) / (1 - SHARE)
        chance, sizes = rng.random(shape), np.log(rng.uniform(1.5, 2.0, shape))
        is_on = np.zeros(self.pipelines, np.bool_)
        for row in range(count):
            was_on = is_on
            is_on = chance[row] < np.where(was_on, max(self.clustering, SHARE), begins)
            if self.is_alike and row:
                sizes[row] = np.where(was_on & is_on, sizes[row - 1], sizes[row])
            values[row] += is_on * sizes[row]
        return values


NOISES = [
    Noise(pipelines, *others)
    for pipelines in (8, 32)
    for others in ((), (5.0,), (math.inf, 0.3), (math.inf, 0.6, True))
]


def run() -> Sequence[Table]:
    seeds = 2 if "--quick" in sys.argv else 10
    columns = (
        Column("pipelines", "d"),
        Column("bulk"),
        Column("goes on", ".1f"),
        Column("size"),
        Column("false per 1,000 iterations", ".2f"),
        Column("95 %"),
        *(Column(f"delay at {factor:g} ×", ".1f") for factor in FACTORS),
        *(Column(f"time lost at {factor:g} ×, %", ".3f") for factor in FACTORS),
    )
    note = (
        f"{seeds} runs of {ITERATIONS} iterations without a straggler, from the first on, and as many of "
        f"{2 * LEARNED} for each straggler, which begins after {LEARNED}; delay: the median, in iterations. "
        f"Goes on: probability that a hiccup lasts for another iteration. 95 %: the Poisson interval."
    )
    rows = tuple(row(noise, seeds) for noise in NOISES)
    return [Table("Bulk jitter of 4.3 %, 0.7 % of the values 1.5 to 2 ×", columns, rows, note)]


def row(noise: Noise, seeds: int) -> tuple[Cell, ...]:
    """Return a setting's row."""
    rngs = [np.random.default_rng(FIRST_SEED + seed) for seed in range(seeds)]
    false = sum(len(simulate(noise(rng, ITERATIONS)).false) for rng in rngs)
    thousands = seeds * ITERATIONS / 1000
    low, high = _poisson_interval(false)
    delays: list[Cell] = []
    costs: list[Cell] = []
    for factor in FACTORS:
        runs = [simulate(noise(rng, 2 * LEARNED), factor, LEARNED) for rng in rngs]
        delays.append(float(np.median([each.found or math.inf for each in runs])))
        costs.append(lost_percent(runs, slice(LEARNED, None)))
    return (
        noise.pipelines,
        "normal" if math.isinf(noise.freedom) else f"t ({noise.freedom:g})",
        noise.clustering,
        "kept" if noise.is_alike else "new",
        false / thousands,
        f"{low / thousands:.2f} to {high / thousands:.2f}",
        *delays,
        *costs,
    )


def _poisson_interval(count: int) -> tuple[float, float]:
    """Return the exact 95 % interval of the mean of a Poisson count."""

    def mean_of(number: int, probability: float) -> float:
        """Return the mean at which at most `number` are as likely as this."""
        low, high = 1e-9, 10.0 * count + 20
        for _ in range(60):
            mean = (low + high) / 2
            below = sum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(number + 1))
            low, high = (mean, high) if below > probability else (low, mean)
        return high

    return (mean_of(count - 1, 0.975) if count else 0.0), mean_of(count, 0.025)


if __name__ == "__main__":
    main("hiccups", run)
