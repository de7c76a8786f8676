"""Graphs of computations between the contract and the solver, and through the service."""

import json
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from perseus.cli.frontier_file import frontier_text, graph_from_text, problem_from_text
from perseus.service.api.translate_graphs import check_graph_size, graph_from_proto
from perseus.service.domain.errors import InvalidFieldError, ServiceError
from perseus.service.domain.messages import graph_to_proto
from perseus.solver import ComputationGraph, SolverError, solve
from perseus.v1 import frontier_pb2, frontier_service_pb2
from tests.service.grpc_fakes import TIMEOUT_S, connected, make_settings, refusal

EXAMPLE = Path(__file__).parents[3] / "examples" / "graph" / "workflow.json"


def example() -> frontier_pb2.GraphProblem:
    return json_format.Parse(EXAMPLE.read_text(), frontier_pb2.GraphProblem())


def test_a_graph_is_the_same_after_a_round_trip() -> None:
    graph = graph_from_proto(example())
    assert graph_from_proto(graph_to_proto(graph, graph.pipeline)) == graph


def test_a_margin_is_in_the_written_graph() -> None:
    """Nodes that share a profile get one each where their resources wait at another power."""
    message = example()
    for profile in message.profiles:
        for measurement in profile.measurements:
            measurement.time_se_s = 0.01 * measurement.time_s
    message.resources[2].blocking_power_w = 200.0
    graph = graph_from_proto(message)
    frontier = solve(graph.pipeline, point_count=5, confidence=0.95)
    assert frontier.margin is not None
    again, point_count, confidence = problem_from_text(frontier_text(frontier, graph), 100)
    assert isinstance(again, ComputationGraph)
    assert confidence == 0.95
    assert {again.nodes[name].profile for name in ("check", "title")} == {"check", "check (2)"}
    assert again.nodes.keys() == graph.nodes.keys()
    assert solve(again.pipeline, point_count=point_count).points == frontier.points


@pytest.mark.parametrize("part", ["profiles", "resources", "nodes", "edges"])
def test_a_part_that_is_there_twice_is_named(part: str) -> None:
    message = example()
    parts = getattr(message, part)
    parts.append(parts[0])
    with pytest.raises(InvalidFieldError, match="again") as caught:
        graph_from_proto(message)
    assert caught.value.metadata["field"].startswith(f"{part}[{len(parts) - 1}]")


def test_an_impossible_measurement_is_named_by_its_profile() -> None:
    message = example()
    message.profiles[1].measurements[2].energy_j = -1.0
    with pytest.raises(SolverError, match="profile 'read-book': energy_j: expected a positive"):
        graph_from_proto(message)


def test_a_nameless_part_is_refused() -> None:
    message = example()
    message.nodes[3].name = ""
    with pytest.raises(InvalidFieldError, match=r"nodes\[3\].name"):
        graph_from_proto(message)


def test_a_graph_has_a_size_limit() -> None:
    with pytest.raises(InvalidFieldError, match=r"graph\.nodes"):
        check_graph_size(example(), 3, 7)
    with pytest.raises(InvalidFieldError, match="at most 1048576 for 8 nodes"):
        check_graph_size(example(), 2**21, 8)


TEXTS = st.sampled_from(["plan", "draft", "large", "read-book", "", "nodes", "lagS", "unknown"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data())
def test_whatever_a_file_contains_it_is_a_graph_or_refused(data: st.DataObject) -> None:
    """Cut, spliced, and with any value in the place of any other."""
    text = EXAMPLE.read_text()
    document = json_format.MessageToDict(example())
    if data.draw(st.booleans()):
        part = data.draw(st.sampled_from(sorted(document)))
        place = data.draw(st.integers(0, len(document[part]) - 1))
        member = data.draw(st.sampled_from(sorted(document[part][place])))
        document[part][place][member] = data.draw(VALUES)
        text = json.dumps(document)
    else:
        begin, end = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=2)))
        text = text[:begin] + data.draw(st.text(max_size=3)) + text[end:]
    try:
        graph = graph_from_text(text, 3, 100)
    except (json_format.ParseError, ServiceError, SolverError):
        return
    assert graph.computations.keys() == graph.nodes.keys()


async def test_the_service_solves_a_graph_and_returns_a_plan(tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path)) as client:
        request = frontier_service_pb2.SolveRequest(
            graph=example(), point_count=10, plan_iteration_time_s=11.0
        )
        answer = await client.frontiers.Solve(request, timeout=3 * TIMEOUT_S)
        assert not answer.frontier.HasField("problem")
        assert [node.name for node in answer.frontier.graph.nodes] == [
            node.name for node in request.graph.nodes
        ]
        assert answer.plan.iteration_time_s <= 11.0
        clocks_mhz = {node.name: node.clock_mhz for node in answer.plan.nodes}
        assert clocks_mhz.keys() == {node.name for node in request.graph.nodes}
        assert clocks_mhz["draft"] == 1980
        assert clocks_mhz["check"] == 1005
        request.graph.edges.add(earlier="answer", later="plan")
        code, reason, values = await refusal(client.frontiers.Solve(request, timeout=TIMEOUT_S))
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_SCHEDULE")
        assert values["cycle"].startswith("'plan' → ")
        request.Clear()
        code, reason, values = await refusal(client.frontiers.Solve(request, timeout=TIMEOUT_S))
        assert values == {"field": "problem", "expected": "a problem or a graph", "found": "none"}
