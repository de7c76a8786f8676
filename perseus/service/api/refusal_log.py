"""A log of refusals that peers can't fill."""

import time
from collections.abc import Callable

import structlog

from perseus.rate_limited_log import RateLimitedLog

_log = structlog.get_logger(__name__)

_PERIOD_S = 10.0


class RefusalLog:
    """Logs a refusal of each kind and host at most once per period, with the number of those left out."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._log = RateLimitedLog(_log, _PERIOD_S, monotonic=monotonic)

    def record(self, peer: str, event: str, reason: str, **details: object) -> None:
        """Warn about a peer, by gRPC's name for it; `reason` is a stable identifier."""
        host = peer.rpartition(":")[0] or peer  # each connection has another port
        self._log.warning(event, host, reason, peer=peer, reason=reason, **details)
