"""Details of the coordinator's statuses: the stable reason and the retry delay."""

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

_MAX_DELAY_S = 300.0
"""The longest delay that an agent accepts."""


def reason(error: grpc.aio.AioRpcError) -> str:
    """Return the reason of an error's ErrorInfo, or else its code's name."""
    info = error_details_pb2.ErrorInfo()
    return str(info.reason) if _unpack(error, info) else error.code().name


def retry_delay_s(error: grpc.aio.AioRpcError) -> float | None:
    """Return the delay before a retry; None if the error has no RetryInfo."""
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
