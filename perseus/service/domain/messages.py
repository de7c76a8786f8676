"""Conversions from values to the contract's messages, for the state machines' events and the API's responses.

The adapters in `service/api` convert and check incoming messages; only times are read here, next to their
counterpart.
"""

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from perseus.schedule_name import ScheduleName
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.measured import MeasuredTimeline, Saving
from perseus.service.domain.model import (
    FaultyPart,
    GpuErrorReason,
    JobState,
    NoSlowdownBasis,
    RankLeftReason,
    RankState,
    RefusalReason,
)
from perseus.service.domain.power import BudgetStage
from perseus.service.domain.profiling import (
    ClockGivenUpReason,
    ProfilingBudget,
    ProfilingCost,
    ProfilingLimit,
)
from perseus.service.domain.signals import SignalKind, SignalTarget, SignalTargetState
from perseus.service.domain.specification import (
    Coordinates,
    JobSpec,
    NamedSchedule,
    OperatingPolicy,
    Parallelism,
    ScheduleSpec,
)
from perseus.service.domain.stall import StallReason
from perseus.service.domain.telemetry import KINDS, ForeignClock
from perseus.solver import (
    Computation,
    ComputationGraph,
    Frontier,
    FrontierPoint,
    Kind,
    Measurement,
    Partition,
    Path,
    Pipeline,
    Plan,
    Rebalancing,
    common_lag_s,
)
from perseus.v1 import (
    computation_pb2,
    event_pb2,
    frontier_pb2,
    job_pb2,
    job_service_pb2,
    power_service_pb2,
    rank_pb2,
)

_CONTRACT: Mapping[type[enum.Enum], Any] = {
    BudgetStage: power_service_pb2.BudgetState,
    ClockGivenUpReason: event_pb2.ClockGivenUpReason,
    FaultyPart: event_pb2.FaultyPart,
    GpuErrorReason: rank_pb2.GpuErrorReason,
    JobState: job_pb2.JobState,
    Kind: computation_pb2.ComputationKind,
    NoSlowdownBasis: job_pb2.NoSlowdownBasis,
    SignalTargetState: job_pb2.SignalTargetState,
    ProfilingLimit: event_pb2.ProfilingLimit,
    RankLeftReason: rank_pb2.RankLeftReason,
    RankState: rank_pb2.RankState,
    RefusalReason: rank_pb2.PlanRefusalReason,
    ScheduleName: computation_pb2.ScheduleName,
    SignalKind: event_pb2.SignalKind,
    StallReason: event_pb2.StallReason,
}

NUMBERS: Mapping[enum.Enum, Any] = {
    member: contract.Value(contract.DESCRIPTOR.values[0].name.removesuffix("UNSPECIFIED") + member.name)
    for members, contract in _CONTRACT.items()
    for member in members
}
"""The contract's number of each enumeration member, found by its name."""

_KEPT_NAME = 200
"""Characters of a profile's name before a number is added: names have at most 256."""

_MIN_TIME_S = -62_135_596_800
_MAX_TIME_S = 253_402_300_799
"""The contract of Timestamp: 0001-01-01T00:00:00Z to 9999-12-31T23:59:59Z."""


