"""`perseus.v1.FrontierService`: a thin adapter over the coordinator.

Problems and frontiers have up to tens of thousands of parts: they are translated in threads, so that the
event loop runs on.
"""

# ruff: noqa: N802 (the contract names the methods)

import asyncio
from dataclasses import replace
from typing import Any

import grpc

from perseus.service.api.authentication import caller
from perseus.service.api.statuses import mapped
from perseus.service.api.translate_graphs import check_graph_size, graph_from_proto, graph_plan_to_proto
from perseus.service.api.translate_problems import (
    check_problem_size,
    plan_to_proto,
    problem_from_proto,
)
from perseus.service.domain.bounds import MAX_DURATION_S, MIN_DURATION_S, check_range
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.messages import frontier_to_proto
from perseus.service.domain.specification import MAX_COMPUTATION_COUNT
from perseus.service.shell.jobs import Jobs
from perseus.service.shell.quotas import Quotas
from perseus.service.solving.work import POINT_COUNT
from perseus.solver import MAX_LAYER_COUNT, ComputationGraph, Frontier, Pipeline, shrink_profiles
from perseus.v1 import frontier_service_pb2 as pb
from perseus.v1 import frontier_service_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

MIN_POINT_COUNT = 3
MAX_POINT_COUNT = 10_000


class FrontierService(frontier_service_pb2_grpc.FrontierServiceServicer):
    """Serves frontiers and plans, of jobs and of problems without a job."""

    def __init__(self, jobs: Jobs, quotas: Quotas) -> None:
        self._jobs = jobs
        self._quotas = quotas

    @mapped
    async def GetFrontier(self, request: pb.GetFrontierRequest, context: Context) -> pb.GetFrontierResponse:
        """Return a job's frontier."""
        return pb.GetFrontierResponse(frontier=await self._jobs.frontier(request.job_id))

    @mapped
    async def GetPlan(self, request: pb.GetPlanRequest, context: Context) -> pb.GetPlanResponse:
        """Return a job's plan of least energy that keeps an iteration time."""
        time_s = request.iteration_time_s
        check_range("iteration_time_s", time_s, MIN_DURATION_S, MAX_DURATION_S)
        with self._quotas.solve(caller().name):
            plan, confidence = await self._jobs.plan(request.job_id, time_s)
            response = pb.GetPlanResponse(plan=await asyncio.to_thread(plan_to_proto, plan))
            response.plan.confidence = confidence
            return response

    @mapped
    async def GetRebalancing(
        self, request: pb.GetRebalancingRequest, context: Context
    ) -> pb.GetRebalancingResponse:
        """Return what moving layers between a job's stages would bring beside clocks."""
        if (found := len(request.layer_counts)) > MAX_COMPUTATION_COUNT:
            expected = f"at most {MAX_COMPUTATION_COUNT}"
            raise InvalidFieldError(field="layer_counts", expected=expected, found=found)
        for count in request.layer_counts:
            check_range("layer_counts", count, 1, MAX_LAYER_COUNT)
        with self._quotas.solve(caller().name):
            advice = await self._jobs.rebalancing(request.job_id, request.layer_counts)
            return pb.GetRebalancingResponse(rebalancing=advice)

    @mapped
    async def Solve(self, request: pb.SolveRequest, context: Context) -> pb.SolveResponse:
        """Solve a problem or a graph without a job."""
        count = request.point_count or POINT_COUNT
        if not MIN_POINT_COUNT <= count <= MAX_POINT_COUNT:
            raise InvalidFieldError(
                field="point_count", expected=f"0, or {MIN_POINT_COUNT} to {MAX_POINT_COUNT}", found=count
            )
        if request.HasField("problem") == request.HasField("graph"):
            found = "both" if request.HasField("graph") else "none"
            raise InvalidFieldError(field="problem", expected="a problem or a graph", found=found)
        check_range("plan_iteration_time_s", request.plan_iteration_time_s, 0, MAX_DURATION_S)
        max_computations = self._quotas.limits.limit_solve_computations
        if request.HasField("graph"):
            check_graph_size(request.graph, count, max_computations)
        else:
            check_problem_size(request.problem, count, max_computations)
        with self._quotas.solve(caller().name):
            problem = await asyncio.to_thread(_problem_of, request)
            pipeline = problem.pipeline if isinstance(problem, ComputationGraph) else problem
            frontier = await self._jobs.solve(pipeline, count)
            return await asyncio.to_thread(_response, frontier, problem, request.plan_iteration_time_s)


def _problem_of(request: pb.SolveRequest) -> Pipeline | ComputationGraph:
    if request.HasField("graph"):
        return graph_from_proto(request.graph)
    problem = problem_from_proto(request.problem)
    # Noisy measurements become what is to be expected of them, as those of a job.
    return replace(problem, profiles=shrink_profiles(problem.profiles))


def _response(
    frontier: Frontier, problem: Pipeline | ComputationGraph, plan_iteration_time_s: float
) -> pb.SolveResponse:
    graph = problem if isinstance(problem, ComputationGraph) else None
    response = pb.SolveResponse(frontier=frontier_to_proto(frontier, graph))
    if plan_iteration_time_s:
        plan = frontier.plan_within(plan_iteration_time_s)
        response.plan.CopyFrom(plan_to_proto(plan) if graph is None else graph_plan_to_proto(graph, plan))
        response.plan.confidence = response.frontier.confidence
    return response
