"""A profile as a CSV file: an engine's measured steps by clock. Pure.

    clock_mhz,prefill_tokens,decoding_count,context_tokens,time_s,energy_j
    1410,512,0,2000,0.072,20.9
    1410,0,16,8000,0.021,4.4
    1410,0,0,0,1,60

Rows without tokens are of an idle engine. Energy is of all the instance's GPUs.
"""

import csv
from collections.abc import Sequence

import numpy as np

from perseus.serving.errors import ServingError
from perseus.serving.model import MeasuredStep, StepModel, fit_step_model

_COLUMNS = ("clock_mhz", "prefill_tokens", "decoding_count", "context_tokens", "time_s", "energy_j")
_MAX_CLOCKS = 16
"""To choose from: neighbours among more differ by less than the model errs."""


def read_profile(text: str, name: str) -> StepModel:
    """Return the model of a profile; `name` is for error messages.

    Raises:
        ServingError: names the line, and what was expected and found.
    """
    reader = csv.DictReader(text.splitlines())
    if reader.fieldnames is None or not set(_COLUMNS) <= set(reader.fieldnames):
        raise ServingError(f"{name}: line 1: expected columns {', '.join(_COLUMNS)}, found {text[:100]!r}")
    steps, idle_w = [], []
    for row in reader:
        try:
            clock, prefill, decoding, context, time_s, energy_j = (float(row[each]) for each in _COLUMNS)
            step = MeasuredStep(int(clock), prefill, decoding, context, time_s, energy_j)
            is_fine = step.time_s > 0 and step.energy_j > 0
        except (TypeError, ValueError, OverflowError):
            is_fine = False
        if not is_fine:
            found = ",".join(str(row[each]) for each in _COLUMNS)[:200]
            raise ServingError(
                f"{name}: line {reader.line_num}: expected numbers, time and energy above 0, found {found!r}"
            )
        if step.tokens:
            steps.append(step)
        else:
            idle_w.append(step.energy_j / step.time_s)
    if not idle_w:
        raise ServingError(f"{name}: expected a row of the idle engine, without tokens, found none")
    try:
        return fit_step_model(steps, sum(idle_w) / len(idle_w))
    except ServingError as error:
        raise ServingError(f"{name}: {error}") from None


def for_gpu(steps: StepModel, supported_mhz: Sequence[int]) -> StepModel:
    """Return the model at clocks to choose from, the highest of which is the GPU's.

    Raises:
        ServingError: the profile does not reach the GPU's highest clock.
    """
    highest = max(supported_mhz)
    lowest_known, highest_known = steps.clocks_mhz[0], steps.clocks_mhz[-1]
    within = sorted(clock for clock in set(supported_mhz) if lowest_known <= clock <= highest_known)
    if len(within) < 2 or within[-1] != highest:
        raise ServingError(
            f"profile: expected steps up to the GPU's highest clock, {highest} MHz, "
            f"found {lowest_known} to {highest_known} MHz"
        )
    chosen = np.linspace(0, len(within) - 1, min(_MAX_CLOCKS, len(within))).round().astype(int)
    return steps.at_clocks([within[index] for index in chosen])
