"""Clients' solves are bounded, and end with the client."""

from pathlib import Path
from typing import Any

import grpc

from perseus.service.domain.messages import problem_to_proto
from perseus.v1 import computation_pb2, frontier_pb2
from tests.service.grpc_fakes import TIMEOUT_S, Client, connected, make_settings, refusal
from tests.service.solving.problems import large_problem, make_problem

SMALL = problem_to_proto(make_problem())
LARGE = problem_to_proto(large_problem())
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def solve(
    client: Client, problem: frontier_pb2.PipelineProblem, points: int = 3, timeout_s: float = 600
) -> Any:
    return client.ask("Solve", problem=problem, point_count=points, timeout_s=timeout_s)


async def test_a_solve_ends_with_its_deadline_and_delays_no_other(client: Client) -> None:
    await solve(client, SMALL)
    gone = [solve(client, LARGE, timeout_s=0.3) for _ in range(3)]
    cancelled = solve(client, LARGE)
    assert [await call.code() for call in gone] == [grpc.StatusCode.DEADLINE_EXCEEDED] * 3
    cancelled.cancel()
    answer = await solve(client, SMALL, timeout_s=3 * TIMEOUT_S)
    assert len(answer.frontier.points) == 3


async def test_a_solve_has_a_time_limit(tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path, request_limit_s=0.1)) as client:
        refused = await refusal(solve(client, LARGE))
        assert refused == (grpc.StatusCode.DEADLINE_EXCEEDED, "SOLVER_TIMEOUT", {"limit_s": "0.1"})


async def test_a_solve_has_a_size_limit(client: Client) -> None:
    wide = frontier_pb2.PipelineProblem()
    wide.CopyFrom(SMALL)
    wide.schedule.named.name = computation_pb2.SCHEDULE_NAME_GPIPE
    wide.schedule.named.microbatch_count = 4096
    code, reason, values = await refusal(solve(client, wide))
    assert (code, reason) == (INVALID, "INVALID_FIELD")
    assert values["field"] == "problem.schedule.named.microbatch_count"
    assert values["found"] == "16384 computations"
    code, _, values = await refusal(solve(client, LARGE, points=10_000))
    expected = "at most 2048 for 4096 computations"
    assert (code, values) == (INVALID, {"field": "point_count", "expected": expected, "found": "10000"})
