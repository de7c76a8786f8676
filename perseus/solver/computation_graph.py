"""Any graph of computations, such as the dependent requests of an inference workflow.

A node is a computation with a measured profile. An edge lets one node start once another has ended and a lag
has passed. Nodes run on *resources*, groups of GPUs that run one node at a time, in the order that the edges
give them; a resource draws its blocking power whenever it runs none, until the whole graph has ended. A node
without a resource draws nothing before and after it runs.

A graph is solved as a pipeline: its resources are the stages, its nodes are forwards, and its edges are extra
lags. Microbatches number a resource's nodes, chunks its profiles.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from perseus.solver.bounds import MAX_POWER_W, MAX_TIME_S
from perseus.solver.computation import Computation, Kind
from perseus.solver.errors import PipelineError, ProfileError, ScheduleError
from perseus.solver.pipeline import Pipeline
from perseus.solver.profile import Measurement
from perseus.solver.schedule import Schedule


class Node(NamedTuple):
    """A computation: the name of its profile, and of its resource unless it has none."""

    profile: str
    resource: str = ""


Edge = tuple[str, str]
"""The names of the node that has to end and of the one that waits for it."""


@dataclass(frozen=True, slots=True)
class ComputationGraph:
    """A graph of computations.

    Attributes:
        profiles: measurements by the profile's name; a resource's energy is that of all its GPUs.
        nodes: by name.
        edges: the lag of each in seconds.
        resources: the power in watts of all GPUs of each while they wait, by name.
        pipeline: the same problem as a pipeline.
        computations: each node's computation in it, by the node's name.

    Raises:
        ScheduleError: there is no node; an edge or a node names something that does not exist; a resource has
            no nodes; the edges form a cycle, or leave the order of two of a resource's nodes open. The
            message names the nodes.
        ProfileError: a node's profile does not exist, or is empty, or has a clock twice.
        PipelineError: a lag or power is out of bounds, or all nodes take too long together (`Pipeline`).
    """

    profiles: Mapping[str, Sequence[Measurement]]
    nodes: Mapping[str, Node]
    edges: Mapping[Edge, float]
    resources: Mapping[str, float] = field(default_factory=dict)
    pipeline: Pipeline = field(init=False, repr=False, compare=False)
    computations: Mapping[str, Computation] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_names()
        self._check_amounts()
        in_order = self._topological_order()
        self._check_order_on_resources(in_order)
        # Nodes without a resource get a stage each.
        stages: dict[str | Edge, list[str]] = {name: [] for name in self.resources}
        for name in in_order:
            resource = self.nodes[name].resource
            stages.setdefault(resource or ("", name), []).append(name)
        computations: dict[str, Computation] = {}
        profiles: dict[tuple[int, int, Kind], tuple[Measurement, ...]] = {}
        for stage, names in enumerate(stages.values()):
            chunks: dict[str, int] = {}
            for position, name in enumerate(names):
                profile = self.nodes[name].profile
                chunk = chunks.setdefault(profile, len(chunks))
                computations[name] = Computation(stage, Kind.FORWARD, position, chunk)
                profiles[stage, chunk, Kind.FORWARD] = tuple(self.profiles[profile])
        orders = tuple(tuple(computations[name] for name in names) for names in stages.values())
        powers_w = [*self.resources.values(), *[0.0] * (len(stages) - len(self.resources))]
        pipeline = Pipeline(
            schedule=Schedule(orders, has_data_flow=False),
            profiles=profiles,
            blocking_power_w=tuple(powers_w),
            extra_lags_s={
                (computations[earlier], computations[later]): lag_s
                for (earlier, later), lag_s in self.edges.items()
                # On a resource, the order is enough.
                if lag_s or computations[earlier].stage != computations[later].stage
            },
        )
        object.__setattr__(self, "pipeline", pipeline)
        object.__setattr__(self, "computations", computations)

    def _check_names(self) -> None:
        if not self.nodes:
            raise ScheduleError("nodes: expected at least one, found none", nodes=0)
        for name, node in self.nodes.items():
            if not node.profile or node.profile not in self.profiles:
                found = f"{node.profile!r}, which does not exist" if node.profile else "none"
                raise ProfileError(f"node {name!r}: expected a profile, found {found}", node=name)
            if node.resource and node.resource not in self.resources:
                raise ScheduleError(
                    f"node {name!r}: expected a resource of the graph, found {node.resource!r}, "
                    "which does not exist",
                    node=name,
                )
        for edge in self.edges:
            for name in edge:
                if name not in self.nodes:
                    raise ScheduleError(
                        f"edge {_written(edge)}: expected two nodes of the graph, found {name!r}, which does "
                        "not exist",
                        node=name,
                    )
        used = {node.resource for node in self.nodes.values()}
        for resource in self.resources:
            if resource not in used:
                raise ScheduleError(f"resource {resource!r}: expected at least one node, found none")

    def _check_amounts(self) -> None:
        for name, measurements in self.profiles.items():
            if not measurements:
                raise ProfileError(
                    f"profile {name!r}: expected at least one measured clock, found none", profile=name
                )
            clock_mhz, count = Counter(m.clock_mhz for m in measurements).most_common(1)[0]
            if count > 1:
                raise ProfileError(
                    f"profile {name!r}: expected one measurement per clock, found {count} at {clock_mhz} MHz",
                    profile=name,
                    clock_mhz=clock_mhz,
                )
        for resource, power_w in self.resources.items():
            if not 0 <= power_w <= MAX_POWER_W:
                raise PipelineError(
                    f"resource {resource!r}: expected a blocking power of 0 to {MAX_POWER_W:g} W, "
                    f"found {power_w}",
                    found=power_w,
                )
        for edge, lag_s in self.edges.items():
            if not 0 <= lag_s <= MAX_TIME_S:
                raise PipelineError(
                    f"edge {_written(edge)}: expected a lag of 0 to {MAX_TIME_S:g} s, found {lag_s}",
                    found=lag_s,
                )

    def _topological_order(self) -> list[str]:
        """Return the nodes, each after those that it waits for; of free ones the first comes first."""
        names = [*self.nodes]
        number = {name: index for index, name in enumerate(names)}
        awaited = Counter(later for _, later in self.edges)
        followers = self._neighbours()
        ready = [index for index, name in enumerate(names) if not awaited[name]]
        heapify(ready)
        found: list[str] = []
        while ready:
            found.append(names[heappop(ready)])
            for later in followers.get(found[-1], ()):
                awaited[later] -= 1
                if not awaited[later]:
                    heappush(ready, number[later])
        if len(found) < len(names):
            cycle = self._cycle({name for name in names if awaited[name]})
            path = " → ".join(map(repr, cycle))
            raise ScheduleError(f"edges: expected no cycle, found {path}", cycle=path)
        return found

    def _cycle(self, waiting: set[str]) -> list[str]:
        """Return a cycle among nodes that wait for one another; the first is also the last."""
        waits_for = {later: earlier for earlier, later in self.edges if {earlier, later} <= waiting}
        # Those left wait for another of them each, so a walk backward comes to a node that it has met.
        walk = [next(iter(waits_for))]
        met = {walk[0]: 0}
        while (back := waits_for[walk[-1]]) not in met:
            met[back] = len(walk)
            walk.append(back)
        return [back, *reversed(walk[met[back] :])]

    def _check_order_on_resources(self, in_order: Sequence[str]) -> None:
        """Refuse two nodes of a resource without a path between them.

        For each node, the nodes that it waits for are a set of bits, one for each node with a resource. Sets
        are dropped once all that wait for the node are done.
        """
        place = {name: k for k, name in enumerate(n for n in in_order if self.nodes[n].resource)}
        followers = self._neighbours()
        left = {name: len(some) for name, some in followers.items()}
        waits_for: dict[str, list[str]] = {}
        for earlier, later in self.edges:
            waits_for.setdefault(later, []).append(earlier)
        before: dict[str, int] = {}
        last_on: dict[str, str] = {}
        for name in in_order:
            bits = 0
            for earlier in waits_for.get(name, ()):
                bits |= before[earlier]
                if earlier in place:
                    bits |= 1 << place[earlier]
                left[earlier] -= 1
                if not left[earlier]:
                    del before[earlier]
            if left.get(name):
                before[name] = bits
            if resource := self.nodes[name].resource:
                last = last_on.get(resource)
                if last is not None and not bits >> place[last] & 1:
                    raise ScheduleError(
                        f"resource {resource!r}: expected edges that order its nodes, found none from "
                        f"{last!r} to {name!r}, or back",
                        resource=resource,
                    )
                last_on[resource] = name

    def _neighbours(self) -> dict[str, list[str]]:
        """Return the nodes that wait for each node."""
        found: dict[str, list[str]] = {}
        for earlier, later in self.edges:
            found.setdefault(earlier, []).append(later)
        return found


def _written(edge: Edge) -> str:
    return f"{edge[0]!r} → {edge[1]!r}"
