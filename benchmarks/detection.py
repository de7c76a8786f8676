"""Detecting stragglers amid jitter: false detections, the cost of answers, and the delay.

The simulation produces the detector's input: in each iteration, a pipeline's span is its planned time, times
the straggler's slowness, times its jitter. An answer comes into force with the iteration after next, and
slows all other pipelines as far as they certainly wait. An iteration takes as long as its slowest pipeline.

`python -m benchmarks.detection` takes some minutes of one core, `--quick` a fifth of that. It also draws
`docs/images/detection.png`.
"""

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks.harness import Cell, Column, Table, main
from perseus.service.job.stragglers.detector import FALSE_FREE_ITERATIONS, StragglerDetector
from perseus.service.job.stragglers.spans import IterationSpans

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "detection.png"

PIPELINES = 32
ITERATIONS = 2000
EARLY = 100
LEARNED = 200
"""Iterations before a straggler begins."""

JITTER = math.log(1.35) / 2.07
"""The slowest of 32 normal values is 2.07 standard deviations above the median, typically: 1.35 ×."""

FACTORS = (1.05, 1.1, 1.2, 1.3, 2.0)

_ANSWER_DELAY = 2
_MEDIAN_OF_T3, _MEDIAN_OF_NORMAL = 0.7649, 0.6745

Array = NDArray[np.float64]


def normal(rng: np.random.Generator, count: int) -> Array:
    """Independent from iteration to iteration and pipeline to pipeline."""
    return JITTER * rng.standard_normal((count, PIPELINES))


def heavy_tailed(rng: np.random.Generator, count: int) -> Array:
    """Student's with three degrees of freedom, of the same median distance."""
    return JITTER * _MEDIAN_OF_NORMAL / _MEDIAN_OF_T3 * rng.standard_t(3, (count, PIPELINES))


def correlated(rng: np.random.Generator, count: int, correlation: float = 0.5) -> Array:
    """Each iteration keeps half of the previous one."""
    values = normal(rng, count)
    for row in range(1, count):
        values[row] = correlation * values[row - 1] + math.sqrt(1 - correlation**2) * values[row]
    return values


def drifting(rng: np.random.Generator, count: int) -> Array:
    """All pipelines wander together, and their jitter doubles and halves."""
    together = np.cumsum(0.005 * rng.standard_normal(count))
    swell = 2 ** (0.5 * np.sin(2 * math.pi * np.arange(count) / 500))
    return together[:, None] + swell[:, None] * normal(rng, count)


def quiet(rng: np.random.Generator, count: int) -> Array:
    """Residuals of up to 0.1 %."""
    return rng.uniform(-0.001, 0.001, (count, PIPELINES))


JITTERS = {
    "independent": normal,
    "heavy-tailed": heavy_tailed,
    "correlated (0.5)": correlated,
    "drifting": drifting,
    "none (0.1 %)": quiet,
}


@dataclass(slots=True)
class Run:
    """The result of a run: iterations that detected a straggler in a healthy pipeline, or the real one.

    `time_s` and `unanswered_s` are those of each iteration, with and without answers.
    """

    false: list[int]
    found: int | None
    withdrawn_responses: int
    time_s: Array
    unanswered_s: Array


def simulate(jitter: Array, factor: float = 1.0, begin: int = 0, *, stop_when_found: bool = False) -> Run:
    """Run the detector on a job whose first pipeline is slower by a factor from an iteration on."""
    iterations, pipelines = jitter.shape
    log_spans = jitter.copy()
    log_spans[begin:, 0] += math.log(factor)
    detector = StragglerDetector(pipelines)
    versions, planned_s = np.zeros(pipelines, np.int64), np.ones(pipelines)
    zeros = np.zeros(pipelines, np.int64)
    slow: dict[int, float] = {}
    due: list[tuple[int, Array]] = []
    run = Run([], None, 0, np.exp(log_spans.max(axis=1)), np.exp(log_spans.max(axis=1)))
    for iteration in range(iterations):
        while due and due[0][0] <= iteration:
            wanted_s = due.pop(0)[1]
            versions = np.where(wanted_s != planned_s, iteration, versions)
            planned_s = wanted_s
        spans_s = planned_s * np.exp(log_spans[iteration])
        run.time_s[iteration] = spans_s.max()
        spans = IterationSpans(iteration, versions, spans_s, planned_s, zeros, np.ones(pipelines), zeros)
        findings = detector.judge(spans)
        for finding in findings:
            run.withdrawn_responses += finding.has_cost_time
            if not finding.is_straggler:
                del slow[finding.pipeline]
                continue
            if finding.pipeline not in slow:
                if finding.pipeline == 0 and factor > 1 and iteration >= begin:
                    run.found = run.found or iteration - begin + 1
                else:
                    run.false.append(iteration)
            slow[finding.pipeline] = finding.waited_factor
        if run.found and stop_when_found:
            break
        if findings:
            wanted_s = np.full(pipelines, max([1.0, *slow.values()]))
            wanted_s[list(slow)] = 1.0
            due.append((iteration + _ANSWER_DELAY, wanted_s))
    return run


