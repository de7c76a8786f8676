"""Translation of problems (schedules, profiles, frontiers, plans) between the contract and the solver.

Jobs, agents and solves without a job use it.
"""

from collections.abc import Iterable, Mapping

from perseus.schedule_name import ScheduleName
from perseus.service.domain.bounds import (
    MAX_CLOCK_COUNT,
    MAX_DURATION_S,
    MAX_PROFILE_COUNT,
    check_range,
    check_size,
)
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.messages import NUMBERS
from perseus.service.domain.specification import (
    MAX_COMPUTATION_COUNT,
    MAX_STAGE_COUNT,
    ExplicitSchedule,
    NamedSchedule,
    ScheduleSpec,
    build_schedule,
)
from perseus.solver import (
    Computation,
    Kind,
    Measurement,
    Pipeline,
    Plan,
    PlannedComputation,
    ProfileKey,
    with_lag,
)
from perseus.v1 import computation_pb2, frontier_pb2

MAX_SOLVED_CHOICE_COUNT = 2**23
"""Computations times points: about 100 bytes each while they are solved, and 25 in the worker's answer."""

KIND_FROM_PROTO: dict[int, Kind] = {NUMBERS[kind]: kind for kind in Kind}
_SCHEDULE_NAME_FROM_PROTO: dict[int, ScheduleName] = {NUMBERS[name]: name for name in ScheduleName}


# ---------------------------------------------------------------------- computations and schedules


def kind_from_proto(number: int, field: str) -> Kind:
    """Return the kind.

    Raises:
        InvalidFieldError: it is unspecified or unknown.
    """
    try:
        return KIND_FROM_PROTO[number]
    except KeyError:
        raise InvalidFieldError(field=field, expected="a known kind", found=number) from None


def schedule_spec_from_proto(message: computation_pb2.Schedule) -> ScheduleSpec:
    """Return the specification of a schedule.

    Raises:
        InvalidFieldError: it is missing, or has an unknown name or kind.
    """
    match message.WhichOneof("order"):
        case "named":
            name = _SCHEDULE_NAME_FROM_PROTO.get(message.named.name)
            if name is None:
                raise InvalidFieldError(
                    field="schedule.named.name", expected="a known schedule", found=message.named.name
                )
            return NamedSchedule(name, message.named.microbatch_count, message.named.chunk_count)
        case "explicit":
            # Millions of them fit into a message, so their numbers are checked first.
            stages, paths = message.explicit.stages, message.explicit.paths
            check_size("schedule.explicit.stages", len(stages), MAX_STAGE_COUNT)
            check_size("schedule.explicit.paths", len(paths), MAX_COMPUTATION_COUNT)
            if (step_count := sum(len(path.steps) for path in paths)) > MAX_COMPUTATION_COUNT:
                expected = f"at most {MAX_COMPUTATION_COUNT} steps"
                raise InvalidFieldError(field="schedule.explicit.paths", expected=expected, found=step_count)
            computation_count = sum(len(stage.computations) for stage in stages)
            if computation_count > MAX_COMPUTATION_COUNT:
                raise InvalidFieldError(
                    field="schedule.explicit.stages",
                    expected=f"at most {MAX_COMPUTATION_COUNT} computations",
                    found=computation_count,
                )
            return ExplicitSchedule(
                tuple(
                    tuple(
                        Computation(
                            stage,
                            kind_from_proto(
                                computation.kind,
                                f"schedule.explicit.stages[{stage}].computations[{position}].kind",
                            ),
                            computation.microbatch,
                            computation.chunk,
                        )
                        for position, computation in enumerate(order.computations)
                    )
                    for stage, order in enumerate(stages)
                ),
                tuple(tuple((step.stage, step.chunk) for step in path.steps) for path in paths),
            )
        case _:
            raise InvalidFieldError(field="schedule", expected="named or explicit", found="none")


# ---------------------------------------------------------------------- problems, frontiers and plans


def check_problem_size(
    message: frontier_pb2.PipelineProblem, point_count: int, max_computations: int
) -> None:
    """Refuse a problem that is too large to be solved while a client waits.

    Raises:
        InvalidFieldError: names the field.
    """
    check_range("stage_count", message.stage_count, 1, MAX_STAGE_COUNT)
    schedule = message.schedule
    if schedule.WhichOneof("order") == "named":
        field = "problem.schedule.named.microbatch_count"
        spec = schedule_spec_from_proto(schedule)
        assert isinstance(spec, NamedSchedule)
        computation_count = spec.max_computations(message.stage_count)
    else:
        field = "problem.schedule.explicit.stages"
        # Millions of stages fit into a message, too many to count the computations of each.
        check_size(field, len(schedule.explicit.stages), MAX_STAGE_COUNT)
        computation_count = sum(len(stage.computations) for stage in schedule.explicit.stages)
    if computation_count > max_computations:
        expected = f"at most {max_computations} computations"
        raise InvalidFieldError(field=field, expected=expected, found=f"{computation_count} computations")
    if computation_count * point_count > MAX_SOLVED_CHOICE_COUNT:
        maximum = MAX_SOLVED_CHOICE_COUNT // computation_count
        expected = f"at most {maximum} for {computation_count} computations"
        raise InvalidFieldError(field="point_count", expected=expected, found=point_count)


