"""The public names, for the other packages."""

import subprocess
import sys

import perseus.solver
from perseus.solver import study


def test_public_names() -> None:
    assert sorted(perseus.solver.__all__) == [
        "BlockingPower",
        "Computation",
        "ComputationGraph",
        "DeadlineError",
        "Frontier",
        "FrontierPoint",
        "Kind",
        "LagError",
        "LatencyReplay",
        "MAX_CLOCK_MHZ",
        "MAX_CONFIDENCE",
        "MAX_LAYER_COUNT",
        "MAX_POWER_W",
        "MAX_TIME_S",
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
        "blocking_of_stages",
        "common_lag_s",
        "dual_pipe_v",
        "dwell",
        "early_recomputation",
        "explaining_lag_s",
        "fastest_clock_plan",
        "gpipe",
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
    assert all(hasattr(perseus.solver, name) for name in perseus.solver.__all__)


def test_public_names_of_studies() -> None:
    assert sorted(study.__all__) == [
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
    assert all(hasattr(study, name) for name in study.__all__)
    assert not set(study.__all__) & set(perseus.solver.__all__), "a name has one home"


def test_solver_needs_no_network_libraries() -> None:
    script = (
        "import sys, perseus.solver; print(*(m for m in ('grpc', 'google.protobuf') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
