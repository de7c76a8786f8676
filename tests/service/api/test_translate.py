"""Translation between messages and values, both ways."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from perseus.schedule_name import ScheduleName
from perseus.service.api.frontier_service import _problem_of
from perseus.service.api.translate_agents import (
    EncodedOffer,
    answer_from_proto,
    in_force_from_proto,
    joined_from_proto,
    max_clock_to_proto,
    offer_to_proto,
    telemetry_from_proto,
)
from perseus.service.api.translate_jobs import event_filter_from_proto, rank_to_proto, spec_from_proto
from perseus.service.api.translate_problems import check_problem_size, plan_to_proto, problem_from_proto
from perseus.service.domain import model
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.inputs import TelemetryArrived
from perseus.service.domain.messages import NUMBERS, frontier_to_proto, problem_to_proto, spec_to_proto
from perseus.service.domain.specification import (
    Coordinates,
    ExplicitSchedule,
    JobSpec,
    NamedSchedule,
    OperatingPolicy,
    Parallelism,
)
from perseus.service.domain.telemetry import ClockStatistics, ComputationColumns
from perseus.solver import (
    Computation,
    Kind,
    Measurement,
    Pipeline,
    named_schedule,
    one_forward_one_backward,
    shrink_profiles,
    solve,
    with_lag,
)
from perseus.solver.shrinkage import MIN_CLOCKS
from perseus.v1 import (
    agent_service_pb2,
    clock_statistics_pb2,
    computation_pb2,
    event_pb2,
    frontier_pb2,
    frontier_service_pb2,
    job_pb2,
    rank_pb2,
)
from perseus.v1.job_service_pb2 import ListJobEventsRequest
from tests.service.frontiers import FRONTIER
from tests.service.service_fakes import Cluster, batch, make_spec

INTERLEAVED = ScheduleName.INTERLEAVED_ONE_FORWARD_ONE_BACKWARD


WORK = ("embedding", "", "12 layers", "head")
KINDS_OF_BOTH = (Kind.FORWARD, Kind.BACKWARD)
EVERY_KIND = tuple(Computation(0, kind, m, chunk) for kind in Kind for m in (0, 1) for chunk in (0, 1))
OF_CHUNKS = tuple(
    tuple(Computation(stage, kind, 0, chunk) for kind in KINDS_OF_BOTH for chunk in (0, 1))
    for stage in (0, 1)
)
PATHS = (((0, 0), (1, 0)), ((1, 1), (0, 1)))


@pytest.mark.parametrize(
    "spec",
    [
        *(
            JobSpec(
                "a.b-c_1",
                Parallelism(3, 4, 2),
                NamedSchedule(name, 8, 2 * (name is INTERLEAVED)),
                OperatingPolicy(percent),
                WORK,
            )
            for name in ScheduleName
            for percent in (0.0, 12.5)
        ),
        JobSpec("job", Parallelism(1, 1, 1), ExplicitSchedule((EVERY_KIND,))),
        JobSpec("job", Parallelism(1, 2, 1), ExplicitSchedule(OF_CHUNKS, PATHS)),
    ],
    ids=lambda spec: str(getattr(spec.schedule, "name", "explicit")),
)
def test_a_specification_survives_translation(spec: JobSpec) -> None:
    message = job_pb2.JobSpec.FromString(spec_to_proto(spec).SerializeToString())
    assert spec_from_proto(message) == spec
    if isinstance(spec.schedule, NamedSchedule):
        assert len(list(spec.check().computations)) <= spec.computation_count


@pytest.mark.parametrize("name", ScheduleName)
def test_a_named_problem_equals_its_explicit_orders(name: ScheduleName) -> None:
    chunk_count = 2 * (name is INTERLEAVED)
    schedule = named_schedule(name, 2, 4, chunk_count)
    measured = (Measurement(1000, 0.1, 10.0), Measurement(800, 0.12, 8.0))
    profiles = {(c.stage, c.chunk, c.kind): measured for c in schedule.computations}
    message = problem_to_proto(Pipeline(schedule, profiles, (10.0, 10.0)))
    expected = problem_from_proto(message)
    message.schedule.named.CopyFrom(
        computation_pb2.NamedSchedule(name=NUMBERS[name], microbatch_count=4, chunk_count=chunk_count)
    )
    check_problem_size(message, 3, len(list(schedule.computations)) * 3 // 2)
    assert problem_from_proto(message) == expected


def test_every_state_kind_and_reason_has_its_number_on_the_wire() -> None:
    """The maps are made by name at import; this checks that no value of the contract is left out."""
    pairs = [
        (model.JobState, job_pb2.JobState),
        (model.RankState, rank_pb2.RankState),
        (model.RankLeftReason, rank_pb2.RankLeftReason),
        (model.RefusalReason, rank_pb2.PlanRefusalReason),
        (model.GpuErrorReason, rank_pb2.GpuErrorReason),
        (Kind, computation_pb2.ComputationKind),
        (ScheduleName, computation_pb2.ScheduleName),
    ]
    for values, numbers in pairs:
        assert len(list(values)) == len(numbers.keys()) - 1


POWERS_W = tuple({1400: power_w + 15, 700: power_w} for power_w in FRONTIER.pipeline.blocking_power_w)


@pytest.mark.parametrize(
    "problem",
    [
        FRONTIER.pipeline,
        replace(FRONTIER.pipeline, blocking_powers_w=POWERS_W),
        with_lag(FRONTIER.pipeline, 1 / 300),
    ],
    ids=["fixed computations", "blocking powers by clock", "lag"],
)
def test_a_problem_survives_translation_and_solves_the_same(problem: Pipeline) -> None:
    frontier = solve(problem, point_count=8)
    assert (frontier.points == FRONTIER.points) == (problem is FRONTIER.pipeline)
    message = frontier_pb2.Frontier.FromString(frontier_to_proto(frontier).SerializeToString())
    assert message.points[message.t_star_index].iteration_time_s <= message.t_star_s
    again = problem_from_proto(message.problem)
    assert again == frontier.pipeline
    assert problem_to_proto(again) == message.problem
    assert solve(again, point_count=8).points == frontier.points


def test_blocking_powers_by_clock_are_pairs_and_each_clock_is_there_once() -> None:
    refused = "clock_mhz: expected clocks, each once", "power_w: expected a power for each of 2 clocks"
    figures = ((700, 700), (1.0, 2.0)), ((700, 1400), (1.0,))
    for why, (clocks_mhz, powers_w) in zip(refused, figures, strict=True):
        message = problem_to_proto(FRONTIER.pipeline)
        message.blocking_powers.add(clock_mhz=clocks_mhz, power_w=powers_w)
        with pytest.raises(InvalidFieldError, match=rf"blocking_powers\[0\]\.{why}"):
            problem_from_proto(message)


@pytest.mark.parametrize("lag_s", [-1e-9, math.nan, math.inf])
def test_an_impossible_lag_is_named(lag_s: float) -> None:
    message = problem_to_proto(FRONTIER.pipeline)
    message.transfer_lag_s = lag_s
    with pytest.raises(InvalidFieldError, match=f"transfer_lag_s: expected .*, found {lag_s}"):
        problem_from_proto(message)


def test_noisy_measurements_of_a_problem_are_shrunk() -> None:
    measured = tuple(
        Measurement(1000 + 15 * k, 0.1 + 0.001 * (k % 2), 10.0, 0.002, 0.2) for k in range(MIN_CLOCKS)
    )
    profiles = {(0, 0, Kind.FORWARD): measured, (0, 0, Kind.BACKWARD): measured}
    message = problem_to_proto(Pipeline(one_forward_one_backward(1, 1), profiles, (50.0,)))
    shrunk = _problem_of(frontier_service_pb2.SolveRequest(problem=message))
    assert isinstance(shrunk, Pipeline)
    assert shrunk.profiles == shrink_profiles(profiles) != profiles


def test_a_plan_names_clocks_in_order() -> None:
    plan = FRONTIER.plan_within(FRONTIER.t_slow_s)
    message = plan_to_proto(plan)
    assert (message.iteration_time_s, message.energy_j) == (plan.iteration_time_s, plan.energy_j)
    assert [[c.clock_mhz for c in stage.computations] for stage in message.stages] == [
        [planned.clock_mhz for planned in stage] for stage in plan.stages
    ]


def decoded(offer: EncodedOffer) -> agent_service_pb2.PlanOffer:
    return agent_service_pb2.ConnectResponse.FromString(offer.SerializeToString()).plan_offer


@pytest.mark.parametrize(
    ("clocks", "kind"),
    [
        (model.STOCK, "stock"),
        (model.HoldClocks((1200,) * 2), "hold"),
        (model.PlannedClocks(FRONTIER.plan_within(FRONTIER.t_min_s)), "stage_plan"),
    ],
)
def test_an_offer_carries_the_clocks_of_its_stage(clocks: model.Clocks, kind: str) -> None:
    rank = Coordinates(0, 1, 0)
    message = decoded(offer_to_proto("job", rank, model.Offer(4, 17, clocks), "epoch", 30.0))
    assert message.WhichOneof("clocks") == kind
    header = message.epoch, message.version, message.start_iteration, message.lease_s
    assert header == ("epoch", 4, 17, 30.0)
    if isinstance(clocks, model.PlannedClocks):
        assert [planned.clock_mhz for planned in message.stage_plan.computations] == [
            planned.clock_mhz for planned in clocks.plan.stages[1]
        ]


def test_stock_below_a_maximum_clock_is_offered_as_stock_and_urgency_is_sent() -> None:
    offer = model.Offer(4, 17, model.StockClocks(900), is_urgent=True)
    message = decoded(offer_to_proto("job", Coordinates(0, 1, 0), offer, "epoch", 30.0))
    assert message.WhichOneof("clocks") == "stock"
    assert message.is_urgent


def test_a_maximum_clock_is_translated_and_none_is_left_out() -> None:
    assert max_clock_to_proto(None) is None
    message = max_clock_to_proto(model.MaxClock(900, outlasts_lease=True))
    assert message is not None
    assert (message.clock_mhz, message.outlasts_lease) == (900, True)


def computations(
    rows: dict[str, Any], *, is_regular: Sequence[bool] = (True,), first_iteration: int = 0
) -> ComputationColumns:
    """Return the columns of computations that arrive with some iterations."""
    count = len(is_regular)
    message = agent_service_pb2.TelemetryBatch(
        sequence=1,
        rank=rank_pb2.RankCoordinates(),
        iterations=agent_service_pb2.IterationColumns(
            iteration=range(first_iteration, first_iteration + count),
            plan_version=[0] * count,
            duration_s=[1.0] * count,
            energy_j=[1.0] * count,
            is_regular=is_regular,
            clock_event_reasons=[0] * count,
        ),
        computations=agent_service_pb2.ComputationColumns(**rows),
    )
    return telemetry_from_proto(message, "agent").batch.computations


@pytest.mark.parametrize(("iteration", "expected"), [(None, -1), (-1, -1), (0, 0)])
def test_an_absent_iteration_means_that_none_has_begun(iteration: int | None, expected: int) -> None:
    place = rank_pb2.RankCoordinates()
    gpu = agent_service_pb2.Gpu(uuid="g", supported_clocks_mhz=[1000])
    joined = agent_service_pb2.RankJoined(rank=place, gpu=gpu, iteration=iteration)
    answer = agent_service_pb2.PlanAnswer(rank=place, version=1, accepted=True, iteration=iteration)
    in_force = agent_service_pb2.PlanInForce(rank=place, iteration=iteration)
    assert joined_from_proto(joined, "agent", "host").iteration == expected
    assert answer_from_proto(answer, "agent").iteration == expected
    assert in_force_from_proto(in_force, "agent").iteration == expected


def short(duration_s: Sequence[float] = (1, 1), clock_mhz: Sequence[int] = (0, 0), **more: Any) -> Any:
    """Return the rows of two computations in the order of their stage, which they don't tell."""
    return {"duration_s": duration_s, "clock_mhz": clock_mhz, **more}


