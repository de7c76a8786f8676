"""A client, in any language, whose telemetry lacks what profiling needs gets the reason, over real gRPC."""

from pathlib import Path

from perseus.v1 import agent_service_pb2, event_pb2, job_pb2
from tests.service.grpc_fakes import FakeAgent, connected, make_settings
from tests.service.service_fakes import FakeRank

BUDGET_ITERATIONS = 60


class AgentWithoutEstimates(FakeAgent):
    """Joins, follows offers and reports iterations and computations, but never estimates of energy."""

    def telemetry(self, rank: FakeRank) -> agent_service_pb2.TelemetryBatch:
        message = super().telemetry(rank)
        message.ClearField("energy")
        return message


async def test_a_job_without_energy_estimates_ends_at_stock_within_its_budget_with_a_reason(
    tmp_path: Path,
) -> None:
    settings = make_settings(tmp_path, profile_iterations=3, profile_budget_iterations=BUDGET_ITERATIONS)
    async with connected(settings) as client:
        waiting = await client.register()
        since = waiting.create_time.ToJsonString()[: len("2026-01-01T00:00:0")]
        assert f"all 4 ranks are missing, since {since}" in waiting.state_reason
        agent = AgentWithoutEstimates(client)
        await agent.join()
        assert "missing" not in (await client.job()).state_reason
        await agent.iterate_until(client, job_pb2.JOB_STATE_STOCK)

        held = {offer.hold.clock_mhz for offer in agent.offers if offer.WhichOneof("clocks") == "hold"}
        assert held == {1400, 1300}, "no lower clock is tried"
        job = await client.job()
        assert "pipeline 0, stage 0, tensor 0 sent no energy estimate" in job.state_reason
        cost = job.profiling_cost
        assert 0 < cost.iteration_count <= BUDGET_ITERATIONS
        assert job.profiling_budget.iteration_count == BUDGET_ITERATIONS
        assert job.profiling_budget.extra_time_s == 360.0
        assert not job.profiling_budget.HasField("time_s")
        assert (await client.ask("GetReport", job_id="job")).profiling_cost == cost
        await client.finish()
        events = await client.events()
    given_up = [event.clock_given_up for event in events if event.HasField("clock_given_up")]
    assert {clock.reason for clock in given_up} == {event_pb2.CLOCK_GIVEN_UP_REASON_NO_ESTIMATE}
    (ended,) = [event.profiling_ended for event in events if event.HasField("profiling_ended")]
    assert not ended.is_enough
    assert ended.cost == cost
    changes = [event.state_changed for event in events if event.HasField("state_changed")]
    (at_stock,) = [change for change in changes if change.after == job_pb2.JOB_STATE_STOCK]
    assert "pipeline 0, stage 0, tensor 0 sent no energy estimate" in at_stock.reason
