"""Baselines for plans, an emulated cluster to try them on, and fits of lags: for offline studies.

No running job uses it. Built on :mod:`perseus.solver`, which never imports it.
"""

from perseus.solver.study.baselines import envpipe, zeus_global, zeus_per_stage
from perseus.solver.study.emulation import (
    EmulatedComputation,
    EmulatedIteration,
    EmulatedPipeline,
    Replicas,
    emulate,
)
from perseus.solver.study.fitting import (
    FittedTimes,
    MeasuredIteration,
    emulated_iteration_time_s,
    fit_times,
    with_fitted_times,
)
from perseus.solver.study.transfers import Transfers, with_occupying_transfers

__all__ = [
    "EmulatedComputation",
    "EmulatedIteration",
    "EmulatedPipeline",
    "FittedTimes",
    "MeasuredIteration",
    "Replicas",
    "Transfers",
    "emulate",
    "emulated_iteration_time_s",
    "envpipe",
    "fit_times",
    "with_fitted_times",
    "with_occupying_transfers",
    "zeus_global",
    "zeus_per_stage",
]