@pytest.mark.parametrize(
    ("is_regular", "rows", "refused"),
    [
        ([True], short(), None),
        ([True], short(begin_s=[0, 1]), None),
        ([True], short(begin_s=[0]), "begin_s: expected 2 rows"),
        ([True], short(clock_mhz=[0]), "clock_mhz: expected 2 rows"),
        ([True], short(clock_mhz=[]), "clock_mhz: expected 2 rows"),
        ([True], short(kind=[1, 2]), "iteration: expected 2 rows"),
        ([True], short(duration_s=[1, -1]), r"duration_s\[1\]: expected"),
        ([False], short(), "iteration: expected a row for"),
        ([True] * 2, short(), "iteration: expected a row"),
    ],
)
def test_short_rows_are_of_one_regular_iteration_and_as_long_as_each_other(
    is_regular: list[bool], rows: dict[str, Any], refused: str | None
) -> None:
    if refused is not None:
        with pytest.raises(InvalidFieldError, match=f"^computations.{refused}"):
            computations(rows, is_regular=is_regular)
    else:
        assert computations(rows, is_regular=is_regular).is_short


def test_an_order_that_was_seen_is_recognised_only_if_all_of_it_is_the_same() -> None:
    forward, backward = computation_pb2.COMPUTATION_KIND_FORWARD, computation_pb2.COMPUTATION_KIND_BACKWARD

    def columns(
        microbatch: list[int], chunk: list[int], clock_mhz: int = 0, kind: int = forward
    ) -> ComputationColumns:
        rows = {"iteration": [7, 7], "kind": [kind, backward], "microbatch": microbatch, "chunk": chunk}
        measured = {"begin_s": [0, 1], "duration_s": [1, 1], "clock_mhz": [clock_mhz] * 2}
        return computations(rows | measured, first_iteration=7)

    first, same = columns([41, 42], [0, 0]), columns([41, 42], [0, 0])
    assert same == first
    assert same.microbatch is first.microbatch
    assert columns([41, 43], [0, 0]).microbatch == [41, 43]
    assert columns([41, 43], [0, 1]).chunk == [0, 1]
    assert columns([41, 42], [0, 0]) == first
    unspecified = computation_pb2.COMPUTATION_KIND_UNSPECIFIED
    for row, field in (
        (([41, -1], [0, 0]), r"microbatch\[1\]"),
        (([41, 42], [-1, 0]), r"chunk\[0\]"),
        (([41, 42], [0]), "chunk"),
        (([41, 42], [0, 0], 0, unspecified), r"kind\[0\]: expected a known kind, found -1"),
    ):
        for _ in range(2):  # what is refused is not remembered
            with pytest.raises(InvalidFieldError, match=f"^computations.{field}"):
                columns(*row)


