"""The coordinator's messages to an agent."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from perseus.service.domain.errors import CoordinatorError
from perseus.service.domain.measured import Saving
from perseus.service.domain.model import MaxClock, Offer
from perseus.service.domain.specification import Coordinates
from perseus.solver import Computation


class AgentPort(Protocol):
    """The port of one agent. No method waits."""

    def accept_rank(
        self, job_id: str, rank: Coordinates, order: Sequence[Computation], max_clock: MaxClock | None
    ) -> None:
        """Accept a rank: send its order of computations and its maximum clock."""

    def limit_rank(self, job_id: str, rank: Coordinates, max_clock: MaxClock | None) -> None:
        """Send a rank's new maximum clock, or None to lift it, ahead of all offers that still wait."""

    def refuse_rank(
        self, job_id: str, rank: Coordinates, error: CoordinatorError, max_clock: MaxClock | None
    ) -> None:
        """Refuse a rank, or end its service: it goes to stock. An offer that still waits is dropped."""

    def offer(self, job_id: str, rank: Coordinates, offer: Offer) -> None:
        """Offer clocks to a rank; this replaces an offer that still waits for the rank."""

    def heartbeat(self, power_interval_s: float, savings: Mapping[str, Saving]) -> None:
        """Send a heartbeat, with the wanted interval of power readings in seconds (0 for none), and the known
        savings of the jobs whose first ranks the agent serves."""

    def acknowledge(self, sequence: int) -> None:
        """Acknowledge all telemetry up to the sequence: it is stored."""

    def drain(self) -> None:
        """Announce that the coordinator is about to stop."""

    def end(self, error: CoordinatorError) -> None:
        """End the stream."""
