"""The model of an engine's steps at token counts that were left out of its fit."""

from collections.abc import Sequence

import numpy as np

from benchmarks.harness import Cell, Column, Table, main
from benchmarks.serving_data import PROFILES, measured_steps
from perseus.serving.model import MeasuredStep, fit_step_model, relative_errors

_RANGES_MHZ = ((510, 690), (720, 900), (930, 1110), (1140, 1290), (1320, 1410))


def run() -> Sequence[Table]:
    rows: list[tuple[Cell, ...]] = []
    for profile in PROFILES:
        steps = measured_steps(profile)
        left_out, linear = _left_out(steps)
        for low, high in (*_RANGES_MHZ, (510, 1410)):
            chosen = [i for i, (step, _, _) in enumerate(left_out) if low <= step.clock_mhz <= high]
            times = np.abs([left_out[i][1] for i in chosen])
            energies = np.abs([left_out[i][2] for i in chosen])
            lines = np.abs([linear[i] for i in chosen])
            rows.append(
                (
                    str(profile),
                    f"{low} to {high}",
                    len(chosen),
                    *_spread(times),
                    *_spread(energies),
                    *_spread(lines)[:2],
                )
            )
    return [
        Table(
            "Relative errors at token counts that were left out, %",
            (
                Column("measured"),
                Column("clocks, MHz"),
                Column("steps", "d"),
                *(
                    Column(f"{of}: {which}", ".1f")
                    for of in ("time", "energy")
                    for which in ("median", "p95", "worst")
                ),
                *(Column(f"time, linear: {which}", ".1f") for which in ("median", "p95")),
            ),
            tuple(rows),
            "Every token count but the least and the largest is left out of a fit in turn, at all clocks. "
            "Linear: a plane over tokens and context per clock, from the same steps. Measured energies of "
            "neighbouring clocks scatter by 3 to 5 %. Prompts' and decoding tokens can't be distinguished in "
            "these files, and batches end at 512 tokens: neither the split nor larger batches are tested.",
        )
    ]


def _spread(values: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> tuple[float, float, float]:
    return float(100 * np.median(values)), float(100 * np.percentile(values, 95)), float(100 * values.max())


def _left_out(steps: list[MeasuredStep]) -> tuple[list[tuple[MeasuredStep, float, float]], list[float]]:
    """Return each left-out step with its errors of time and energy, and those of a linear fit."""
    found, linear = [], []
    counts = sorted({step.tokens for step in steps})
    for count in counts[1:-1]:
        rest = [step for step in steps if step.tokens != count]
        left_out = [step for step in steps if step.tokens == count]
        errors = relative_errors(fit_step_model(rest, 0.0), left_out)
        found += [
            (s, time, (1 + time) * (1 + watts) - 1) for s, (time, watts) in zip(left_out, errors, strict=True)
        ]
        for step in left_out:
            same = [each for each in rest if each.clock_mhz == step.clock_mhz]
            columns = np.array([[1.0, each.tokens, each.context_tokens] for each in same])
            times = np.array([each.time_s for each in same])
            plane = np.linalg.lstsq(columns / times[:, None], np.ones(len(same)), rcond=None)[0]
            linear.append(float(plane @ [1.0, step.tokens, step.context_tokens]) / step.time_s - 1)
    return found, linear


if __name__ == "__main__":
    main("serving_model", run)
