"""A job's whole life over real gRPC, the solver in a spawned process."""

import asyncio
from itertools import groupby
from pathlib import Path

from perseus.v1 import agent_service_pb2, frontier_service_pb2, job_pb2, job_service_pb2, rank_pb2
from tests.service.grpc_fakes import ALL_PLACES, TIMEOUT_S, FakeAgent, connected, make_settings


async def test_a_job_is_profiled_planned_replanned_and_finished(tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path)) as client:
        await client.register()
        agent = FakeAgent(client, "agent", ALL_PLACES)
        await agent.join()
        assert [len(accepted.order.computations) for accepted in agent.accepted] == [6] * 4
        await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
        await agent.iterate(4)

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

        report = job_service_pb2.ReportStragglerRequest(job_id="job", pipeline=0, slowdown_factor=1.2)
        job = (await client.jobs.ReportStraggler(report, timeout=TIMEOUT_S)).job
        await agent.iterate(4)
        assert job.stragglers[0].iteration_time_s == 1.2 * job.t_min_s
        assert job.planned_iteration_time_s[0] == job.t_min_s
        assert job.t_min_s < job.planned_iteration_time_s[1] <= 1.2 * job.t_min_s
        versions = [rank.in_force_version for rank in await client.ranks()]
        # Where a better plan was made meanwhile, a stage that it leaves unchanged keeps its version.
        assert versions[0] == versions[1] < min(versions[2:])

        clear = job_service_pb2.ClearStragglerRequest(job_id="job", pipeline=0)
        job = (await client.jobs.ClearStraggler(clear, timeout=TIMEOUT_S)).job
        await agent.iterate(4)
        assert job.planned_iteration_time_s == [job.t_min_s, job.t_min_s]

        plan_request = frontier_service_pb2.GetPlanRequest(job_id="job", iteration_time_s=1.1 * job.t_min_s)
        plan = (await client.frontiers.GetPlan(plan_request, timeout=TIMEOUT_S)).plan
        assert job.t_min_s <= plan.iteration_time_s <= 1.1 * job.t_min_s
        frontier_request = frontier_service_pb2.GetFrontierRequest(job_id="job")
        frontier = (await client.frontiers.GetFrontier(frontier_request, timeout=TIMEOUT_S)).frontier
        assert frontier.points[0].energy_j < frontier.baseline.energy_j
        solve_request = frontier_service_pb2.SolveRequest(problem=frontier.problem, point_count=5)
        again = (await client.frontiers.Solve(solve_request, timeout=TIMEOUT_S)).frontier
        assert (again.t_min_s, len(again.points)) == (frontier.t_min_s, 5)

        timeline_request = job_service_pb2.GetTimelineRequest(job_id="job", pipeline=1)
        timeline = await client.jobs.GetTimeline(timeline_request, timeout=TIMEOUT_S)
        assert timeline.iteration == agent.ranks[ALL_PLACES[0]].iteration
        assert len(timeline.entries) == 12
        assert all(entry.duration_s > 0 for entry in timeline.entries)

        for place in ALL_PLACES:
            reason = rank_pb2.RANK_LEFT_REASON_FINISHED
            left = agent_service_pb2.RankLeft(job_id="job", rank=agent.place(place), reason=reason)
            await agent.send(rank_left=left)
        await agent.send(goodbye=agent_service_pb2.Goodbye(reason="done"))
        await asyncio.wait_for(agent.reader, TIMEOUT_S)
        assert (await client.job()).state == job_pb2.JOB_STATE_FINISHED

        measured = await client.jobs.GetReport(job_service_pb2.GetReportRequest(job_id="job"))
        assert measured.no_slowdown_time == job.no_slowdown_time
        periods = measured.periods
        states = [period.state for period in periods]
        assert states[0] == job_pb2.JOB_STATE_BASELINE
        assert states[-1] == job_pb2.JOB_STATE_PLANNED
        planned = [period for period in periods if period.state == job_pb2.JOB_STATE_PLANNED]
        # The number of their periods depends on when better plans were found.
        stretches = [has_straggler for has_straggler, _ in groupby(p.has_straggler for p in planned)]
        assert stretches == [False, True, False]
