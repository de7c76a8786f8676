"""Clock statistics, from the agent's batch to the job that a client sees."""

from dataclasses import replace
from typing import Any

import pytest

from perseus.service.api.translate_agents import telemetry_from_proto
from perseus.service.api.translate_jobs import rank_to_proto
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.inputs import TelemetryArrived
from perseus.service.domain.model import RankFilter
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import ClockStatistics
from perseus.v1 import agent_service_pb2, clock_statistics_pb2, rank_pb2
from tests.service.service_fakes import Cluster, batch, make_spec

WIRE = clock_statistics_pb2.ClockStatistics(
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
    clocks = arrived(WIRE)
    place = Coordinates(0, 0, 0)
    rank = cluster.ranks[place]
    for each in (replace(clocks, set_count=1), clocks):
        rank.sequence += 1
        reported = batch(rank.sequence, [], 1, 0.8)._replace(clocks=each)
        cluster.send(TelemetryArrived(place, rank.instance_id, reported))
    shown = {each.coordinates: each for _, each in cluster.machine.run.ranks.select(RankFilter(), 0)}
    assert rank_to_proto(shown[place]).clocks == WIRE
    assert not rank_to_proto(shown[Coordinates(0, 1, 0)]).HasField("clocks")


def test_a_rank_without_predictions_has_no_prediction_error() -> None:
    clocks = arrived(clock_statistics_pb2.ClockStatistics(plan_version=1))
    assert clocks.prediction_error_s is None


@pytest.mark.parametrize(("name", "value"), [("late_raise_count", -1), ("margin_s", -0.5)])
def test_negative_figures_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidFieldError, match=f"clocks.{name}: expected 0 to "):
        arrived(clock_statistics_pb2.ClockStatistics(**{name: value}))
