"""A rank's state with the coordinator: disconnected → announced → accepted, and back. Pure.

A rank is announced on a connection once its trainer has declared its job. A refusal may be temporary (the job
may not be registered yet, or another agent's lease may still run): then the rank is announced again after
`JOIN_RETRY_S`, with a delay that doubles after each further refusal in a row, up to `MAX_JOIN_RETRY_S`: the
ranks of a quarantined job retry for days. If the other agent's lease ends earlier, it is announced then.
"""

from perseus.retry import Retry

JOIN_RETRY_S = 1.0
"""Delay of the announcement after the first refusal."""
MAX_JOIN_RETRY_S = 8.0
MIN_JOIN_RETRY_S = 0.1
"""Shortest delay: a lease that has run out may still be in force until the coordinator checks it."""


class JoinState:
    """One rank's state.

    Attributes:
        spec_fingerprint: that of the trainer's job; None until it is declared, "" if it never will be.
        is_connected: whether there is a connection.
        is_accepted: whether the coordinator has accepted the rank on it.
        heard_at_s: time of the coordinator's last message.
        lease_s: the lease on the latest connection; 0 before the first.
    """

    def __init__(self, *, is_registered: bool) -> None:
        self.spec_fingerprint = "" if is_registered else None
        self.is_connected = False
        self.is_accepted = False
        self.heard_at_s = 0.0
        self.lease_s = 0.0
        self._announce_at_s: float | None = None
        self._retry = Retry(JOIN_RETRY_S, MAX_JOIN_RETRY_S)

    def specify(self, spec_fingerprint: str) -> bool:
        """Set the trainer's specification; return whether it is new and must be announced."""
        if spec_fingerprint == self.spec_fingerprint:
            return False
        self.spec_fingerprint = spec_fingerprint
        self.is_accepted = False
        self._retry.succeeded()
        return True

    def connect(self, lease_s: float, now_s: float) -> None:
        """Note a new connection."""
        self.is_connected = True
        self.lease_s = lease_s
        self.heard_at_s = now_s
        self._retry.succeeded()

    def disconnect(self) -> None:
        """Note the end of the connection."""
        self.is_connected = self.is_accepted = False
        self._announce_at_s = None

    def accept(self) -> None:
        """Note the coordinator's acceptance."""
        self.is_accepted = True
        self._retry.succeeded()

    def refuse(self, now_s: float, lease_left_s: float | None = None) -> None:
        """Note a refusal, or the end of the acceptance; another agent's lease may have some time left."""
        self.is_accepted = False
        delay_s = self._retry.failed()
        if lease_left_s is not None:
            delay_s = min(delay_s, max(lease_left_s, MIN_JOIN_RETRY_S))
        self._announce_at_s = now_s + delay_s

    def is_announcement_due(self, now_s: float) -> bool:
        """Return whether it is time to announce the rank again."""
        return self._announce_at_s is not None and now_s >= self._announce_at_s

    def may_announce(self) -> bool:
        """Prepare an announcement; return whether there is a specification to announce."""
        self._announce_at_s = None
        return self.is_connected and self.spec_fingerprint is not None

    def validate(self) -> None:
        """Check the invariants; AssertionError otherwise. Called by tests."""
        assert not self.is_accepted or self.is_connected
