"""A margin for noisy measurements, so that a plan keeps its iteration time with a stated probability.

All times of a kind of computation on a stage are taken to have the same error, a part of which is common
to all stages (`Measurement.time_common_se_s`), and an iteration is as long as its longest path. A plan makes
many paths equally long, so that most of the time one of them is longer than expected, even if each alone has
the expected length. So plans are made on times that are longer by a margin of some standard errors each.
Emulation determines how many: draw errors, replay the plans that are given out, and see how late they are.
Plans with another margin are other plans, so `perseus.solver.solve` repeats this until all of them keep their
times.

A GPU that finishes before its margin is used up waits. The planned energy includes that wait.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from perseus.solver.columns import Columns
from perseus.solver.computation import Kind
from perseus.solver.errors import SolverError
from perseus.solver.graph import build_event_graph
from perseus.solver.pipeline import Pipeline
from perseus.solver.plan import Plan
from perseus.solver.profile import Measurement
from perseus.solver.setting import Setting

FloatArray = NDArray[np.float64]

_SEED = 0
_LATE_DRAWS = 50
"""Draws that may be late: their share is then known to a seventh (one standard deviation)."""
_MAX_DRAWS = 20_000
_MAX_CELLS = 1_000_000
"""Computations times draws that are replayed at once."""
_MAX_TOTAL_PS = 2.0**62
"""Of all computations; what comes before and between them has as much, so that no sum overflows."""

MAX_CONFIDENCE = _MAX_DRAWS / (_MAX_DRAWS + 4)
"""The most that so many draws show if none of them may be late, less two standard deviations."""

_ERROR_STEP = 0.02
"""Margins to choose from are multiples of this, in standard errors."""

_FIRST_SHARE = 0.5
"""The first margin, as a share of what a single computation needs: errors of several average out."""


@dataclass(frozen=True, slots=True)
class Margin:
    """The margin that was added to measured times.

    Attributes:
        confidence: the probability with which a plan keeps its iteration time: the requested one, at most
            `MAX_CONFIDENCE`.
        error_count: standard errors added to each time.
        time_share: the resulting increase of the all-max iteration time, as a share.
    """

    confidence: float
    error_count: float
    time_share: float


def check_confidence(confidence: float) -> None:
    """Refuse what is no confidence.

    Raises:
        SolverError: it is no probability from 0.5 to below 1.
    """
    if not 0.5 <= confidence < 1:
        raise SolverError(
            f"confidence: expected a probability from 0.5 to less than 1, found {confidence}",
            found=confidence,
        )


def has_errors(pipeline: Pipeline) -> bool:
    """Return whether the standard error of any time is known."""
    return any(m.time_se_s for some in pipeline.profiles.values() for m in some)


def first_error_count(confidence: float) -> float:
    """Return the margin to begin with, in standard errors; most plans need more."""
    return _FIRST_SHARE * NormalDist().inv_cdf(confidence)


def padded(pipeline: Pipeline, error_count: float) -> Pipeline:
    """Return the pipeline with ``error_count`` standard errors added to each time.

    The result has no standard errors of times, since the margin accounts for them.
    """

    def pad(stage: int, m: Measurement) -> Measurement:
        more_s = error_count * m.time_se_s
        waiting_j = pipeline.blocking_power_w[stage] * more_s
        return replace(
            m,
            time_s=m.time_s + more_s,
            energy_j=m.energy_j + waiting_j,
            time_se_s=0.0,
            time_common_se_s=0.0,
        )

    return replace(
        pipeline,
        profiles={key: tuple(pad(key[0], m) for m in some) for key, some in pipeline.profiles.items()},
    )


class Emulation:
    """Replays plans on times as they may truly be, given the measured ones and their standard errors.

    Raises:
        SolverError: errors are so large, compared with the times, that replayed times overflow.
    """

    def __init__(self, pipeline: Pipeline, confidence: float) -> None:
        graph = build_event_graph(pipeline)
        self._columns, self._ps_per_s = Columns(graph), graph.scale.ps_per_s
        self._computations = [graph.computations[k] for k in self._columns.computation_of.tolist()]
        times: dict[object, Mapping[int | Setting, tuple[float, float, float]]] = {
            key: {m.setting: (m.time_s, m.time_se_s, m.time_common_se_s) for m in some}
            for key, some in pipeline.profiles.items()
        } | {c: {0: (time_s, 0.0, 0.0)} for c, time_s in pipeline.fixed_times_s.items()}
        keys = [c if c.kind is Kind.FIXED else (c.stage, c.chunk, c.kind) for c in self._computations]
        self._times = [times[key] for key in keys]
        # What is the same measurement, as a profile that several nodes of a graph share, has the same error.
        measured = {key: tuple(some.items()) for key, some in times.items()}
        row_of = {some: row for row, some in enumerate(dict.fromkeys(measured.values()))}
        self._error_of = np.array([row_of[measured[key]] for key in keys])
        count = min(_MAX_DRAWS, math.ceil(_LATE_DRAWS / (1 - confidence)))
        # Sure in spite of the limited number of draws: by two standard deviations.
        self._quantile = min(1.0, confidence + 2 * math.sqrt(confidence * (1 - confidence) / count))
        self._errors = np.random.default_rng(_SEED).standard_normal((1 + len(row_of), count))
        # In a draw, no time is later by more standard errors than this, whatever part of them is common
        # (Cauchy-Schwarz). So some margin is always enough; one step more allows for rounding.
        most = float(np.hypot(self._errors[:-1].max(axis=0), self._errors[-1]).max()) + _ERROR_STEP
        self._error_counts = np.arange(0.0, most + _ERROR_STEP, _ERROR_STEP)
        longest_s = {
            key: max(m[0] + self._error_counts[-1] * m[1] for m in some.values())
            for key, some in times.items()
        }
        total_s = sum(longest_s[key] for key in keys)
        if total_s > (max_s := _MAX_TOTAL_PS / self._ps_per_s):
            raise SolverError(
                f"time_se_s: expected standard errors with which all computations may take "
                f"{max_s:g} s together at most, found {total_s:g} s",
                found=total_s,
            )

    def error_count(self, plans: Iterable[Plan]) -> float:
        """Return the least margin, in standard errors, with which all plans keep their times."""
        return max(map(self._needed, plans))

    def _needed(self, plan: Plan) -> float:
        settings = plan.settings
        chosen = [some[settings.get(c, 0)] for c, some in zip(self._computations, self._times, strict=True)]
        times_s, errors_s, common_s = np.array(chosen).T[:, :, None]
        own_s = np.sqrt(np.maximum(errors_s**2 - common_s**2, 0.0))
        drawn_s = []
        step = max(1, _MAX_CELLS // len(times_s))
        for begin in range(0, self._errors.shape[1], step):
            own, common = self._errors[:-1, begin : begin + step], self._errors[-1, begin : begin + step]
            drawn_s.append(self._ends_s(times_s + own_s * own[self._error_of] + common_s * common))
        kept_s = float(np.quantile(np.concatenate(drawn_s), self._quantile))
        padded_s = self._ends_s(times_s + errors_s * self._error_counts)
        return float(self._error_counts[np.searchsorted(padded_s, kept_s)])

    def _ends_s(self, durations_s: FloatArray) -> FloatArray:
        """Return the iteration times of durations, a row per computation and a column per iteration."""
        durations_ps = np.rint(np.maximum(durations_s, 0.0) * self._ps_per_s).astype(np.int64)
        ends_s: FloatArray = self._columns.earliest_finishes_ps(durations_ps).max(axis=0) / self._ps_per_s
        return ends_s
