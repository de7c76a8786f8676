"""A message with as many parts as possible is refused by its size: its parts are not examined one by one."""

from functools import partial
from typing import cast

import pytest
from google.protobuf.message import Message

from perseus.service.api.texts import check_texts
from perseus.service.api.translate_agents import joined_from_proto
from perseus.service.api.translate_graphs import check_graph_size, graph_from_proto
from perseus.service.api.translate_jobs import spec_from_proto
from perseus.service.api.translate_problems import check_problem_size, problem_from_proto
from perseus.service.domain.errors import InvalidFieldError
from perseus.solver import SolverError
from perseus.v1 import frontier_service_pb2, job_service_pb2, token_service_pb2
from perseus.v1.agent_service_pb2 import ConnectRequest
from tests.service.shell.test_registering_large_jobs import calls_of
from tests.torture.malformed_messages import conversation, filled, valid

MAX_CALLS = 2 * 65_536
"""Function calls for as many computations as a job may have; a message has room for millions."""

MAX_COMPUTATIONS = 8192
"""Size limit of the problems that the service solves by default."""

LARGE = pytest.mark.slow("fills every text and number of a large request, and has each refused")


def refused(message: Message) -> int:
    """Return how many functions are called until it is refused."""

    def translate() -> None:
        check_texts(message)
        if isinstance(message, job_service_pb2.RegisterJobRequest):
            spec_from_proto(message.spec)
        elif isinstance(message, frontier_service_pb2.SolveRequest):
            check_problem_size(message.problem, 3, MAX_COMPUTATIONS)
            problem_from_proto(message.problem)
            check_graph_size(message.graph, 3, MAX_COMPUTATIONS)
            graph_from_proto(message.graph)
        elif isinstance(message, ConnectRequest):
            joined_from_proto(message.rank_joined, "instance", "host")

    def be_refused() -> None:
        with pytest.raises((InvalidFieldError, SolverError)):
            translate()

    return calls_of(be_refused)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(job_service_pb2.RegisterJobRequest, marks=LARGE),
        token_service_pb2.CreateTokenRequest,
        pytest.param(frontier_service_pb2.SolveRequest, marks=LARGE),
    ],
)
def test_requests_with_texts_and_schedules(kind: type[Message]) -> None:
    made = list(filled(partial(valid, kind)))
    assert made
    for message in made:
        assert message.ByteSize() > 1_900_000
        assert refused(message) < MAX_CALLS


@LARGE
def test_ranks_with_clocks() -> None:
    made = [cast(ConnectRequest, each) for each in filled(lambda: conversation()[1])]
    joined = [each for each in made if each.rank_joined.ByteSize() > 1_900_000]
    assert joined
    for message in joined:
        assert refused(message) < MAX_CALLS
