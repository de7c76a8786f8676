"""How much one user may say: what they send is read no faster than this, and the rest waits in their sockets.

A trainer's probe drops marks that its socket has no room for, so who says too much loses marks of their own;
the agent's loop has time for others. Pure: times come in as arguments.
"""

RATE_BYTES_PER_S = 1024 * 1024
"""Some 30,000 marks a second; a node with 8 GPUs sends a few thousand."""

BURST_BYTES = 2 * 1024 * 1024


class Allowance:
    """One user's. It fills at a rate, up to a burst, and may be overdrawn by one packet."""

    def __init__(self, now_s: float) -> None:
        self._left = float(BURST_BYTES)
        self._at_s = now_s

    def spend(self, size: int, now_s: float) -> None:
        """Something of `size` bytes was read."""
        self._left = min(BURST_BYTES, self._left + (now_s - self._at_s) * RATE_BYTES_PER_S) - size
        self._at_s = now_s

    def is_full(self, now_s: float) -> bool:
        """Whether nothing would be lost by forgetting it."""
        return self._left + (now_s - self._at_s) * RATE_BYTES_PER_S >= BURST_BYTES

    def wait_s(self) -> float:
        """How long to read nothing more of this user, as of the latest `spend`."""
        return max(0.0, -self._left / RATE_BYTES_PER_S)
