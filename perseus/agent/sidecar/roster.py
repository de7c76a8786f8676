"""The roster: the trainers whose claims are entered, and those of their ranks that are served.

Messages from trainers and from the coordinator meet here.
"""

import asyncio

import structlog

from perseus.agent.claims.registry import Claim, ClaimRegistry
from perseus.agent.gpu import GpuError
from perseus.agent.link.computation import Rank
from perseus.agent.link.packets import SAVING, Hello, Reply, Saving
from perseus.agent.rank.events import Event
from perseus.agent.sidecar.local import ProbeConnection
from perseus.agent.sidecar.served import ServedRank
from perseus.rate_limited_log import RateLimitedLog

_log = structlog.get_logger(__name__)


class Trainer:
    """A trainer whose claim is entered. `problem` is the error of its GPU, if already known."""

    def __init__(
        self, claim: Claim, connection: ProbeConnection, hello: Hello, problem: GpuError | None
    ) -> None:
        self.claim = claim
        self.connection = connection
        self.hello = hello
        self.problem = problem
        self.problems = RateLimitedLog(_log)
        self.dropped_mark_count = 0
        # Why it marks no iterations, by its own report; None before that, which a probe makes once at most.
        self.unmarked: str | None = None
        self.gpu_index: int | None = None
        self.spec_fingerprint: str | None = None
        self.has_marked = asyncio.Event()
        self.gone = asyncio.Event()
        self.serving: asyncio.Task[None] | None = None
        self.watching: asyncio.Task[None] | None = None
        self.registering: asyncio.Task[None] | None = None
        self._saving: Saving | None = None

    @property
    def rank(self) -> Rank:
        """The rank that it trains."""
        return self.claim.rank

    def allow_packing(self, is_allowed: bool) -> None:
        """Let its probe pack marks, or not, if it can."""
        if self.hello.packs_marks:
            self.connection.allow_packing(is_allowed)

    def inform(self, saving: Saving | None) -> None:
        """Send the job's saving, if it has changed; None if it is unknown."""
        if saving != self._saving:
            self._saving = saving
            text = (
                f"the plans in force save {saving}" if saving is not None else "the plans' saving is unknown"
            )
            self.connection.reply(Reply(True, SAVING, text, is_notice=True, saving=saving))


class Roster:
    """All trainers, by rank.

    Attributes:
        registry: the claims.
        trainers: all trainers, also those whose GPU can't be used.
        served: the ranks that are served now.
        is_stopping: whether the agent is being stopped and admits no more trainers.
    """

    def __init__(self) -> None:
        self.registry = ClaimRegistry()
        self.trainers: dict[Rank, Trainer] = {}
        self.served: dict[Rank, ServedRank] = {}
        self.is_stopping = False

    def describe(self) -> str:
        """Describe the ranks, for people: how many there are, and why some are not marked."""
        text = f"ranks: {len(self.served)}"
        trainers = self.trainers.values()
        if waiting := sum(
            each.spec_fingerprint is None and not each.hello.is_registered for each in trainers
        ):
            text += f", {waiting} before the first marked iteration"
        if unmarked := self.unmarked:
            text += f"; {len(unmarked)} not marked, such as {unmarked[0].rank}: {unmarked[0].unmarked}"
        if foreign := self.foreign_clocks:
            text += f"; {'; '.join(foreign)}"
        return text

    @property
    def foreign_clocks(self) -> list[str]:
        """Say for each served GPU whose clock another client of the driver holds, at which one."""
        return [
            f"{served.gpu_uuid} of {rank} runs at {clock.clock_mhz} MHz, "
            f"wanted {f'{clock.wanted_mhz} MHz' if clock.wanted_mhz else 'stock'}: "
            "another client of the driver holds it"
            for rank, served in self.served.items()
            if (clock := served.foreign_clock) is not None
        ]

    @property
    def unmarked(self) -> list[Trainer]:
        """The trainers that report training without marked iterations."""
        return [trainer for trainer in self.trainers.values() if trainer.unmarked]

    def enter(self, trainer: Trainer) -> None:
        """Enter a trainer whose claim conflicts with no other."""
        self.registry.enter(trainer.claim)
        self.trainers[trainer.rank] = trainer

    def leave(self, trainer: Trainer) -> None:
        """Remove a trainer that is gone."""
        self.registry.end(trainer.claim)
        del self.trainers[trainer.rank]

    def dispatch(self, rank: Rank, event: Event) -> None:
        """Pass an event to a rank, if it is served."""
        if (served := self.served.get(rank)) is not None:
            served.handle(event)

    def dispatch_to_all(self, event: Event) -> None:
        """Pass an event to all served ranks."""
        for served in list(self.served.values()):
            served.handle(event)

    def reply(self, rank: Rank, reply: Reply) -> None:
        """Send a reply to a rank's trainer, if it is connected."""
        if (trainer := self.trainers.get(rank)) is not None:
            trainer.connection.reply(reply)
