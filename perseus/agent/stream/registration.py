"""Registering a job on behalf of its rank 0: one unary call, and what its answer means to the probe."""

from dataclasses import dataclass

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from perseus.agent.stream.connection import CHANNEL_OPTIONS
from perseus.v1.job_service_pb2 import RegisterJobRequest
from perseus.v1.job_service_pb2_grpc import JobServiceStub

_DEADLINE_S = 5.0
# What says nothing about the job: the coordinator is absent, busy or restarting.
_TRANSIENT = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
}


@dataclass(frozen=True, slots=True)
class Registered:
    """The coordinator knows the job."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The coordinator did not answer."""

    message: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The coordinator does not want the job; `reason` is the stable one of its ErrorInfo, or its status."""

    reason: str
    message: str


async def register_job(target: str, request: RegisterJobRequest) -> Registered | Unreachable | Refused:
    """Ask the coordinator at `target`, once."""
    async with grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
        try:
            await JobServiceStub(channel).RegisterJob(request, timeout=_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            if error.code() in _TRANSIENT:
                return Unreachable(f"coordinator at {target}: {error.code().name}: {error.details()}")
            return Refused(_reason(error), error.details() or error.code().name)
    return Registered()


def _reason(error: grpc.aio.AioRpcError) -> str:
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            return str(info.reason)
    return error.code().name
