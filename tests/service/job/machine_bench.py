"""Clusters in a state, and helpers to compare their commands exactly."""

from typing import Any

from perseus.service.domain.commands import Announce, Command, SendOffer
from perseus.service.domain.inputs import Input, OfferAnswered, StragglerReported
from perseus.service.domain.model import JobState, Offer, RefusalReason, Straggler
from perseus.service.domain.specification import Coordinates
from perseus.service.job.rules import Rules
from perseus.v1 import event_pb2
from tests.service.service_fakes import EPOCH, Cluster, make_spec

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


def cluster_in(state: JobState, rules: Rules | None = None, **spec: Any) -> Cluster:
    """Return a cluster whose ranks have all joined and run until a state."""
    cluster = Cluster(make_spec(**spec), rules)
    cluster.join_all()
    cluster.iterate_until(state)
    return cluster


def planned(**spec: Any) -> Cluster:
    """Return a cluster whose plans are in force everywhere."""
    cluster = cluster_in(JobState.PLANNED, **spec)
    cluster.iterate(3)
    return cluster


def straggler(slowdown_factor: float = 1.2, pipeline: int = 0) -> Input:
    """Return a report that changes the plans of the other pipelines."""
    return StragglerReported(Straggler(pipeline, slowdown_factor=slowdown_factor))


def answer(
    cluster: Cluster,
    rank: Coordinates,
    version: int,
    refusal: RefusalReason | None,
    iteration: int = 30,
    epoch: str = EPOCH,
) -> OfferAnswered:
    return OfferAnswered(rank, cluster.ranks[rank].instance_id, epoch, version, refusal, "", iteration)
