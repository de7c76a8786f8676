"""What peers do wrong, told in the log without letting them fill it."""

import time
from collections.abc import Callable

import structlog

_log = structlog.get_logger(__name__)

_QUIET_S = 10.0
_MOST = 256


class Complaints:
    """Logs a refusal of each kind and peer at most once in a while, with how many were left out."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._told: dict[tuple[str, str], tuple[float, int]] = {}

    def complain(self, peer: str, event: str, reason: str, **details: object) -> None:
        """Warn about a peer, as gRPC names it; `reason` is a stable one."""
        now_s = self._monotonic()
        host = peer.rpartition(":")[0] or peer  # each connection has another port
        told_at_s, left_out = self._told.get((host, reason), (-_QUIET_S, 0))
        if now_s - told_at_s < _QUIET_S:
            self._told[host, reason] = (told_at_s, left_out + 1)
            return
        self._told.pop((host, reason), None)
        while len(self._told) >= _MOST:
            self._told.pop(next(iter(self._told)))
        self._told[host, reason] = (now_s, 0)
        more = {"left_out": left_out} if left_out else {}
        _log.warning(event, peer=peer, reason=reason, **details, **more)
