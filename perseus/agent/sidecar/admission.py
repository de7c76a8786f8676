"""Admission of trainers: judges a trainer's claim at its hello, and again for as long as it stays.

`claims` decides from the facts that `access` finds, before the agent does anything for the trainer, and again
as those facts change.
"""

import asyncio
import contextlib
import time
from weakref import WeakValueDictionary

import structlog

from perseus.agent.claims.decision import Allowed, Refused
from perseus.agent.claims.grants import User
from perseus.agent.claims.registry import GPU_TAKEN, Claim
from perseus.agent.gpu import GpuError, GpuInUseError
from perseus.agent.link.packets import Hello, Reply
from perseus.agent.rank.events import TrainerGone
from perseus.agent.sidecar.access import AccessChecker
from perseus.agent.sidecar.gpus import AgentCounters
from perseus.agent.sidecar.local import REFUSAL_LOG_PERIOD_S, ProbeConnection
from perseus.agent.sidecar.peer import check_clock
from perseus.agent.sidecar.roster import Roster, Trainer
from perseus.rate_limited_log import RateLimitedLog

_log = structlog.get_logger(__name__)

# How often a claim is judged again: while it is unproven, and once it is proven.
_WATCH_UNPROVEN_S = 1.0
_WATCH_S = 5.0
# How long a trainer waits for a trainer that yields its GPU.
_EVICTION_TIMEOUT_S = 10.0
# How long a process that says hello again waits for its earlier connection to end.
_LEAVE_S = 2.0
_CLAIM_LOST = "CLAIM_LOST"


class Admission:
    """Admits trainers to a roster, or refuses them and counts the refusals in `counters`."""

    def __init__(self, roster: Roster, access: AccessChecker, counters: AgentCounters) -> None:
        self._roster = roster
        self._access = access
        self._counters = counters
        self._refusal_log = RateLimitedLog(_log, REFUSAL_LOG_PERIOD_S)
        # One lock per user: a hello costs threads, processes and driver calls that other users need, too.
        self._judging: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    def _one_at_a_time(self, uid: int) -> asyncio.Lock:
        if (lock := self._judging.get(uid)) is None:
            lock = self._judging[uid] = asyncio.Lock()
        return lock

    async def admit(self, hello: Hello, connection: ProbeConnection) -> Trainer | Refused:
        """Enter a trainer's claim once all claims that yield to it have ended, or return a refusal."""
        if self._roster.is_stopping:
            return Refused("AGENT_STOPS", "the agent is being stopped")
        if (refused := check_clock(connection.peer, hello.time_ns, time.monotonic_ns())) is not None:
            return refused
        # Its process may have left and come back at once, also as another rank: its last messages and its
        # GPU's reset take a moment.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                for before in list(self._roster.trainers.values()):
                    is_own = before.connection.peer.pid == connection.peer.pid
                    if is_own and (before.rank == hello.rank or before.claim.gpu_uuid == hello.gpu_uuid):
                        await before.gone.wait()
        unnamed = User(connection.peer.uid, str(connection.peer.uid))
        if (refused := self._roster.registry.refusal(hello.rank, hello.gpu_uuid, unnamed)) is not None:
            return refused
        await connection.pay_hello()
        user = await self._access.user(connection.peer)
        verdict: Allowed | Refused | None
        problem = None
        try:
            async with self._one_at_a_time(user.uid):
                verdict = await self._access.judge(connection.peer, user, hello.gpu_uuid, None)
        except GpuError as error:  # serving the GPU will fail the same way and report it
            verdict, problem = None, error
        if isinstance(verdict, Refused):
            return verdict
        claim = Claim(hello.rank, hello.gpu_uuid, user, verdict)
        if (refused := await self._evict_unproven(claim)) is not None:
            return refused
        if self._roster.is_stopping:
            return Refused("AGENT_STOPS", "the agent is being stopped")
        trainer = Trainer(claim, connection, hello, problem)
        self._roster.enter(trainer)
        return trainer

    async def _evict_unproven(self, claim: Claim) -> Refused | None:
        """End the claims that yield to this one; return a refusal if one does not yield."""
        try:
            async with asyncio.timeout(_EVICTION_TIMEOUT_S):
                while conflicting := self._roster.registry.conflicts(claim):
                    if isinstance(conflicting, Refused):
                        return conflicting
                    for other in [self._roster.trainers[each.rank] for each in conflicting]:
                        message = f"{other.rank}: user {claim.user} has a better claim"
                        self._end(other, Refused(_CLAIM_LOST, message))
                        await other.gone.wait()
        except TimeoutError:
            return Refused(GPU_TAKEN, f"GPU {claim.gpu_uuid}: another rank runs on it")
        return None

    async def may_have_its_gpu(self, trainer: Trainer) -> bool:
        """Judge the claim to a GPU that was unusable before; raise `GpuError` if that is impossible now."""
        claim = trainer.claim
        verdict = await self._access.judge(trainer.connection.peer, claim.user, claim.gpu_uuid, None)
        if isinstance(verdict, Refused):
            self._end(trainer, verdict)
            return False
        if self._roster.registry.has_other_for_gpu(claim):
            raise GpuInUseError(f"GPU {claim.gpu_uuid}: another rank runs on it")
        claim.verdict = verdict
        return True

    async def watch(self, trainer: Trainer) -> None:
        """Judge a claim again at the first mark and periodically: the observable facts change."""
        claim = trainer.claim
        while True:
            pause_s = _WATCH_S if claim.is_proven else _WATCH_UNPROVEN_S
            if trainer.has_marked.is_set():
                await asyncio.sleep(pause_s)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await trainer.has_marked.wait()
            try:
                verdict = await self._access.judge(
                    trainer.connection.peer, claim.user, claim.gpu_uuid, claim.verdict
                )
            except GpuError:  # serving the GPU meets the same error
                continue
            except Exception as error:  # of the system: the latest verdict holds until it can be asked again
                uid, reason = trainer.connection.peer.uid, type(error).__name__
                self._refusal_log.warning(
                    "claim not judged again",
                    uid,
                    reason,
                    uid=uid,
                    reason=reason,
                    rank=str(claim.rank),
                    message=str(error),
                )
                continue
            if claim.verdict is None:  # the GPU has failed meanwhile; the claim is judged when it comes back
                continue
            if isinstance(verdict, Refused):
                self._end(trainer, verdict)
                return
            claim.verdict = verdict

    # --- Turning away ---------------------------------------------------------------------------------------

    def turn_away(self, connection: ProbeConnection, hello: Hello, refused: Refused) -> None:
        """Send the refusal to a trainer that was not admitted."""
        self._refuse(connection, str(hello.rank), refused)

    def _end(self, trainer: Trainer, refused: Refused) -> None:
        """End a rank whose claim no longer holds; its GPU returns to stock."""
        self._refuse(trainer.connection, str(trainer.rank), refused)
        self._roster.dispatch(trainer.rank, TrainerGone())

    def _refuse(self, connection: ProbeConnection, rank: str, refused: Refused) -> None:
        self._counters.refusal_counts[refused.reason] += 1
        reason, message = refused.reason, refused.message
        uid = connection.peer.uid
        self._refusal_log.warning(
            "rank refused", uid, reason, uid=uid, reason=reason, rank=rank, message=message
        )
        connection.end(Reply(False, reason, message))
