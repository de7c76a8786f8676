"""`perseus.v1.InfoService`: the first call in a search for a fault."""

# ruff: noqa: N802 (the contract names the methods)

import time
from collections.abc import Callable
from typing import Any

import grpc

from perseus.release import release
from perseus.service.api.agent_service import PROTOCOL_VERSION
from perseus.service.api.authentication import caller
from perseus.service.api.statuses import mapped
from perseus.service.api.token_service import SCOPE_TO_PROTO
from perseus.service.domain.members import ALONE, Fleet
from perseus.service.domain.messages import time_to_proto
from perseus.v1 import info_service_pb2 as pb
from perseus.v1 import info_service_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class InfoService(info_service_pb2_grpc.InfoServiceServicer):
    """Returns the release, the time, the caller's scope and the fleet. `clock` is the wall clock."""

    def __init__(self, fleet: Fleet = ALONE, clock: Callable[[], float] = time.time) -> None:
        self._fleet = fleet
        self._clock = clock

    @mapped
    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        """Return the release, the protocol version, the time, and the caller's name and scope."""
        principal = caller()
        return pb.GetInfoResponse(
            version=release(),
            protocol_version=PROTOCOL_VERSION,
            current_time=time_to_proto(self._clock()),
            principal=principal.name,
            scope=SCOPE_TO_PROTO[principal.grant.scope],
        )

    @mapped
    async def ListCoordinators(
        self, request: pb.ListCoordinatorsRequest, context: Context
    ) -> pb.ListCoordinatorsResponse:
        """Return the coordinators of the fleet: those that serve a slot, by slot, then the others."""
        fleet = self._fleet
        slots = {slot.holder: slot for slot in fleet.slots}
        found = [
            pb.FleetCoordinator(
                address=member.address,
                slot=None if (slot := slots.get(member.member_id)) is None else slot.number,
                lease_epoch=0 if slot is None else slot.lease_epoch,
                is_answering=member.member_id == fleet.me,
                page_url=member.page_url,
            )
            for member in fleet.members
        ]
        found.sort(key=lambda each: (not each.HasField("slot"), each.slot))
        return pb.ListCoordinatorsResponse(coordinators=found, slot_count=len(fleet.slots))