def ideal_delay(values: Array, factor: float, false_rate: float) -> float:
    """Return after how many iterations an ideal test detects this factor, present from the first value.

    The test is Page's cumulative sum for normal values, which knows the noise and the factor. Jitter reaches
    its threshold at the given rate (for one pipeline, by Siegmund's approximation).
    """
    size = math.log(factor) / JITTER
    threshold = _threshold(size, false_rate)
    total = 0.0
    for count, value in enumerate(values, 1):
        total = max(0.0, total + size * (value / JITTER - size / 2))
        if total > threshold:
            return count
    return math.inf


@functools.cache
def _threshold(size: float, false_rate: float) -> float:
    low, high = 0.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        beyond = middle + 1.166 * size
        between = 2 * (math.expm1(beyond) - beyond) / size**2
        low, high = (middle, high) if between < 1 / false_rate else (low, middle)
    return high


def run() -> Sequence[Table]:
    quick = "--quick" in sys.argv
    healthy, rates = _healthy_table(10 if quick else 50)
    delays = _delay_table(20 if quick else 100, rates)
    draw(delays, PICTURE)
    return [healthy, delays, _quiet_table(), _cost_table(4 if quick else 20)]


def _healthy_table(seeds: int) -> tuple[Table, dict[str, float]]:
    rows: list[tuple[Cell, ...]] = []
    rates = {}
    for name, jitter in JITTERS.items():
        runs = [simulate(jitter(np.random.default_rng(seed), ITERATIONS)) for seed in range(seeds)]
        false = sum(len(each.false) for each in runs)
        rates[name] = max(1, false) / (seeds * ITERATIONS)
        rows.append(
            (
                name,
                seeds,
                1000 * false / (seeds * ITERATIONS),
                1000 * sum(at < EARLY for each in runs for at in each.false) / (seeds * EARLY),
                lost_percent(runs, slice(0, EARLY)),
                lost_percent(runs, slice(None)),
            )
        )
    columns = (
        Column("jitter"),
        Column("runs", "d"),
        Column("false detections per 1,000 iterations", ".2f"),
        Column(f"in the first {EARLY}", ".2f"),
        Column(f"time lost in the first {EARLY}, %", ".3f"),
        Column("time lost, %", ".3f"),
    )
    note = (
        f"{PIPELINES} pipelines, {ITERATIONS} iterations each. In a typical iteration the slowest takes "
        f"1.35 × the median. Specified: at most "
        f"{1000 / FALSE_FREE_ITERATIONS:g} per 1,000 of independent jitter."
    )
    return Table(
        "No straggler: false detections, and the cost of their answers", columns, tuple(rows), note
    ), rates


