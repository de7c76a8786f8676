"""Who is here: the trainers whose claims are entered, and the ranks among theirs that are served.

What trainers say and what the coordinator says meet here.
"""

import asyncio

import structlog

from perseus.agent.claims.registry import Claim, ClaimRegistry
from perseus.agent.gpu import GpuError
from perseus.agent.link.computation import Rank
from perseus.agent.link.packets import Reply
from perseus.agent.rank.events import Event
from perseus.agent.sidecar.local import ProbeConnection
from perseus.agent.sidecar.served import ServedRank
from perseus.rate_limited_log import RateLimitedLog

_log = structlog.get_logger(__name__)


class Trainer:
    """A trainer whose claim is entered. `problem`: what is wrong with its GPU, if that is known already."""

    def __init__(
        self, claim: Claim, connection: ProbeConnection, is_registered: bool, problem: GpuError | None
    ) -> None:
        self.claim = claim
        self.connection = connection
        self.is_registered = is_registered
        self.problem = problem
        self.problems = RateLimitedLog(_log)
        self.dropped_mark_count = 0
        self.gpu_index: int | None = None
        self.spec_fingerprint: str | None = None
        self.has_marked = asyncio.Event()
        self.gone = asyncio.Event()
        self.serving: asyncio.Task[None] | None = None
        self.watching: asyncio.Task[None] | None = None

    @property
    def rank(self) -> Rank:
        """The rank that it trains."""
        return self.claim.rank


class Roster:
    """All of them, by rank.

    Attributes:
        book: the claims.
        trainers: also those whose GPU can't be used.
        served: the ranks that are served now.
        is_stopping: whether the agent is being stopped, and takes in nobody any more.
    """

    def __init__(self) -> None:
        self.registry = ClaimRegistry()
        self.trainers: dict[Rank, Trainer] = {}
        self.served: dict[Rank, ServedRank] = {}
        self.is_stopping = False

    def enter(self, trainer: Trainer) -> None:
        """Take in a trainer whose claim conflicts with none."""
        self.registry.enter(trainer.claim)
        self.trainers[trainer.rank] = trainer

    def leave(self, trainer: Trainer) -> None:
        """It is gone."""
        self.registry.end(trainer.claim)
        del self.trainers[trainer.rank]

    def dispatch(self, rank: Rank, event: Event) -> None:
        """Let a rank know, if it is served."""
        if (served := self.served.get(rank)) is not None:
            served.handle(event)

    def dispatch_to_all(self, event: Event) -> None:
        """Let all ranks know that are served."""
        for served in list(self.served.values()):
            served.handle(event)

    def reply(self, rank: Rank, reply: Reply) -> None:
        """Say something to a rank's trainer, if it is here."""
        if (trainer := self.trainers.get(rank)) is not None:
            trainer.connection.reply(reply)
