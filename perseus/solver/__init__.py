"""Time-energy frontiers of pipeline-parallel training: profiles, schedules, the exact sweep, plans.

Pure computation on numpy and igraph. Start at :class:`Pipeline` and :func:`solve`. Code that only offline
studies use is in :mod:`perseus.solver.study`.
"""

from perseus.solver.bounds import MAX_CLOCK_MHZ, MAX_LAYER_COUNT, MAX_POWER_W, MAX_TIME_S
from perseus.solver.change import Recheck, recheck
from perseus.solver.computation import Computation, Kind
from perseus.solver.computation_graph import ComputationGraph, Node
from perseus.solver.dwell import dwell
from perseus.solver.errors import (
    DeadlineError,
    LagError,
    PipelineError,
    ProfileError,
    ScheduleError,
    SolverError,
)
from perseus.solver.frontier import Frontier, FrontierPoint, Refinement, plan_at, solve, with_margin
from perseus.solver.lag import common_lag_s, explaining_lag_s, predicted_iteration_time_s, with_lag
from perseus.solver.latency import LatencyReplay, replay_with_latency
from perseus.solver.margin import MAX_CONFIDENCE, Margin
from perseus.solver.measurements import interpolate_clocks, merge_measurements
from perseus.solver.named_schedules import (
    dual_pipe_v,
    early_recomputation,
    gpipe,
    interleaved_one_forward_one_backward,
    max_computations,
    named_schedule,
    one_forward_one_backward,
    zero_bubble_h1,
    zero_bubble_v,
)
from perseus.solver.pipeline import Pipeline, ProfileKey
from perseus.solver.plan import Plan, PlannedComputation, fastest_clock_plan, replay, waiting_saved_j
from perseus.solver.profile import MeasuredSetting, Measurement, highest, round_estimate
from perseus.solver.profile_csv import read_profile_csv
from perseus.solver.rebalancing import Partition, Rebalancing, layers_along_path, rebalance
from perseus.solver.schedule import Path, Schedule
from perseus.solver.setting import Setting
from perseus.solver.shrinkage import shrink, shrink_profiles
from perseus.solver.variation import Variation
from perseus.solver.waiting import BlockingPower, blocking_of_stages

__all__ = [
    "MAX_CLOCK_MHZ",
    "MAX_CONFIDENCE",
    "MAX_LAYER_COUNT",
    "MAX_POWER_W",
    "MAX_TIME_S",
    "BlockingPower",
    "Computation",
    "ComputationGraph",
    "DeadlineError",
    "Frontier",
    "FrontierPoint",
    "Kind",
    "LagError",
    "LatencyReplay",
    "Margin",
    "MeasuredSetting",
    "Measurement",
    "Node",
    "Partition",
    "Path",
    "Pipeline",
    "PipelineError",
    "Plan",
    "PlannedComputation",
    "ProfileError",
    "ProfileKey",
    "Rebalancing",
    "Recheck",
    "Refinement",
    "Schedule",
    "ScheduleError",
    "Setting",
    "SolverError",
    "Variation",
    "blocking_of_stages",
    "common_lag_s",
    "dual_pipe_v",
    "dwell",
    "early_recomputation",
    "explaining_lag_s",
    "fastest_clock_plan",
    "gpipe",
    "highest",
    "interleaved_one_forward_one_backward",
    "interpolate_clocks",
    "layers_along_path",
    "max_computations",
    "merge_measurements",
    "named_schedule",
    "one_forward_one_backward",
    "plan_at",
    "predicted_iteration_time_s",
    "read_profile_csv",
    "rebalance",
    "recheck",
    "replay",
    "replay_with_latency",
    "round_estimate",
    "shrink",
    "shrink_profiles",
    "solve",
    "waiting_saved_j",
    "with_lag",
    "with_margin",
    "zero_bubble_h1",
    "zero_bubble_v",
]
