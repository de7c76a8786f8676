"""Translation of graphs of computations, and of their plans, between the contract and the solver."""

from collections.abc import Container

from perseus.service.api.translate_problems import MAX_SOLVED_CHOICE_COUNT, measurements_from_proto
from perseus.service.domain.bounds import MAX_CLOCK_COUNT, MAX_PROFILE_COUNT, check_size, check_text
from perseus.service.domain.errors import InvalidFieldError
from perseus.solver import ComputationGraph, Measurement, Node, Plan, ProfileError
from perseus.v1 import frontier_pb2


def check_graph_size(message: frontier_pb2.GraphProblem, point_count: int, max_computations: int) -> None:
    """Refuse a graph that is too large to be solved while a client waits.

    Raises:
        InvalidFieldError: names the field.
    """
    node_count = len(message.nodes)
    check_size("graph.nodes", node_count, max_computations)
    if node_count * point_count > MAX_SOLVED_CHOICE_COUNT:
        expected = f"at most {MAX_SOLVED_CHOICE_COUNT // node_count} for {node_count} nodes"
        raise InvalidFieldError(field="point_count", expected=expected, found=point_count)


def graph_from_proto(message: frontier_pb2.GraphProblem) -> ComputationGraph:
    """Return a graph, checked.

    Raises:
        InvalidFieldError: a name is missing or repeated, or a part is out of range.
        SolverError: the solver refuses it.
    """
    check_size("profiles", len(message.profiles), MAX_PROFILE_COUNT)
    profiles: dict[str, tuple[Measurement, ...]] = {}
    for position, profile in enumerate(message.profiles):
        where = f"profiles[{position}]"
        name = _new_name(f"{where}.name", profile.name, profiles)
        check_size(f"{where}.measurements", len(profile.measurements), MAX_CLOCK_COUNT)
        try:
            profiles[name] = measurements_from_proto(profile.measurements)
        except ProfileError as error:
            raise ProfileError(f"profile {name!r}: {error}", **error.details) from None
    resources: dict[str, float] = {}
    for position, resource in enumerate(message.resources):
        name = _new_name(f"resources[{position}].name", resource.name, resources)
        resources[name] = resource.blocking_power_w
    nodes: dict[str, Node] = {}
    for position, node in enumerate(message.nodes):
        name = _new_name(f"nodes[{position}].name", node.name, nodes)
        nodes[name] = Node(node.profile, node.resource)
    edges: dict[tuple[str, str], float] = {}
    for position, edge in enumerate(message.edges):
        pair = (edge.earlier, edge.later)
        if pair in edges:
            raise InvalidFieldError(
                field=f"edges[{position}]", expected="each edge once", found=f"{pair[0]} → {pair[1]} again"
            )
        edges[pair] = edge.lag_s
    return ComputationGraph(profiles, nodes, edges, resources)


def _new_name(field: str, name: str, known: Container[str]) -> str:
    check_text(field, name, 1)
    if name in known:
        raise InvalidFieldError(field=field, expected="each name once", found=f"{name} again")
    return name


def graph_plan_to_proto(graph: ComputationGraph, plan: Plan) -> frontier_pb2.Plan:
    """Return a graph's plan."""
    names = {computation: name for name, computation in graph.computations.items()}
    planned = sorted((p for stage in plan.stages for p in stage), key=lambda p: p.start_s)
    return frontier_pb2.Plan(
        iteration_time_s=plan.iteration_time_s,
        energy_j=plan.energy_j,
        nodes=[
            frontier_pb2.PlannedNode(
                name=names[p.computation],
                clock_mhz=p.clock_mhz,
                start_s=p.start_s,
                duration_s=p.duration_s,
            )
            for p in planned
        ],
    )
