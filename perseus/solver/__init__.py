"""Time-energy frontiers of pipeline-parallel training: profiles, schedules, the exact sweep, plans.

Pure computation on numpy and igraph. Start at :class:`Pipeline` and :func:`solve`.
"""

from perseus.solver.computation import Computation, Kind
from perseus.solver.errors import DeadlineError, PipelineError, ProfileError, ScheduleError, SolverError
from perseus.solver.frontier import Frontier, FrontierPoint, plan_at, solve
from perseus.solver.pipeline import Pipeline, ProfileKey
from perseus.solver.plan import Plan, PlannedComputation, replay
from perseus.solver.profile import Measurement
from perseus.solver.profile_csv import read_profile_csv
from perseus.solver.schedule import Schedule, gpipe, one_forward_one_backward

__all__ = [
    "Computation",
    "DeadlineError",
    "Frontier",
    "FrontierPoint",
    "Kind",
    "Measurement",
    "Pipeline",
    "PipelineError",
    "Plan",
    "PlannedComputation",
    "ProfileError",
    "ProfileKey",
    "Schedule",
    "ScheduleError",
    "SolverError",
    "gpipe",
    "one_forward_one_backward",
    "plan_at",
    "read_profile_csv",
    "replay",
    "solve",
]
