"""How much users may say: what they send is read no faster than this, and the rest waits in their sockets.

A trainer's probe drops marks that its socket has no room for, so who says too much loses marks of their own;
the agent's loop has time for others. All users together may fill a third of it. Who says less than half of
that is not held up, however many others say more. Pure: times come in as arguments.
"""

ALL_BYTES_PER_S = 512 * 1024
"""Of all users: some 16,000 marks; 48,000 fill a core, and a node with 8 GPUs sends a few thousand."""

USER_BYTES_PER_S = ALL_BYTES_PER_S / 2
"""Nobody alone has all."""

BURST_BYTES = 1024 * 1024

HELLO_BYTES = 64 * 1024
"""What a hello costs, and a question after health: both are looked into, by processes and in the driver."""

_LITTLE_BYTES = BURST_BYTES / 2
"""Who has so much left said little lately, and does not wait for others."""


class Allowance:
    """A user's, or that of all. It fills at a rate, up to a burst, and may be overdrawn by one packet.

    `of_all` is what all users have together: what one spends is spent there, too.
    """

    def __init__(
        self, now_s: float, rate_bytes_per_s: float = USER_BYTES_PER_S, of_all: "Allowance | None" = None
    ) -> None:
        self._rate_bytes_per_s = rate_bytes_per_s
        self._of_all = of_all
        self._left = float(BURST_BYTES)
        self._at_s = now_s

    def spend(self, size: int, now_s: float) -> None:
        """Something of `size` bytes was read."""
        self._left = min(BURST_BYTES, self._left + (now_s - self._at_s) * self._rate_bytes_per_s) - size
        self._at_s = now_s
        if self._of_all is not None:
            self._of_all.spend(size, now_s)

    def is_full(self, now_s: float) -> bool:
        """Whether nothing would be lost by forgetting it."""
        return self._left + (now_s - self._at_s) * self._rate_bytes_per_s >= BURST_BYTES

    def wait_s(self) -> float:
        """How long to read nothing more of this user, as of the latest `spend`."""
        own_s = max(0.0, -self._left / self._rate_bytes_per_s)
        if self._of_all is None or self._left >= _LITTLE_BYTES:
            return own_s
        return max(own_s, self._of_all.wait_s())