def _delay_table(seeds: int, rates: dict[str, float]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name in ("independent", "heavy-tailed", "correlated (0.5)", "drifting"):
        for factor in FACTORS:
            delays, ideals = [], []
            for seed in range(seeds):
                jitter = JITTERS[name](np.random.default_rng(10_000 + seed), 1200)
                found = simulate(jitter, factor, LEARNED, stop_when_found=True).found
                delays.append(math.inf if found is None else found)
                if name == "independent":
                    own = jitter[LEARNED:, 0] + math.log(factor)
                    ideals.append(ideal_delay(own, factor, rates[name] / PIPELINES))
            median = float(np.median(delays))
            ideal = float(np.median(ideals)) if ideals else None
            maximum = float(np.quantile(delays, 0.95, method="higher"))
            rows.append((name, factor, median, maximum, ideal, median / ideal if ideal else None))
    columns = (
        Column("jitter"),
        Column("straggler, ×", ".2f"),
        Column("median delay, iterations", ".1f"),
        Column("95 %", ".0f"),
        Column("ideal: median", ".1f"),
        Column("ratio", ".2f"),
    )
    note = (
        f"{seeds} runs each; the straggler begins after {LEARNED} iterations. The ideal test is a "
        "cumulative sum that knows noise and factor, at the rate of false detections measured above; it "
        "is ideal for independent normal jitter. inf: not detected in 1,000 iterations."
    )
    return Table("A straggler in that jitter: iterations until it is detected", columns, tuple(rows), note)


def _quiet_table() -> Table:
    rows: list[tuple[Cell, ...]] = []
    for pipelines in (2, 4, 32):
        for factor in (1.02, 1.05, 1.2):
            row: list[Cell] = [pipelines, factor]
            for learned in (1, 2, 4, 8, 16, 64):
                delays = []
                for seed in range(20):
                    jitter = quiet(np.random.default_rng(seed), learned + 60)[:, :pipelines]
                    found = simulate(jitter, factor, learned, stop_when_found=True).found
                    delays.append(math.inf if found is None else found)
                row.append(float(np.quantile(delays, 0.95, method="higher")))
            rows.append(tuple(row))
    columns = (
        Column("pipelines", "d"),
        Column("straggler, ×", ".2f"),
        *(Column(f"it begins after {learned}", ".0f") for learned in (1, 2, 4, 8, 16, 64)),
    )
    note = (
        "Residuals of up to 0.1 %, 20 runs each: the delay that 95 % keep. Until the noise is learned, the "
        "detector assumes much of it; the first iteration carries no information."
    )
    return Table("Without jitter: iterations until a straggler is detected", columns, tuple(rows), note)


def _cost_table(seeds: int) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name in ("independent", "heavy-tailed", "none (0.1 %)"):
        for factor in FACTORS:
            runs = [
                simulate(JITTERS[name](np.random.default_rng(20_000 + seed), 600), factor, LEARNED)
                for seed in range(seeds)
            ]
            rows.append(
                (
                    name,
                    factor,
                    lost_percent(runs, slice(LEARNED, None)),
                    sum(each.withdrawn_responses for each in runs) / seeds,
                )
            )
    columns = (
        Column("jitter"),
        Column("straggler, ×", ".2f"),
        Column("time lost during it, %", ".3f"),
        Column("answers withdrawn because they cost time, per run", ".2f"),
    )
    return Table(
        "Cost of answers to a straggler", columns, tuple(rows), f"{seeds} runs of 400 iterations each."
    )


def lost_percent(runs: Sequence[Run], part: slice) -> float:
    """Return the mean over iterations of each one's share: heavy tails have no mean time for a ratio."""
    return 100 * float(np.mean([each.time_s[part] / each.unanswered_s[part] - 1 for each in runs]))


def draw(table: Table, path: Path) -> None:
    """Draw the delays of a table of :func:`_delay_table`."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row[0] for row in table.rows):
        rows = [row for row in table.rows if row[0] == name]
        axes.plot(_numbers(rows, 1), _numbers(rows, 2), marker="o", label=str(name))
    ideal = [row for row in table.rows if row[4] is not None]
    axes.plot(_numbers(ideal, 1), _numbers(ideal, 4), "k--", label="independent, ideal test")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("straggler, × its plan")
    axes.set_ylabel("median delay, iterations")
    axes.set_xticks(FACTORS, [f"{factor:g}" for factor in FACTORS])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(title="jitter: slowest of 32 at 1.35 ×", frameon=False)
    figure.savefig(path, dpi=110)


def _numbers(rows: Sequence[tuple[Cell, ...]], column: int) -> list[float]:
    return [float(row[column] or 0) for row in rows]


if __name__ == "__main__":
    main("detection", run)
