"""Clients' solves are bounded, and end with the client."""

from pathlib import Path

import grpc
import pytest

from perseus.service.domain.messages import problem_to_proto
from perseus.v1 import computation_pb2, frontier_pb2, frontier_service_pb2
from tests.service.grpc_fakes import TIMEOUT_S, connected, make_settings, refusal
from tests.service.solving.problems import large_problem, make_problem

SMALL = problem_to_proto(make_problem())
LARGE = problem_to_proto(large_problem())


def solve(problem: frontier_pb2.PipelineProblem, point_count: int = 3) -> frontier_service_pb2.SolveRequest:
    return frontier_service_pb2.SolveRequest(problem=problem, point_count=point_count)


async def test_a_solve_ends_with_its_deadline_and_delays_no_other(tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path)) as client:
        await client.frontiers.Solve(solve(SMALL), timeout=3 * TIMEOUT_S)
        gone = [client.frontiers.Solve(solve(LARGE), timeout=0.3) for _ in range(3)]
        cancelled = client.frontiers.Solve(solve(LARGE), timeout=600)
        for call in gone:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        cancelled.cancel()
        answer = await client.frontiers.Solve(solve(SMALL), timeout=3 * TIMEOUT_S)
        assert len(answer.frontier.points) == 3


async def test_a_solve_has_a_time_limit(tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path, request_limit_s=0.1)) as client:
        code, reason, values = await refusal(client.frontiers.Solve(solve(LARGE), timeout=600))
        assert (code, reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "SOLVER_TIMEOUT")
        assert values == {"limit_s": "0.1"}


async def test_a_solve_has_a_size_limit(tmp_path: Path) -> None:
    wide = frontier_pb2.PipelineProblem()
    wide.CopyFrom(SMALL)
    wide.schedule.named.name = computation_pb2.SCHEDULE_NAME_GPIPE
    wide.schedule.named.microbatch_count = 4096
    async with connected(make_settings(tmp_path)) as client:
        code, reason, values = await refusal(client.frontiers.Solve(solve(wide), timeout=TIMEOUT_S))
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        assert values["field"] == "problem.schedule.named.microbatch_count"
        assert values["found"] == "16384 computations"
        code, _, values = await refusal(client.frontiers.Solve(solve(LARGE, 10_000), timeout=TIMEOUT_S))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert values == {
            "field": "point_count",
            "expected": "at most 2048 for 4096 computations",
            "found": "10000",
        }
