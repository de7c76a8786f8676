"""Synthetic engines: compute-bound with a fixed part per step, as a transformer's steps are."""

from itertools import product

from perseus.serving.model import MeasuredStep, StepModel, fit_step_model
from perseus.serving.stats import EngineLimits, LatencyObjective, Objectives

CLOCKS_MHZ = (510, 750, 990, 1200, 1410)
LIMITS = EngineLimits(max_batched_tokens=512, kv_capacity_tokens=100_000)
OBJECTIVES = Objectives(LatencyObjective(99, 2.0), LatencyObjective(95, 0.1))


def step(clock_mhz: int, prefill: float, decoding: float, context: float) -> MeasuredStep:
    """20 ms for the weights, 0.1 ms a token at the highest clock; 80 W, and up to 220 W more."""
    slower = 1410 / clock_mhz
    time_s = 0.015 + 0.005 * slower + 1e-4 * (prefill + decoding) * slower + 5e-8 * context
    watts = 80 + 220 * (clock_mhz / 1410) ** 2.5
    return MeasuredStep(clock_mhz, prefill, decoding, context, time_s, watts * time_s)


def measured() -> list[MeasuredStep]:
    """Return steps with prompts, and without."""
    shapes = [(p, d, c) for p, d, c in product((0, 100, 200, 400), (1, 30, 60), (0, 40_000))]
    return [step(clock_mhz, *shape) for clock_mhz in CLOCKS_MHZ for shape in shapes]


def model() -> StepModel:
    """Return the model of these steps, at their clocks; 60 W when idle."""
    return fit_step_model(measured(), 60.0)
