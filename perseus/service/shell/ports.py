"""What the coordinator may do to an agent."""

from collections.abc import Sequence
from typing import Protocol

from perseus.service.domain.errors import CoordinatorError
from perseus.service.domain.model import MaxClock, Offer
from perseus.service.domain.specification import Coordinates
from perseus.solver import Computation


class AgentPort(Protocol):
    """The way to one agent. Nothing here waits."""

    def accept_rank(
        self, job_id: str, rank: Coordinates, order: Sequence[Computation], max_clock: MaxClock | None
    ) -> None:
        """Say that a rank is served, what it computes, and under which ceiling."""

    def limit_rank(self, job_id: str, rank: Coordinates, max_clock: MaxClock | None) -> None:
        """Say that a rank has another ceiling, or none; before all offers that still wait."""

    def refuse_rank(
        self, job_id: str, rank: Coordinates, error: CoordinatorError, max_clock: MaxClock | None
    ) -> None:
        """Say that a rank is not served, or no longer: it goes to stock. An offer that waits is dropped."""

    def offer(self, job_id: str, rank: Coordinates, offer: Offer) -> None:
        """Offer clocks to a rank; an offer that still waits for the rank is replaced."""

    def heartbeat(self, power_interval_s: float) -> None:
        """Give a sign of life, with how often power readings are wanted, seconds; 0 for never."""

    def acknowledge(self, sequence: int) -> None:
        """Say that all telemetry up to the sequence is stored."""

    def drain(self) -> None:
        """Say that the coordinator is about to stop."""

    def end(self, error: CoordinatorError) -> None:
        """End the stream."""