SOLVED_AND_NONE = [event_pb2.JOB_EVENT_TYPE_SOLVED, event_pb2.JOB_EVENT_TYPE_UNSPECIFIED]
UNKNOWN: Any = [99]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (ListJobEventsRequest(types=SOLVED_AND_NONE), r"types\[1\]: expected a known type of event, found 0"),
        (ListJobEventsRequest(types=UNKNOWN), r"types\[0\]: expected a known type of event, found 99"),
        (ListJobEventsRequest(start_time=Timestamp(nanos=-1)), "start_time: expected a time"),
        (ListJobEventsRequest(end_time=Timestamp(nanos=1_000_000_000)), "end_time: expected a time"),
        (ListJobEventsRequest(end_time=Timestamp(seconds=2**62)), "end_time: expected a time"),
    ],
)
def test_errors_name_invalid_filters(request_: ListJobEventsRequest, expected: str) -> None:
    with pytest.raises(InvalidFieldError, match=expected):
        event_filter_from_proto(request_)


CLOCKS = clock_statistics_pb2.ClockStatistics(
    plan_version=3,
    set_count=40,
    computation_count=64,
    late_raise_count=2,
    missed_count=1,
    computation_time_s=4.0,
    on_clock_time_s=3.5,
    set_latency_s=0.012,
    margin_s=0.001,
    prediction_error_s=0.0004,
)


