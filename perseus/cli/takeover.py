"""What a call hears of a fleet while a slot changes hands: whether to repeat it, and what to tell people."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc

LIMIT_S = 60.0
"""How long a call waits for a coordinator that takes over, or comes back: several leases of a member."""

_READS = ("Get", "List", "Watch")


class Takeover:
    """What one call has heard so far.

    Attributes:
        failed_at: the address where it failed first.
        tried_count: how many of the given addresses have failed in this round.
        end_s: until when it is repeated; None before it has waited.
    """

    def __init__(self, method: str) -> None:
        self.failed_at = ""
        self.tried_count = 0
        self.end_s: float | None = None
        self._is_read = method.rpartition("/")[2].startswith(_READS)
        self._slot = self._holder = ""
        self._standbys: list[str] = []
        self._silent: dict[str, None] = {}

    def may_repeat(self, address: str, error: "grpc.RpcError") -> bool:
        """Note an error at an address; return whether the call may be repeated, there or elsewhere.

        A change may only where it was surely not executed: a coordinator has refused it as not its own, or
        could not be connected to.
        """
        import grpc

        from perseus.tls.channels import error_info

        self.failed_at = self.failed_at or address
        is_lost = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        info = error_info(error)
        if info is None and is_lost:
            self._silent[address] = None
            # These are gRPC's words where the call was never sent.
            return self._is_read or "failed to connect" in (error.details() or "")
        self._silent.pop(address, None)
        if info is None or info.reason != "SERVED_ELSEWHERE":
            self._standbys = []  # who should answer has done so
            return self._is_read and is_lost
        self._slot, self._holder = info.metadata.get("slot", ""), info.metadata.get("address", "")
        self._standbys = [each for each in info.metadata.get("standbys", "").split(",") if each]
        return True

    def text(self) -> str:
        """Return which slot changes hands, and who stands by; empty if none is known to change hands."""
        standing_by = [address for address in self._standbys if address not in self._silent]
        if not standing_by or (self._holder and self._holder not in self._silent):
            return ""
        slot = f"slot {self._slot}" if self._slot else "a slot"
        text = f"{slot} changes hands; standing by: {', '.join(standing_by)}"
        if self._silent:
            text += f"; no answer from {', '.join(self._silent)}"
        return text if self.end_s is None else f"{text}; nobody took it over in {LIMIT_S:g} s"

    def may_wait(self, now_s: float) -> bool:
        """Return whether the call may wait and be repeated; its time runs from the first question."""
        if self.end_s is None:
            self.end_s = now_s + LIMIT_S
        return now_s < self.end_s
