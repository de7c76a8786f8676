"""What a status of the coordinator's says beside its code: the stable reason, and when to come again."""

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

_MAX_DELAY_S = 300.0
"""Nobody makes an agent wait for longer."""


def reason(error: grpc.aio.AioRpcError) -> str:
    """Return the reason of its ErrorInfo; its code's name, if it has none."""
    info = error_details_pb2.ErrorInfo()
    return str(info.reason) if _unpack(error, info) else error.code().name


def retry_delay_s(error: grpc.aio.AioRpcError) -> float | None:
    """Return how long to wait before the same is tried again; None if it does not say that time helps."""
    info = error_details_pb2.RetryInfo()
    if not _unpack(error, info):
        return None
    delay_s: float = info.retry_delay.seconds + info.retry_delay.nanos / 1e9
    return min(max(0.0, delay_s), _MAX_DELAY_S)


def _unpack(error: grpc.aio.AioRpcError, into: Message) -> bool:
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # details that contradict the status
        return False
    return status is not None and any(detail.Unpack(into) for detail in status.details)
