"""Any graph of computations is solved as a pipeline is; what does not fit is refused by its name."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.solver import (
    Computation,
    ComputationGraph,
    Kind,
    Measurement,
    Node,
    Pipeline,
    PipelineError,
    ProfileError,
    ScheduleError,
    SolverError,
    solve,
)
from tests.solver.pipelines import arcs_of, little_search, measurements, pipelines, small_pipeline

CURVE = measurements((1400, 1.0, 300.0), (1000, 1.4, 200.0))
PROFILES = {"model": CURVE}


def graph_of(pipeline: Pipeline) -> ComputationGraph:
    """The pipeline's computations and dependencies, written as a graph.

    Stages that draw nothing while they wait are no resources.
    """
    resources = {
        f"stage {stage}": power_w for stage, power_w in enumerate(pipeline.blocking_power_w) if power_w
    }
    profiles = {f"{s} {chunk} {kind.value}": some for (s, chunk, kind), some in pipeline.profiles.items()}
    nodes: dict[str, Node] = {}
    for c in pipeline.schedule.computations:
        profile = f"{c.stage} {c.chunk} {c.kind.value}"
        if c.kind is Kind.FIXED:
            profile = str(c)
            time_s = max(1e-12, pipeline.fixed_times_s[c])
            energy_j = max(1e-12, pipeline.blocking_power_w[c.stage] * time_s)
            profiles[profile] = measurements((1000, time_s, energy_j))
        resource = f"stage {c.stage}"
        nodes[str(c)] = Node(profile, resource if resource in resources else "")
    edges: dict[tuple[str, str], float] = {}
    for earlier, later, lag_s in arcs_of(pipeline):
        edge = str(earlier), str(later)
        edges[edge] = max(lag_s, edges.get(edge, 0.0))
    return ComputationGraph(profiles, nodes, edges, resources)


@given(pipeline=pipelines(), shares=st.lists(st.floats(0, 1), min_size=2, max_size=2))
@little_search()
def test_a_pipeline_given_as_a_graph_has_the_same_frontier(pipeline: Pipeline, shares: list[float]) -> None:
    frontier, of_graph = (solve(each, point_count=5) for each in (pipeline, graph_of(pipeline).pipeline))
    assert of_graph.t_min_s == pytest.approx(frontier.t_min_s, rel=1e-9)
    assert of_graph.t_slow_s == pytest.approx(frontier.t_slow_s, rel=1e-9)
    assert of_graph.baseline.energy_j == pytest.approx(frontier.baseline.energy_j, rel=1e-9)
    for share in (0.001, *shares, 1.0):
        # A fixed time of 0 is a picosecond in the graph, so its shortest iteration is a little longer.
        time_s = of_graph.t_min_s + share * (of_graph.t_slow_s - of_graph.t_min_s)
        assert of_graph.bound_energy_j(time_s) == pytest.approx(frontier.bound_energy_j(time_s), rel=1e-6)


def test_without_fixed_times_a_pipeline_given_as_a_graph_has_the_same_plans() -> None:
    pipeline = small_pipeline()
    graph = graph_of(pipeline)
    frontier, of_graph = (solve(each, point_count=20) for each in (pipeline, graph.pipeline))
    assert of_graph.points == frontier.points
    clocks_mhz, of_nodes_mhz = (each.plan(each.t_star_s).clocks_mhz for each in (frontier, of_graph))
    assert {name: of_nodes_mhz[c] for name, c in graph.computations.items()} == {
        str(c): clock_mhz for c, clock_mhz in clocks_mhz.items()
    }


@given(graph=pipelines().map(graph_of), data=st.data())
def test_a_cycle_is_refused_by_the_names_of_its_nodes(graph: ComputationGraph, data: st.DataObject) -> None:
    names = sorted(graph.nodes)
    back = data.draw(
        st.sampled_from([(later, earlier) for earlier, later in graph.edges] or [(names[0],) * 2])
    )
    edges = {**graph.edges, back: 0.0}
    with pytest.raises(ScheduleError, match="expected no cycle") as caught:
        replace(graph, edges=edges)
    cycle = re.findall(r"'([^']*)'", str(caught.value))
    assert len(cycle) >= 2
    assert cycle[0] == cycle[-1]
    assert len(set(cycle)) == len(cycle) - 1
    assert all(pair in edges for pair in pairwise(cycle))


NODES = {"first": Node("model", "gpu"), "second": Node("model", "gpu")}
EDGES = {("first", "second"): 0.0}
RESOURCES = {"gpu": 80.0}


@pytest.mark.parametrize(
    ("changed", "error", "expected"),
    [
        ({"nodes": {}}, ScheduleError, "nodes: expected at least one, found none"),
        (
            {"nodes": {**NODES, "third": Node("modle")}},
            ProfileError,
            "node 'third': expected a profile, found 'modle', which does not exist",
        ),
        (
            {"nodes": {**NODES, "third": Node("")}},
            ProfileError,
            "node 'third': expected a profile, found none",
        ),
        (
            {"nodes": {**NODES, "third": Node("model", "tpu")}},
            ScheduleError,
            "node 'third': expected a resource of the graph, found 'tpu', which does not exist",
        ),
        (
            {"edges": {("first", "secnod"): 0.0}},
            ScheduleError,
            "edge 'first' → 'secnod': expected two nodes of the graph, found 'secnod', which does not exist",
        ),
        (
            {"edges": {**EDGES, ("second", "second"): 0.0}},
            ScheduleError,
            "edges: expected no cycle, found 'second' → 'second'",
        ),
        (
            {"edges": {}},
            ScheduleError,
            "resource 'gpu': expected edges that order its nodes, found none from 'first' to 'second', "
            "or back",
        ),
        (
            {"resources": {**RESOURCES, "idle": 80.0}},
            ScheduleError,
            "resource 'idle': expected at least one node, found none",
        ),
        (
            {"resources": {"gpu": -1.0}},
            PipelineError,
            "resource 'gpu': expected a blocking power of 0 to 1e+10 W, found -1.0",
        ),
        (
            {"edges": {("first", "second"): float("nan")}},
            PipelineError,
            "edge 'first' → 'second': expected a lag of 0 to 1e+06 s, found nan",
        ),
        (
            {"profiles": {**PROFILES, "empty": ()}},
            ProfileError,
            "profile 'empty': expected at least one measured clock, found none",
        ),
        (
            {"profiles": {"model": (*CURVE, Measurement(1000, 2.0, 100.0))}},
            ProfileError,
            "profile 'model': expected one measurement per clock, found 2 at 1000 MHz",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    changed: dict[str, object], error: type[SolverError], expected: str
) -> None:
    parts = {"profiles": PROFILES, "nodes": NODES, "edges": EDGES, "resources": RESOURCES, **changed}
    with pytest.raises(error) as caught:
        ComputationGraph(**parts)  # type: ignore[arg-type]
    assert str(caught.value) == expected


def test_an_order_through_another_resource_is_one() -> None:
    nodes = {"a": Node("model", "gpu"), "b": Node("model"), "c": Node("model", "gpu")}
    graph = ComputationGraph(PROFILES, nodes, {("a", "b"): 0.0, ("b", "c"): 0.0}, RESOURCES)
    assert graph.pipeline.schedule.orders[0] == (
        Computation(0, Kind.FORWARD, 0),
        Computation(0, Kind.FORWARD, 1),
    )


def test_a_long_chain_against_the_order_of_the_file_is_solved() -> None:
    """As many stages as nodes, each waiting for the one after it in the file."""
    names = [f"node {k}" for k in range(1000)]
    edges = dict.fromkeys(pairwise(reversed(names)), 0.0)
    graph = ComputationGraph({"model": CURVE[:1]}, dict.fromkeys(names, Node("model")), edges)
    assert solve(graph.pipeline, point_count=3).t_min_s == pytest.approx(1000.0)
