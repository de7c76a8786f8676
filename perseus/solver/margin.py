"""A margin for noisy measurements, so that a plan keeps its iteration time with a stated probability.

The times of all computations of a kind on a stage share one error, and an iteration is as long as its longest
path. A plan makes many paths equally long, so that most of the time one of them is longer than expected, even
if each alone has the expected length. So plans are made on times that are longer by a margin of some standard
errors each. Emulation determines how many: make a short and a long plan with approximately the needed margin,
draw errors, replay both, and derive the number from how late they are.

A GPU that finishes before its margin is used up waits. The planned energy includes that wait.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from perseus.solver.columns import Columns
from perseus.solver.errors import SolverError
from perseus.solver.graph import EventGraph, build_event_graph
from perseus.solver.pipeline import Pipeline, ProfileKey
from perseus.solver.plan import fastest_clock_plan
from perseus.solver.profile import Measurement
from perseus.solver.realisation import Realiser
from perseus.solver.setting import Setting
from perseus.solver.sweep import sweep_frontier

FloatArray = NDArray[np.float64]

_SAMPLE_COUNT = 400
_SEED = 0
_PROBES = (1.0, 1.1)
"""Iteration times of the emulated plans, as factors of the shortest."""

_MIN_TRIED = 0.5
_MAX = 4.0
"""Standard errors."""


@dataclass(frozen=True, slots=True)
class Margin:
    """The margin that was added to measured times.

    Attributes:
        confidence: the probability with which a plan keeps its iteration time.
        error_count: standard errors added to each time.
        time_share: the resulting increase of the all-max iteration time, as a share.
    """

    confidence: float
    error_count: float
    time_share: float


def with_margin(pipeline: Pipeline, confidence: float) -> tuple[Pipeline, Margin | None]:
    """Return the pipeline with times that plans keep with this probability, and the margin.

    The result has no standard errors of times, since the margin accounts for them. If none were known, the
    pipeline is returned unchanged, without a margin.

    Raises:
        SolverError: the confidence is no probability from 0.5 to below 1.
    """
    if not 0.5 <= confidence < 1:
        raise SolverError(
            f"confidence: expected a probability from 0.5 to less than 1, found {confidence}",
            found=confidence,
        )
    if not any(m.time_se_s for some in pipeline.profiles.values() for m in some):
        return pipeline, None
    tried = max(_MIN_TRIED, NormalDist().inv_cdf(confidence))
    error_count = min(_MAX, max(0.0, tried * _share_needed(pipeline, tried, confidence)))
    padded = _padded(pipeline, error_count)
    time_share = _all_max_s(padded) / _all_max_s(pipeline) - 1
    return padded, Margin(confidence, error_count, time_share)


def _padded(pipeline: Pipeline, error_count: float) -> Pipeline:
    """Return the pipeline with ``error_count`` standard errors added to each time."""

    def pad(stage: int, m: Measurement) -> Measurement:
        more_s = error_count * m.time_se_s
        waiting_j = pipeline.blocking_power_w[stage] * more_s
        return replace(m, time_s=m.time_s + more_s, energy_j=m.energy_j + waiting_j, time_se_s=0.0)

    return replace(
        pipeline,
        profiles={key: tuple(pad(key[0], m) for m in some) for key, some in pipeline.profiles.items()},
    )


def _all_max_s(pipeline: Pipeline) -> float:
    return fastest_clock_plan(pipeline).iteration_time_s


def _share_needed(pipeline: Pipeline, error_count: float, confidence: float) -> float:
    """Return the share of ``error_count`` standard errors that the most demanding plan needs."""
    graph = build_event_graph(_padded(pipeline, error_count))
    realiser = Realiser(graph)
    emulate = _emulator(pipeline, graph, realiser.columns, error_count)
    sweep = sweep_frontier(graph)
    shares = []
    for factor in _PROBES:
        deadline_ps = min(round(factor * sweep.t_min_ps), sweep.t_slow_ps)
        expected_s, padded_s, drawn_s = emulate(realiser.rounded(sweep.event_times_at(deadline_ps)))
        late_s = float(np.quantile(drawn_s, confidence)) - expected_s
        shares.append(late_s / (padded_s - expected_s) if padded_s > expected_s else 0.0)
    return max(shares)


def _emulator(
    pipeline: Pipeline, graph: EventGraph, columns: Columns, error_count: float
) -> Callable[[Sequence[int]], tuple[float, float, FloatArray]]:
    """Return a function from chosen options to iteration times: expected, with the margin, and drawn."""
    measured: Mapping[ProfileKey, Mapping[int | Setting, Measurement]] = {
        key: {m.setting: m for m in some} for key, some in pipeline.profiles.items()
    }
    row_of = {key: row for row, key in enumerate(measured)}
    drawn = np.random.default_rng(_SEED).standard_normal((len(measured), _SAMPLE_COUNT))
    # Errors, in standard errors: none, the margin's, the draws. The last row is for times without an error.
    errors = np.zeros((len(measured) + 1, 2 + _SAMPLE_COUNT))
    errors[:-1, 1] = error_count
    errors[:-1, 2:] = drawn

    def emulate(choice: Sequence[int]) -> tuple[float, float, FloatArray]:
        times_s, deviations_s, rows = [], [], []
        for c, profile, option in zip(graph.computations, graph.profile_of, choice, strict=True):
            by_setting = measured.get((c.stage, c.chunk, c.kind))
            if by_setting is None:
                times_s.append(pipeline.fixed_times_s[c])
                deviations_s.append(0.0)
                rows.append(-1)
            else:
                m = by_setting[graph.options[profile][option].setting]
                times_s.append(m.time_s)
                deviations_s.append(m.time_se_s)
                rows.append(row_of[c.stage, c.chunk, c.kind])
        durations_s = np.array(times_s)[:, None] + np.array(deviations_s)[:, None] * errors[rows]
        durations_ps = np.rint(durations_s * graph.scale.ps_per_s).astype(np.int64)[columns.computation_of]
        ends_s = columns.earliest_finishes_ps(durations_ps).max(axis=0) / graph.scale.ps_per_s
        return float(ends_s[0]), float(ends_s[1]), ends_s[2:]

    return emulate
