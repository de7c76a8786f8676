"""The files of `perseus solve` and `perseus plan`: the contract's messages as JSON, and further settings.

The contract knows only clocks, as agents set nothing else. If a profile has further settings, the files have
one more member beside each `clockMhz`: `furtherSettings`, an object of their names and values. Files without
it are plain messages of the contract.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from perseus.service.api import translate_graphs, translate_problems
from perseus.service.domain.bounds import check_range
from perseus.service.domain.errors import cut
from perseus.service.domain.messages import frontier_to_proto
from perseus.solver import (
    ComputationGraph,
    Frontier,
    MeasuredSetting,
    Measurement,
    Pipeline,
    Plan,
    ProfileError,
    ProfileKey,
)
from perseus.solver.frontier import MIN_POINT_COUNT
from perseus.v1 import frontier_pb2

_MEMBER = "furtherSettings"

_EXACT = 2**53
"""Every integer below this bound is exact as a float."""

_Place = tuple[int, int]
"""Place of a measurement: its profile's index in the problem, and its own index in that profile."""


def frontier_text(frontier: Frontier, graph: ComputationGraph | None = None) -> str:
    """Return a frontier's file, with the graph that it is of unless it is of a pipeline."""
    document = _document(frontier_to_proto(frontier, graph))
    if graph is not None:
        return _text(document)
    profiles = frontier.pipeline.profiles
    # FIXED computations, which have no setting, come last.
    for written, key in zip(document["problem"]["profiles"], sorted(profiles), strict=False):
        for member, measurement in zip(written["measurements"], profiles[key], strict=True):
            if isinstance(measurement, MeasuredSetting):
                member[_MEMBER] = dict(measurement.further)
    return _text(document)


def plan_text(plan: Plan, graph: ComputationGraph | None = None, *, confidence: float = 0.0) -> str:
    """Return a plan's file, with the probability that it keeps its time; of a graph, with its nodes."""
    message = (
        translate_problems.plan_to_proto(plan)
        if graph is None
        else translate_graphs.graph_plan_to_proto(graph, plan)
    )
    message.confidence = confidence
    document = _document(message)
    if graph is not None:
        return _text(document)
    for written, stage in zip(document["stages"], plan.stages, strict=True):
        for member, planned in zip(written["computations"], stage, strict=True):
            if planned.further:
                member[_MEMBER] = dict(planned.further)
    return _text(document)


def graph_from_text(text: str, point_count: int, max_computations: int) -> ComputationGraph:
    """Return the graph of a graph's file.

    Raises:
        ParseError: the text is not the JSON of a graph.
        ServiceError: a part is missing, duplicated or out of range, or there are too many nodes.
        SolverError: the solver refuses the graph.
    """
    message = json_format.ParseDict(_parsed(text), frontier_pb2.GraphProblem())
    translate_graphs.check_graph_size(message, point_count, max_computations)
    return translate_graphs.graph_from_proto(message)


def problem_from_text(text: str, max_computations: int) -> tuple[Pipeline | ComputationGraph, int, float]:
    """Return a frontier file's problem, the number of points to solve it for again, and the confidence.

    Raises:
        ParseError: the text is not the JSON of a frontier.
        ServiceError: a part is missing, duplicated or out of range, or there are too many computations.
        SolverError: the solver refuses the pipeline, or a further setting is malformed.
    """
    document = _parsed(text)
    members = dict(_taken(document))
    frontier = json_format.ParseDict(document, frontier_pb2.Frontier())
    # A frontier of a single iteration time has fewer.
    message, point_count = frontier.problem, max(MIN_POINT_COUNT, len(frontier.points))
    check_range("confidence", frontier.confidence, 0, 1)
    if frontier.HasField("graph"):
        translate_graphs.check_graph_size(frontier.graph, point_count, max_computations)
        return translate_graphs.graph_from_proto(frontier.graph), point_count, frontier.confidence
    translate_problems.check_problem_size(message, point_count, max_computations)
    profiles, fixed_s = translate_problems.profiles_from_proto(message)
    if members:
        profiles = _with_further(message, profiles, members)
    pipeline = translate_problems.pipeline_from_proto(message, profiles, fixed_s)
    return pipeline, point_count, frontier.confidence


def _document(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = json_format.MessageToDict(message, always_print_fields_with_no_presence=True)
    return found


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2) + "\n"


def _parsed(text: str) -> Any:
    def refuse_twice(members: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(members)
        if len(found) < len(members):
            names = [name for name, _ in members]
            twice = next(name for name in names if names.count(name) > 1)
            raise json_format.ParseError(f"member {twice!r} twice in one object")
        return found

    try:
        document = json.loads(text, object_pairs_hook=refuse_twice)
        # Half a surrogate pair raises SystemErrors in protobuf.
        json.dumps(document, ensure_ascii=False).encode()
    except ValueError as error:
        raise json_format.ParseError(f"no JSON: {error}") from None
    if not isinstance(document, dict):
        raise json_format.ParseError("something other than an object")
    return document


def _taken(document: Mapping[str, Any]) -> Iterator[tuple[_Place, Any]]:
    """Take the further settings out, so that a message of the contract is left."""
    for i, profile in enumerate(_items(document.get("problem"), "profiles")):
        for j, measurement in enumerate(_items(profile, "measurements")):
            if isinstance(measurement, dict) and _MEMBER in measurement:
                yield (i, j), measurement.pop(_MEMBER)


def _items(value: object, name: str) -> list[Any]:
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, list) else []


def _with_further(
    message: frontier_pb2.PipelineProblem,
    profiles: Mapping[ProfileKey, tuple[Measurement, ...]],
    members: Mapping[_Place, Any],
) -> dict[ProfileKey, tuple[Measurement, ...]]:
    first = next(iter(members.values()))
    names = list(first) if isinstance(first, dict) else []
    found: dict[ProfileKey, tuple[Measurement, ...]] = {}
    for i, profile in enumerate(message.profiles):
        key = (profile.stage, profile.chunk, translate_problems.KIND_FROM_PROTO[profile.kind])
        if key in profiles:
            found[key] = tuple(
                _measured_setting(
                    measurement, f"problem.profiles[{i}].measurements[{j}]", members.get((i, j)), names
                )
                for j, measurement in enumerate(profiles[key])
            )
    return found


def _with_point(value: Any) -> Any:
    """Return a value as a float: another program may have written 1.0 as 1."""
    return float(value) if type(value) is int and abs(value) < _EXACT else value


def _measured_setting(m: Measurement, where: str, member: Any, names: list[str]) -> MeasuredSetting:
    if not isinstance(member, dict) or member.keys() != set(names):
        found = "none" if member is None else cut(json.dumps(member))
        expected = ", ".join(names) or "names and values"
        raise ProfileError(f"{where}.{_MEMBER}: expected an object of {expected}, found {found}")
    further = tuple((name, _with_point(member[name])) for name in names)
    try:
        return MeasuredSetting(m.clock_mhz, m.time_s, m.energy_j, m.time_se_s, m.energy_se_j, further=further)
    except ProfileError as error:
        raise ProfileError(f"{where}.{_MEMBER}: {cut(error)}") from None