def problem_from_proto(message: frontier_pb2.PipelineProblem) -> Pipeline:
    """Return a problem, checked.

    Raises:
        InvalidFieldError: a part is missing, repeated or out of range.
        SolverError: the solver refuses it.
    """
    return pipeline_from_proto(message, *profiles_from_proto(message))


def profiles_from_proto(
    message: frontier_pb2.PipelineProblem,
) -> tuple[dict[ProfileKey, tuple[Measurement, ...]], dict[tuple[int, int], float]]:
    """Return a problem's profiles, and the time of FIXED computations in s by (stage, chunk).

    Raises:
        InvalidFieldError: a part is repeated or out of range.
        ProfileError: the solver refuses a measurement.
    """
    check_size("profiles", len(message.profiles), MAX_PROFILE_COUNT)
    profiles: dict[ProfileKey, tuple[Measurement, ...]] = {}
    fixed_s: dict[tuple[int, int], float] = {}
    for position, profile in enumerate(message.profiles):
        kind = kind_from_proto(profile.kind, f"profiles[{position}].kind")
        check_size(f"profiles[{position}].measurements", len(profile.measurements), MAX_CLOCK_COUNT)
        key = (profile.stage, profile.chunk, kind)
        if key in profiles or (kind is Kind.FIXED and key[:2] in fixed_s):
            raise InvalidFieldError(
                field=f"profiles[{position}]",
                expected="each stage, chunk and kind once",
                found=f"stage {profile.stage}, chunk {profile.chunk}, {kind.value} again",
            )
        if kind is Kind.FIXED:
            times_s = [m.time_s for m in profile.measurements]
            if len(times_s) != 1 or not 0 <= times_s[0] <= MAX_DURATION_S:
                raise InvalidFieldError(
                    field=f"profiles[{position}].measurements",
                    expected=f"one time of 0 to {MAX_DURATION_S:g}",
                    found=times_s,
                )
            fixed_s[key[:2]] = times_s[0]
        else:
            profiles[key] = measurements_from_proto(profile.measurements)
    return profiles, fixed_s


def measurements_from_proto(messages: Iterable[frontier_pb2.Measurement]) -> tuple[Measurement, ...]:
    """Return measurements.

    Raises:
        ProfileError: the solver refuses one.
    """
    return tuple(
        Measurement(
            clock_mhz=m.clock_mhz,
            time_s=m.time_s,
            energy_j=m.energy_j,
            time_se_s=m.time_se_s,
            energy_se_j=m.energy_se_j,
        )
        for m in messages
    )


def pipeline_from_proto(
    message: frontier_pb2.PipelineProblem,
    profiles: Mapping[ProfileKey, tuple[Measurement, ...]],
    fixed_s: Mapping[tuple[int, int], float],
) -> Pipeline:
    """Return a problem, checked, with the profiles that were read from it.

    Raises:
        InvalidFieldError: a part is missing or out of range.
        SolverError: the solver refuses it.
    """
    check_range("stage_count", message.stage_count, 1, MAX_STAGE_COUNT)
    check_range("transfer_lag_s", message.transfer_lag_s, 0, MAX_DURATION_S)
    check_size("blocking_powers", len(message.blocking_powers), MAX_STAGE_COUNT)
    schedule = build_schedule(schedule_spec_from_proto(message.schedule), message.stage_count)
    pipeline = Pipeline(
        schedule=schedule,
        profiles=profiles,
        blocking_power_w=tuple(message.blocking_power_w),
        blocking_powers_w=tuple(
            _blocking_powers_w(stage, powers) for stage, powers in enumerate(message.blocking_powers)
        ),
        fixed_times_s={
            c: fixed_s[c.stage, c.chunk]
            for c in schedule.computations
            if c.kind is Kind.FIXED and (c.stage, c.chunk) in fixed_s
        },
    )
    return with_lag(pipeline, message.transfer_lag_s)


def _blocking_powers_w(stage: int, message: frontier_pb2.BlockingPowers) -> dict[int, float]:
    where, clock_count = f"blocking_powers[{stage}]", len(message.clock_mhz)
    check_size(f"{where}.clock_mhz", clock_count, MAX_CLOCK_COUNT)
    if not message.clock_mhz or len({*message.clock_mhz}) < clock_count:
        raise InvalidFieldError(
            field=f"{where}.clock_mhz", expected="clocks, each once", found=[*message.clock_mhz]
        )
    if len(message.power_w) != clock_count:
        expected = f"a power for each of {clock_count} clocks"
        raise InvalidFieldError(field=f"{where}.power_w", expected=expected, found=len(message.power_w))
    return dict(zip(message.clock_mhz, message.power_w, strict=True))


def plan_to_proto(plan: Plan) -> frontier_pb2.Plan:
    """Return a plan, of which nothing is promised."""
    return frontier_pb2.Plan(
        iteration_time_s=plan.iteration_time_s,
        energy_j=plan.energy_j,
        stages=[stage_plan_to_proto(stage) for stage in plan.stages],
    )


def stage_plan_to_proto(stage: Iterable[PlannedComputation]) -> frontier_pb2.StagePlan:
    """Return one stage's share of a plan."""
    return frontier_pb2.StagePlan(
        computations=[
            frontier_pb2.PlannedComputation(
                kind=NUMBERS[planned.computation.kind],
                microbatch=planned.computation.microbatch,
                chunk=planned.computation.chunk,
                clock_mhz=planned.clock_mhz,
                start_s=planned.start_s,
                duration_s=planned.duration_s,
            )
            for planned in stage
        ]
    )
