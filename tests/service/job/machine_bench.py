"""A cluster with a planned job, and helpers to compare its commands exactly."""

from perseus.service.domain.commands import Announce, Command, SendOffer
from perseus.service.domain.model import JobState, Offer
from perseus.service.domain.specification import Coordinates, OperatingPolicy
from perseus.v1 import event_pb2
from tests.service.service_fakes import Cluster, make_spec

FIRST, SECOND = Coordinates(0, 0, 0), Coordinates(0, 1, 0)
THIRD, FOURTH = Coordinates(1, 0, 0), Coordinates(1, 1, 0)


def actions(commands: list[Command]) -> list[Command]:
    """Return the commands without the events."""
    return [command for command in commands if not isinstance(command, Announce)]


def events(commands: list[Command]) -> list[event_pb2.JobEventType.ValueType]:
    return [command.event.type for command in commands if isinstance(command, Announce)]


def offers(commands: list[Command]) -> dict[Coordinates, Offer]:
    return {command.rank: command.offer for command in commands if isinstance(command, SendOffer)}


def measured_clocks_mhz(cluster: Cluster, stage: int = 0) -> list[int]:
    profiles = cluster.machine.run.profiler.profiles
    return sorted((profile.clock_mhz for profile in profiles if profile.stage == stage), reverse=True)


def planned(policy: OperatingPolicy | None = None, pipelines: int = 2, tensors: int = 1) -> Cluster:
    cluster = Cluster(make_spec(policy=policy, pipelines=pipelines, tensors=tensors))
    cluster.join_all()
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(3)
    return cluster
