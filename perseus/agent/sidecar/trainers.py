"""What trainers say on the local socket, from their hello to their end; each has a connection.

A trainer that may not have its GPU, or its job, is turned away.
"""

import asyncio
from typing import assert_never

from perseus.agent.claims.decision import Refused
from perseus.agent.link.packets import (
    ComputationMark,
    Finish,
    HealthQuestion,
    Hello,
    IterationMark,
    MalformedPacket,
    Membership,
    Message,
    Registration,
    Reply,
    WaitMark,
)
from perseus.agent.rank.events import TrainerSpecified
from perseus.agent.sidecar.admission import Admission
from perseus.agent.sidecar.complaints import Complaints
from perseus.agent.sidecar.inventory import Inventory
from perseus.agent.sidecar.local import HELLO_TIMEOUT_S, Line
from perseus.agent.sidecar.ranks import Ranks
from perseus.agent.sidecar.roster import Roster, Trainer
from perseus.agent.sidecar.uplink import Uplink
from perseus.agent.sidecar.vitals import Vitals


class Trainers:
    """The conversations of a roster's trainers, and of who asks whether GPUs can be served."""

    def __init__(
        self,
        roster: Roster,
        admission: Admission,
        ranks: Ranks,
        inventory: Inventory,
        uplink: Uplink,
        vitals: Vitals,
        complaints: Complaints,
    ) -> None:
        self._roster = roster
        self._admission = admission
        self._ranks = ranks
        self._inventory = inventory
        self._uplink = uplink
        self._vitals = vitals
        self._complaints = complaints

    async def converse(self, line: Line) -> None:
        """One trainer's connection, from its first packet to its last."""
        trainer: Trainer | None = None
        try:
            hello = await self._hello(line)
            if hello is None:
                return
            if isinstance(hello, HealthQuestion):
                await line.pay_hello()
                line.reply(await self._health())
                return
            admitted = await self._admission.admit(hello, line)
            if isinstance(admitted, Refused):
                self._admission.turn_away(line, hello, admitted)
                return
            trainer = admitted
            self._uplink.begin(trainer.rank)
            await self._ranks.serve(trainer)
            while (message := await line.receive()) is not None:
                await self._on_message(trainer, message)
        except MalformedPacket as error:
            rank = str(trainer.rank) if trainer else None
            uid, text = line.peer.uid, str(error)
            self._complaints.complain(
                uid, "trainer not understood", "MALFORMED_PACKET", rank=rank, message=text
            )
            line.reply(Reply(False, "MALFORMED_PACKET", text))
        finally:
            if trainer is not None:
                await self._let_go(trainer)

    async def _let_go(self, trainer: Trainer) -> None:
        try:
            await self._ranks.let_go(trainer)
        finally:
            self._ranks.forget(trainer)
            self._roster.leave(trainer)
            self._uplink.end(trainer.rank)
            trainer.gone.set()

    async def _health(self) -> Reply:
        """Whether GPUs can be served; a coordinator that is away is no fault of the agent's."""
        found = await self._inventory.look()
        coordinator = self._uplink.describe()
        parts = [
            f"GPUs: {found.gpu_count}",
            f"ranks: {len(self._roster.served)}",
            coordinator,
            *found.problems,
        ]
        return Reply(found.gpu_count > 0, "" if found.gpu_count else "NO_GPU", "; ".join(parts))

    async def _hello(self, line: Line) -> Hello | HealthQuestion | None:
        """The first packet of a connection; None if there is none to come."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await line.receive_small()
        except TimeoutError:
            message = f"expected a hello within {HELLO_TIMEOUT_S:g} s, found silence"
            self._complaints.complain(line.peer.uid, "connection refused", "HELLO_TIMEOUT", message=message)
            line.reply(Reply(False, "HELLO_TIMEOUT", message))
            return None
        if hello is not None and not isinstance(hello, Hello | HealthQuestion):
            raise MalformedPacket(f"expected a hello, found {type(hello).__name__}")
        return hello

    async def _on_message(self, trainer: Trainer, message: Message) -> None:
        match message:
            case IterationMark() | ComputationMark() | WaitMark() | Finish():
                trainer.has_marked.set()
                if isinstance(message, IterationMark) and message.dropped_mark_count:
                    dropped_count = message.dropped_mark_count - trainer.dropped_mark_count
                    trainer.dropped_mark_count = message.dropped_mark_count
                    self._vitals.note_dropped(trainer.claim.gpu_uuid, max(0, dropped_count))
                self._roster.tell(trainer.rank, message)
            case Registration():
                claim = trainer.claim
                labels = claim.verdict.labels if claim.verdict is not None else ()
                trainer.line.reply(
                    await self._uplink.register(claim.rank.job_id, message, claim.user.name, labels)
                )
                self._specify(trainer, message.spec_fingerprint)
            case Membership(spec_fingerprint):
                self._specify(trainer, spec_fingerprint)
            case HealthQuestion() | Hello() | Reply():
                raise MalformedPacket(
                    f"expected a registration, a membership or a mark, found {type(message).__name__}"
                )
            case _:
                assert_never(message)

    def _specify(self, trainer: Trainer, spec_fingerprint: str) -> None:
        """Its trainer has said what it belongs to; the coordinator refuses what was not registered."""
        trainer.spec_fingerprint = spec_fingerprint
        self._roster.tell(trainer.rank, TrainerSpecified(spec_fingerprint))
