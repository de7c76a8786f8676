"""Between the wire's timestamps and seconds on the wall clock."""

import math

from google.protobuf.timestamp_pb2 import Timestamp

from perseus.service.domain.errors import InvalidFieldError

_LEAST_S = -62_135_596_800
_MOST_S = 253_402_300_799
"""The contract of Timestamp: 0001-01-01T00:00:00Z to 9999-12-31T23:59:59Z."""


def time_to_proto(time_s: float) -> Timestamp:
    """Return a time, to the nanosecond: `time_from_proto` gives the same float back."""
    whole_s = math.floor(time_s)
    nanos = round((time_s - whole_s) * 1e9)
    return Timestamp(seconds=whole_s + nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


def time_from_proto(field: str, message: Timestamp) -> float:
    """Return a time.

    Raises:
        InvalidFieldError: it is none of the years 1 to 9999.
    """
    if not (_LEAST_S <= message.seconds <= _MOST_S and 0 <= message.nanos < 1_000_000_000):
        found = f"{message.seconds} s and {message.nanos} ns"
        raise InvalidFieldError(field=field, expected="a time of the years 1 to 9999", found=found)
    return message.seconds + message.nanos / 1e9
