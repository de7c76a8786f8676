"""Where a rank stands with the coordinator: disconnected → announced → accepted, and back. Pure.

A rank is announced on a connection once its trainer has said what it belongs to. A refusal may pass (the job
may not be registered yet, or another agent's lease may still run): then the rank is announced again after
`JOIN_RETRY_S`, and after each further refusal in a row twice as late, at most `LONGEST_JOIN_RETRY_S`: the
ranks of a job that is put aside ask for days.
"""

from perseus.retry import Retry

JOIN_RETRY_S = 1.0
"""How long after the first refusal a rank is announced again."""
MAX_JOIN_RETRY_S = 8.0


class JoinState:
    """One rank's standing.

    Attributes:
        spec_fingerprint: what the trainer belongs to; None until it has said so, "" if it never will.
        is_connected: whether there is a connection.
        is_accepted: whether the coordinator has accepted the rank on it.
        heard_at_s: when the coordinator spoke last.
        lease_s: what it grants on the latest connection; 0 before the first.
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
        """The trainer has said what it belongs to; whether that is news, and the rank stands anew."""
        if spec_fingerprint == self.spec_fingerprint:
            return False
        self.spec_fingerprint = spec_fingerprint
        self.is_accepted = False
        self._retry.succeeded()
        return True

    def connect(self, lease_s: float, now_s: float) -> None:
        """There is a connection."""
        self.is_connected = True
        self.lease_s = lease_s
        self.heard_at_s = now_s
        self._retry.succeeded()

    def disconnect(self) -> None:
        """There is none any more."""
        self.is_connected = self.is_accepted = False
        self._announce_at_s = None

    def accept(self) -> None:
        """The rank is served."""
        self.is_accepted = True
        self._retry.succeeded()

    def refuse(self, now_s: float) -> None:
        """The rank is not served, or no longer."""
        self.is_accepted = False
        self._announce_at_s = now_s + self._retry.failed()

    def is_announcement_due(self, now_s: float) -> bool:
        """Whether it is time to announce the rank again."""
        return self._announce_at_s is not None and now_s >= self._announce_at_s

    def may_announce(self) -> bool:
        """The rank is about to be announced; whether there is something to announce it as."""
        self._announce_at_s = None
        return self.is_connected and self.spec_fingerprint is not None

    def validate(self) -> None:
        """Check what must always hold; AssertionError otherwise. Called by tests."""
        assert not self.is_accepted or self.is_connected
