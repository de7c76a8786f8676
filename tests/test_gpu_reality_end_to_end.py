"""Limits of real GPUs, with real processes: slow clock changes, and a changing power limit."""

from contextlib import closing
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path

import pytest

from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM
from perseus.v1 import event_pb2, frontier_pb2, frontier_service_pb2, job_pb2, job_service_pb2
from tests.service.grpc_fakes import Client
from tests.small_jobs import client_of, training, until, until_planned
from tests.workloads import QUICK_GPU, SMALL

LATENCY_S = 0.060
LIMIT_W = 230.0
WORKLOAD = replace(SMALL, job_id="job", pipeline_count=1, gpu=replace(QUICK_GPU, set_latency_s=LATENCY_S))
"""One pipeline of two stages; computations of 15 to 46 ms, some 0.35 s an iteration."""


async def events(client: Client, *types: event_pb2.JobEventType.ValueType) -> list[event_pb2.JobEvent]:
    """Return the events of these types so far; they are listed once they are stored."""
    request = job_service_pb2.ListJobEventsRequest(job_id="job", types=types, page_size=1000)
    return list((await client.jobs.ListJobEvents(request, timeout=60)).events)


def shortest_run_s(stage: frontier_pb2.StagePlan) -> float:
    """Return the shortest time that a clock is held, except at the iteration's end."""
    clocked = [each for each in stage.computations if each.clock_mhz]
    starts_s = [next(run).start_s for _, run in groupby(clocked, key=lambda each: each.clock_mhz)]
    return min((later_s - earlier_s for earlier_s, later_s in pairwise(starts_s)), default=float("inf"))


@pytest.mark.slow("real processes train, are planned, and are measured and planned once more")
@pytest.mark.timeout(1200)
async def test_plans_hold_slow_clocks_and_follow_a_power_limit(tmp_path: Path) -> None:
    with training(tmp_path, WORKLOAD) as (cluster, address):
        async with client_of(cluster.security, address) as client:
            await until_planned(client, WORKLOAD)

            async def is_latency_known() -> bool:
                job = await client.job()
                solved = await events(client, event_pb2.JOB_EVENT_TYPE_SOLVED)
                used_s = {each.solved.set_latency_s for each in solved}
                return job.state == job_pb2.JOB_STATE_PLANNED and 0 < job.set_latency_s in used_s

            await until(is_latency_known, "plans for slow clocks")
            job = await client.job()
            assert job.set_latency_s >= LATENCY_S
            plan_request = frontier_service_pb2.GetPlanRequest(job_id="job", iteration_time_s=job.t_min_s)
            plan = (await client.frontiers.GetPlan(plan_request, timeout=60)).plan
            assert plan.iteration_time_s <= job.t_min_s
            assert min(map(shortest_run_s, plan.stages)) >= 2 * LATENCY_S
            for rank in await client.ranks():
                assert rank.clocks.set_latency_count >= 3
                assert rank.power_limit_w == A100_SXM.board_power_w

            with closing(EmulatedGpu(cluster.gpu_file(0, 1))) as gpu:
                gpu.limit_power(LIMIT_W)

            async def is_measured_anew() -> bool:
                ended = await events(client, event_pb2.JOB_EVENT_TYPE_PROFILING_ENDED)
                return len(ended) >= 2 and (await client.job()).state == job_pb2.JOB_STATE_PLANNED

            await until(is_measured_anew, "another profile and other plans")
            (changed,) = await events(client, event_pb2.JOB_EVENT_TYPE_GPU_LIMITS_CHANGED)
            limits = changed.gpu_limits_changed
            assert (limits.rank.stage, limits.before_power_limit_w, limits.power_limit_w) == (
                *(1, A100_SXM.board_power_w),
                LIMIT_W,
            )
            moves = await events(client, event_pb2.JOB_EVENT_TYPE_STATE_CHANGED)
            left = next(each for each in moves if each.state_changed.before == job_pb2.JOB_STATE_PLANNED)
            assert "under other limits: it is measured anew" in left.message
            (rank,) = await client.ranks(stage=1)
            assert rank.power_limit_w == LIMIT_W
            assert (await client.job()).t_min_s > job.t_min_s, "plans come from the other profile"
