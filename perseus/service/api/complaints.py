"""What peers do wrong, told in the log without letting them fill it."""

import time
from collections.abc import Callable

import structlog

from perseus.seldom import Seldom

_log = structlog.get_logger(__name__)

_QUIET_S = 10.0
_MOST = 256


class Complaints:
    """Logs a refusal of each kind and peer at most once in a while, with how many were left out."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._seldom = Seldom(_QUIET_S, _MOST, monotonic)

    def complain(self, peer: str, event: str, reason: str, **details: object) -> None:
        """Warn about a peer, as gRPC names it; `reason` is a stable one."""
        host = peer.rpartition(":")[0] or peer  # each connection has another port
        if (more := self._seldom.due(host, reason)) is not None:
            _log.warning(event, peer=peer, reason=reason, **details, **more)
