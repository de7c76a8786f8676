"""The effect of noisy profiles on plans: whether predictions hold, and the energy given away for that.

Published profiles serve as the truth. Every time and energy is measured with an independent error; a plan is
made from the raw measurements, from shrunk ones, or from shrunk ones with a margin, and replayed on the
truth. Seeded. Also draws `docs/images/noise.png`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmarks.harness import GPUS, Cell, Column, Table, main, published_pipeline
from perseus.solver import Measurement, Pipeline, fastest_clock_plan, replay, shrink_profiles, with_margin
from perseus.solver.computation import Computation
from perseus.solver.graph import build_event_graph
from perseus.solver.realisation import Realiser
from perseus.solver.sweep import sweep_frontier

MICROBATCHES = 12
NOISES = (0.005, 0.01, 0.02)
FACTORS = (1.0, 1.05)
"""Deadlines, relative to the planner's estimate of the iteration at the highest clocks."""
SEED_COUNT = 40
CONFIDENCE = 0.95
METHODS = ("raw", "shrunk", "with margin")
PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "noise.png"


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan's deadline, prediction and outcome, s and J; energies until the deadline."""

    deadline_s: float
    predicted_s: float
    true_s: float
    true_j: float


def run() -> Sequence[Table]:
    rows: list[tuple[Cell, ...]] = []
    for gpu in GPUS:
        truth = published_pipeline(gpu, MICROBATCHES)
        for noise in (0.0, *NOISES):
            for method, made in _predictions(truth, noise).items():
                rows += [
                    (GPUS[gpu], 100 * noise, method, factor, *_figures(truth, made, factor))
                    for factor in FACTORS
                ]
    table = Table(
        f"Plans on noisy profiles, GPT-3 175B, 8 stages, {MICROBATCHES} microbatches",
        (
            Column("GPU"),
            Column("noise, %", ".1f"),
            Column("planned on"),
            Column("deadline, × all-max", ".2f"),
            Column("true time over prediction: median, %", "+.2f"),
            Column("95 % below, %", "+.2f"),
            Column("true time over the truth's deadline: median, %", "+.2f"),
            Column("energy given away: median, %", "+.2f"),
            Column("margin: mean, %", ".2f"),
        ),
        tuple(rows),
        f"{SEED_COUNT} draws each; times and energies of each of the published clocks err independently, by "
        "a known standard deviation. Energy given away: of the plan, replayed on the truth until the "
        "later of its end and the truth's deadline, over the plan made from the truth; below 0 if a plan "
        "is later than that. Margin: added to the all-max iteration, so that 95 % of predictions hold.",
    )
    draw(table, PICTURE)
    return [table]


def _predictions(truth: Pipeline, noise: float) -> Mapping[str, list[tuple[list[Prediction], float]]]:
    """Return the predictions, one per factor, and the margin, for each method and draw."""
    found: dict[str, list[tuple[list[Prediction], float]]] = {method: [] for method in METHODS}
    for seed in range(SEED_COUNT if noise else 1):
        raw = _measured(truth, noise, np.random.default_rng(seed))
        shrunk = replace(raw, profiles=shrink_profiles(raw.profiles))
        padded, margin = with_margin(shrunk, CONFIDENCE)
        for method, known, share in zip(
            METHODS, (raw, shrunk, padded), (0.0, 0.0, margin.time_share if margin else 0.0), strict=True
        ):
            found[method].append((_plan(truth, known), share))
    return found


def _measured(truth: Pipeline, noise: float, random: np.random.Generator) -> Pipeline:
    def measure(m: Measurement) -> Measurement:
        time, energy = 1 + noise * random.standard_normal(2)
        return Measurement(
            m.clock_mhz, m.time_s * time, m.energy_j * energy, noise * m.time_s, noise * m.energy_j
        )

    return replace(truth, profiles={key: tuple(map(measure, some)) for key, some in truth.profiles.items()})


def _plan(truth: Pipeline, known: Pipeline) -> list[Prediction]:
    """Plan from the known profiles, and replay the plans on the truth."""
    graph = build_event_graph(known)
    sweep, realiser = sweep_frontier(graph), Realiser(graph)
    all_max_s, true_all_max_s = (fastest_clock_plan(each).iteration_time_s for each in (known, truth))
    predictions = []
    for factor in FACTORS:
        deadline_ps = max(sweep.t_min_ps, graph.scale.to_ps(factor * all_max_s))
        choice = realiser.rounded(sweep.event_times_at(deadline_ps))
        clocks_mhz: dict[Computation, int] = {
            c: graph.options[p][k].clock_mhz
            for c, p, k in zip(graph.computations, graph.profile_of, choice, strict=True)
        }
        predicted, true = replay(known, clocks_mhz), replay(truth, clocks_mhz)
        until_s = factor * true_all_max_s
        predictions.append(
            Prediction(
                until_s, predicted.iteration_time_s, true.iteration_time_s, true.energy_until_j(until_s)
            )
        )
    return predictions


def _figures(
    truth: Pipeline, made: Sequence[tuple[list[Prediction], float]], factor: float
) -> tuple[float, float, float, float, float]:
    at = FACTORS.index(factor)
    predictions = [each[at] for each, _ in made]
    clean = _plan(truth, truth)[at]
    late = [100 * (each.true_s / each.predicted_s - 1) for each in predictions]
    return (
        float(np.median(late)),
        float(np.quantile(late, 0.95)),
        float(np.median([100 * (each.true_s / each.deadline_s - 1) for each in predictions])),
        float(np.median([100 * (each.true_j / clean.true_j - 1) for each in predictions])),
        100 * float(np.mean([share for _, share in made])),
    )


def draw(table: Table, path: Path) -> None:
    """Draw medians and 95 % points of true time over prediction, and the energy given away."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots(2, len(GPUS), sharex=True, sharey="row", squeeze=False)
    for column, gpu in enumerate(GPUS.values()):
        for method, color in zip(METHODS, ("tab:red", "tab:orange", "tab:blue"), strict=True):
            for factor, line in zip(FACTORS, ("-", "--"), strict=True):
                rows = [row for row in table.rows if (row[0], row[2], row[3]) == (gpu, method, factor)]
                noises = [float(row[1] or 0) for row in rows]
                label = f"{method}, {factor:g} ×"
                late = [float(row[5] or 0) for row in rows]
                axes[0][column].plot(noises, late, line, color=color, marker="o", label=label)
                given = [float(row[7] or 0) for row in rows]
                axes[1][column].plot(noises, given, line, color=color, marker="o")
        axes[0][column].set_title(gpu)
        axes[1][column].set_xlabel("noise of each measurement, %")
        for row in axes:
            row[column].axhline(0, color="gray", linewidth=0.5)
            row[column].grid(alpha=0.3)
    axes[0][0].set_ylabel("true time over prediction,\n95 % of draws are below, %")
    axes[1][0].set_ylabel("energy given away, median, %")
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main("noise", run)