def time_to_proto(time_s: float) -> Timestamp:
    """Return a time, to the nanosecond: `time_from_proto` gives the same float back."""
    whole_s = math.floor(time_s)
    nanos = round((time_s - whole_s) * 1e9)
    return Timestamp(seconds=whole_s + nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


def time_from_proto(field: str, message: Timestamp) -> float:
    """Return a time, seconds since 1970.

    Raises:
        InvalidFieldError: it is outside the years 1 to 9999.
    """
    if not (_MIN_TIME_S <= message.seconds <= _MAX_TIME_S and 0 <= message.nanos < 1_000_000_000):
        found = f"{message.seconds} s and {message.nanos} ns"
        raise InvalidFieldError(field=field, expected="a time of the years 1 to 9999", found=found)
    return message.seconds + message.nanos / 1e9


def coordinates_to_proto(rank: Coordinates) -> rank_pb2.RankCoordinates:
    """Return a rank's coordinates."""
    return rank_pb2.RankCoordinates(pipeline=rank.pipeline, stage=rank.stage, tensor=rank.tensor)


def foreign_clock_to_proto(clock: ForeignClock | None) -> rank_pb2.ForeignClock | None:
    """Return the clock at which another client holds a GPU, if one does."""
    if clock is None:
        return None
    return rank_pb2.ForeignClock(clock_mhz=clock.clock_mhz, wanted_clock_mhz=clock.wanted_mhz)


def parallelism_to_proto(counts: Parallelism) -> job_pb2.Parallelism:
    """Return the layout of a job's ranks."""
    return job_pb2.Parallelism(
        pipeline_count=counts.pipeline_count,
        stage_count=counts.stage_count,
        tensor_count=counts.tensor_count,
    )


def cost_to_proto(cost: ProfilingCost) -> job_pb2.ProfilingCost:
    """Return the cost of profiling."""
    return job_pb2.ProfilingCost(
        iteration_count=cost.iteration_count,
        time_s=cost.time_s,
        extra_time_s=cost.extra_time_s,
        energy_j=cost.energy_j,
        extra_energy_j=cost.extra_energy_j,
    )


def signal_target_to_proto(signal_target: SignalTarget) -> job_pb2.SignalTarget:
    """Return how a job follows a signal."""
    return job_pb2.SignalTarget(
        state=NUMBERS[signal_target.state],
        start_time=time_to_proto(signal_target.window.begin_s),
        end_time=time_to_proto(signal_target.window.end_s),
        iteration_count=signal_target.window.iteration_count,
        done_count=signal_target.done_count,
        iteration_time_s=signal_target.target_time_s,
        value_per_kwh=signal_target.value,
    )


def policy_to_proto(policy: OperatingPolicy) -> job_pb2.OperatingPolicy:
    """Return the policy."""
    message = job_pb2.OperatingPolicy()
    if (deadline := policy.deadline) is not None:
        message.deadline.iteration_count = deadline.iteration_count
        message.deadline.time_s = deadline.time_s
    elif policy.max_average_power_w is not None:
        message.max_average_power_w = policy.max_average_power_w
    elif (rule := policy.signal) is not None:
        minimum = message.least_carbon if rule.kind is SignalKind.CARBON else message.least_cost
        minimum.SetInParent()
        if rule.extra_time is not None:
            minimum.extra_time.percent = rule.extra_time.percent
            minimum.extra_time.horizon_s = rule.extra_time.horizon_s
        if rule.work_until is not None:
            minimum.work_until.iteration_count = rule.work_until.iteration_count
            minimum.work_until.end_time.CopyFrom(time_to_proto(rule.work_until.end_s))
    elif policy.max_slowdown_percent == 0:
        message.no_slowdown.SetInParent()
    else:
        message.max_slowdown_percent = policy.max_slowdown_percent
    if (terms := policy.budget_terms) is not None:
        message.budget_terms.tolerance_percent = terms.tolerance_percent
        message.budget_terms.weight = terms.weight
    return message


def budget_to_proto(budget: ProfilingBudget) -> job_pb2.ProfilingBudget:
    """Return the budget of profiling; an infinite figure becomes an absent field."""

    def limit(figure: float) -> float | None:
        return None if math.isinf(figure) else figure

    count = limit(budget.iteration_count)
    return job_pb2.ProfilingBudget(
        iteration_count=None if count is None else int(count),
        time_s=limit(budget.time_s),
        extra_time_s=limit(budget.extra_time_s),
        extra_energy_j=limit(budget.extra_energy_j),
    )


def saving_to_proto(saving: Saving) -> job_pb2.Saving:
    """Return the saving against stock."""
    return job_pb2.Saving(
        baseline_period_number=saving.baseline_number,
        energy_percent=saving.energy_percent,
        energy_se_percent=saving.energy_se_percent,
        slowdown_percent=saving.slowdown_percent,
        slowdown_se_percent=saving.slowdown_se_percent,
        energy_margin_percent=saving.energy_margin_percent,
        slowdown_margin_percent=saving.slowdown_margin_percent,
    )


def spec_to_proto(spec: JobSpec) -> job_pb2.JobSpec:
    """Return a job as it was registered."""
    return job_pb2.JobSpec(
        job_id=spec.job_id,
        parallelism=parallelism_to_proto(spec.parallelism),
        schedule=schedule_spec_to_proto(spec.schedule),
        policy=policy_to_proto(spec.policy),
        stage_work=[
            job_pb2.StageWork(fingerprint=fingerprint, layer_counts=layers)
            for fingerprint, layers in zip(
                spec.stage_work or ("",) * len(spec.stage_layers),
                spec.stage_layers or ((),) * len(spec.stage_work),
                strict=True,
            )
        ],
    )


def computation_to_proto(computation: Computation) -> computation_pb2.Computation:
    """Return the computation without its stage, which the wire gives by position."""
    return computation_pb2.Computation(
        kind=NUMBERS[computation.kind], microbatch=computation.microbatch, chunk=computation.chunk
    )


def order_to_proto(order: Iterable[Computation]) -> computation_pb2.StageOrder:
    """Return one stage's order."""
    return computation_pb2.StageOrder(
        computations=[computation_to_proto(computation) for computation in order]
    )


def schedule_spec_to_proto(spec: ScheduleSpec) -> computation_pb2.Schedule:
    """Return the schedule in the form in which it was registered."""
    if isinstance(spec, NamedSchedule):
        return computation_pb2.Schedule(
            named=computation_pb2.NamedSchedule(
                name=NUMBERS[spec.name],
                microbatch_count=spec.microbatch_count,
                chunk_count=spec.chunk_count,
            )
        )
    return schedule_to_proto(spec.orders, spec.paths)


def schedule_to_proto(
    orders: Sequence[Sequence[Computation]], paths: Sequence[Path]
) -> computation_pb2.Schedule:
    """Return explicit orders, stage 0 first, and how activations flow."""
    return computation_pb2.Schedule(
        explicit=computation_pb2.ExplicitSchedule(
            stages=[order_to_proto(order) for order in orders],
            paths=[
                computation_pb2.Path(
                    steps=[computation_pb2.PathStep(stage=stage, chunk=chunk) for stage, chunk in path]
                )
                for path in paths
            ],
        )
    )


def problem_to_proto(problem: Pipeline) -> frontier_pb2.PipelineProblem:
    """Return a problem, with one lag for all transfers and one time for a stage and chunk's FIXED work.

    Raises:
        PipelineError: its transfers have different lags, or it has extra lags.
    """
    message = frontier_pb2.PipelineProblem(
        schedule=schedule_to_proto(problem.schedule.orders, problem.schedule.paths),
        stage_count=problem.schedule.stage_count,
        blocking_power_w=problem.blocking_power_w,
        transfer_lag_s=common_lag_s(problem),
        blocking_powers=[
            frontier_pb2.BlockingPowers(clock_mhz=by_clock.keys(), power_w=by_clock.values())
            for by_clock in problem.blocking_powers_w
        ],
    )
    for stage, chunk, kind in sorted(problem.profiles):
        message.profiles.add(
            stage=stage,
            chunk=chunk,
            kind=NUMBERS[kind],
            measurements=_measurements_to_proto(problem.profiles[stage, chunk, kind]),
        )
    fixed_s = {(c.stage, c.chunk): time_s for c, time_s in sorted(problem.fixed_times_s.items())}
    for (stage, chunk), time_s in fixed_s.items():
        message.profiles.add(stage=stage, chunk=chunk, kind=NUMBERS[Kind.FIXED]).measurements.add(
            time_s=time_s, energy_j=time_s * problem.blocking_power_w[stage]
        )
    return message


def _measurements_to_proto(measurements: Iterable[Measurement]) -> Iterable[frontier_pb2.Measurement]:
    return (
        frontier_pb2.Measurement(
            clock_mhz=m.clock_mhz,
            time_s=m.time_s,
            energy_j=m.energy_j,
            time_se_s=m.time_se_s,
            energy_se_j=m.energy_se_j,
        )
        for m in measurements
    )


def graph_to_proto(graph: ComputationGraph, solved: Pipeline) -> frontier_pb2.GraphProblem:
    """Return a graph with the measurements of its pipeline as it was solved.

    A margin may make those of a profile differ between resources; then these have a profile each.
    """
    message = frontier_pb2.GraphProblem(
        resources=[
            frontier_pb2.GraphResource(name=name, blocking_power_w=power_w)
            for name, power_w in graph.resources.items()
        ],
        edges=[
            frontier_pb2.GraphEdge(earlier=earlier, later=later, lag_s=lag_s)
            for (earlier, later), lag_s in graph.edges.items()
        ],
    )
    written: dict[str, tuple[Measurement, ...]] = {}
    for name, node in graph.nodes.items():
        c = graph.computations[name]
        measurements, profile, number = solved.profiles[c.stage, c.chunk, c.kind], node.profile, 1
        while written.setdefault(profile, measurements) != measurements:
            number += 1
            profile = f"{node.profile[:_KEPT_NAME]} ({number})"
        message.nodes.add(name=name, profile=profile, resource=node.resource)
    for name, measurements in written.items():
        message.profiles.add(name=name, measurements=_measurements_to_proto(measurements))
    return message


def frontier_to_proto(frontier: Frontier, graph: ComputationGraph | None = None) -> frontier_pb2.Frontier:
    """Return a frontier, with all that is needed for a plan of another iteration time.

    With the graph that it is of, if it is not of a pipeline.
    """
    return frontier_pb2.Frontier(
        problem=problem_to_proto(frontier.pipeline) if graph is None else None,
        graph=graph_to_proto(graph, frontier.pipeline) if graph is not None else None,
        baseline=_cost_to_proto(frontier.baseline),
        points=[_point_to_proto(point) for point in frontier.points],
        t_min_s=frontier.t_min_s,
        t_star_s=frontier.t_star_s,
        t_slow_s=frontier.t_slow_s,
        t_star_index=frontier.t_star_index,
        set_latency_s=frontier.set_latency_s,
        confidence=frontier.margin.confidence if frontier.margin else 0.0,
        margin_time_percent=100 * frontier.margin.time_share if frontier.margin else 0.0,
    )


def rebalancing_to_proto(found: Rebalancing) -> frontier_pb2.Rebalancing:
    """Return what moving layers would bring."""
    stock = found.present.frontier.baseline
    first_share, last_share = found.fixed_shares
    return frontier_pb2.Rebalancing(
        stock=_cost_to_proto(stock),
        present=_partition_to_proto(found, found.present),
        steps=[_partition_to_proto(found, step) for step in found.steps],
        other=_partition_to_proto(found, found.other) if found.other is not None else None,
        first_fixed_percent=100 * first_share,
        last_fixed_percent=100 * last_share,
    )


def _partition_to_proto(found: Rebalancing, partition: Partition) -> frontier_pb2.Partition:
    frontier, plan = partition.frontier, partition.plan
    move = None
    if partition.move is not None:
        (from_stage, from_chunk), (to_stage, to_chunk) = (found.path[place] for place in partition.move)
        move = frontier_pb2.LayerMove(
            from_stage=from_stage, from_chunk=from_chunk, to_stage=to_stage, to_chunk=to_chunk
        )
    return frontier_pb2.Partition(
        layer_counts=partition.layers,
        move=move,
        fastest=_point_to_proto(frontier.points[0]),
        plan=frontier_pb2.FrontierPoint(
            iteration_time_s=plan.iteration_time_s,
            energy_j=plan.energy_j,
            bound_energy_j=frontier.bound_energy_j(plan.iteration_time_s),
        ),
        clocks_alone=_cost_to_proto(partition.clocks_alone),
    )


def _cost_to_proto(plan: Plan) -> frontier_pb2.IterationCost:
    return frontier_pb2.IterationCost(iteration_time_s=plan.iteration_time_s, energy_j=plan.energy_j)


def _point_to_proto(point: FrontierPoint) -> frontier_pb2.FrontierPoint:
    return frontier_pb2.FrontierPoint(
        iteration_time_s=point.iteration_time_s,
        energy_j=point.energy_j,
        bound_energy_j=point.bound_energy_j,
        latency_cost_j=point.latency_cost_j,
    )


def timeline_to_proto(measured: MeasuredTimeline) -> job_service_pb2.GetTimelineResponse:
    """Return an iteration, with each stage's computations in the order of their start."""
    timeline = measured.timeline
    response = job_service_pb2.GetTimelineResponse(
        iteration=timeline.iteration,
        iteration_time_s=timeline.iteration_time_s,
        pipeline=measured.pipeline,
        blocking_power_w=measured.blocking_power_w,
    )
    for stage, columns in enumerate(timeline.stages):
        for row in sorted(range(len(columns.begin_s)), key=columns.begin_s.__getitem__):
            computation = Computation(
                stage, KINDS[columns.kind[row]], columns.microbatch[row], columns.chunk[row]
            )
            response.entries.add(
                stage=stage,
                computation=computation_to_proto(computation),
                start_s=columns.begin_s[row],
                duration_s=columns.duration_s[row],
                clock_mhz=columns.clock_mhz[row],
                power_w=measured.powers.at(
                    stage, (computation.chunk, computation.kind), columns.clock_mhz[row]
                ),
            )
    return response
