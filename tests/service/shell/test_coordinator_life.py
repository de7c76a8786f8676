"""A job's whole life over real gRPC, the solver in a spawned process."""

import asyncio
from itertools import groupby

from perseus.v1 import job_pb2, rank_pb2
from tests.service.grpc_fakes import ALL_PLACES, TIMEOUT_S, Client, planned


async def test_a_job_is_profiled_planned_replanned_and_finished(client: Client) -> None:
    agent = await planned(client)
    assert [len(accepted.order.computations) for accepted in agent.accepted] == [6] * 4

    job = await client.job()
    assert job.profiled_clock_count == 6
    assert job.planned_iteration_time_s == [job.t_min_s, job.t_min_s]
    assert job.t_min_s <= job.no_slowdown_time.iteration_time_s
    assert job.no_slowdown_time.basis != job_pb2.NO_SLOWDOWN_BASIS_UNSPECIFIED
    assert {rank.in_force_version for rank in await client.ranks()} == {agent.offers[-1].version}
    assert all(
        [planned.kind for planned in offer.stage_plan.computations]
        == [computation.kind for computation in accepted.order.computations]
        for offer, accepted in zip(agent.offers[-4:], agent.accepted, strict=True)
    )

    job = (await client.ask("ReportStraggler", job_id="job", pipeline=0, slowdown_factor=1.2)).job
    await agent.iterate(4)
    assert job.stragglers[0].iteration_time_s == 1.2 * job.t_min_s
    assert job.planned_iteration_time_s[0] == job.t_min_s
    assert job.t_min_s < job.planned_iteration_time_s[1] <= 1.2 * job.t_min_s
    versions = [rank.in_force_version for rank in await client.ranks()]
    # Where a better plan was made meanwhile, a stage that it leaves unchanged keeps its version.
    assert versions[0] == versions[1] < min(versions[2:])

    job = (await client.ask("ClearStraggler", job_id="job", pipeline=0)).job
    await agent.iterate(4)
    assert job.planned_iteration_time_s == [job.t_min_s, job.t_min_s]

    plan = (await client.ask("GetPlan", job_id="job", iteration_time_s=1.1 * job.t_min_s)).plan
    assert job.t_min_s <= plan.iteration_time_s <= 1.1 * job.t_min_s
    frontier = (await client.ask("GetFrontier", job_id="job")).frontier
    assert frontier.points[0].energy_j < frontier.baseline.energy_j
    again = (await client.ask("Solve", problem=frontier.problem, point_count=5)).frontier
    assert (again.t_min_s, len(again.points)) == (frontier.t_min_s, 5)

    timeline = await client.ask("GetTimeline", job_id="job", pipeline=1)
    assert timeline.iteration == agent.ranks[ALL_PLACES[0]].iteration
    assert len(timeline.entries) == 12
    assert all(entry.duration_s > 0 for entry in timeline.entries)

    await agent.leave(reason=rank_pb2.RANK_LEFT_REASON_FINISHED)
    await agent.send(goodbye={"reason": "done"})
    await asyncio.wait_for(agent.reader, TIMEOUT_S)
    assert (await client.job()).state == job_pb2.JOB_STATE_FINISHED

    measured = await client.ask("GetReport", job_id="job")
    assert measured.no_slowdown_time == job.no_slowdown_time
    assert measured.profiling_cost == job.profiling_cost
    assert job.profiling_budget.extra_time_s == 360.0
    assert job.profiling_cost.iteration_count > 0
    periods = measured.periods
    assert periods[0].state == job_pb2.JOB_STATE_BASELINE
    assert periods[-1].state == job_pb2.JOB_STATE_PLANNED
    under_plans = [period for period in periods if period.state == job_pb2.JOB_STATE_PLANNED]
    # The number of their periods depends on when better plans were found.
    stretches = [has_straggler for has_straggler, _ in groupby(p.has_straggler for p in under_plans)]
    assert stretches == [False, True, False]