def arrived(message: clock_statistics_pb2.ClockStatistics) -> ClockStatistics:
    batch = agent_service_pb2.TelemetryBatch(sequence=1, rank=rank_pb2.RankCoordinates(), clocks=message)
    clocks = telemetry_from_proto(batch, "agent").batch.clocks
    assert clocks is not None
    return clocks


def test_the_coordinator_shows_a_ranks_latest_clock_statistics() -> None:
    cluster = Cluster(make_spec(pipelines=1))
    cluster.join_all()
    clocks = arrived(CLOCKS)
    place = Coordinates(0, 0, 0)
    rank = cluster.ranks[place]
    for each in (replace(clocks, set_count=1), clocks):
        rank.sequence += 1
        reported = batch(rank.sequence, [], 1, 0.8)._replace(clocks=each)
        cluster.send(TelemetryArrived(place, rank.instance_id, reported))
    shown = {each.coordinates: each for _, each in cluster.machine.run.ranks.select(model.RankFilter(), 0)}
    assert rank_to_proto(shown[place]).clocks == CLOCKS
    assert not rank_to_proto(shown[Coordinates(0, 1, 0)]).HasField("clocks")


def test_a_rank_without_predictions_has_no_prediction_error() -> None:
    clocks = arrived(clock_statistics_pb2.ClockStatistics(plan_version=1))
    assert clocks.prediction_error_s is None
