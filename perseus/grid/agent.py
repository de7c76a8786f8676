"""The gateway's process: it connects the state machine to a broker, the coordinator, a clock and a file.

Four tasks follow the coordinator, request budgets from it, publish over the connection to the broker, and
send ticks. State is stored before anything else happens. The process connects to the broker only after the
coordinator: without its feeds no message can be judged, and the broker keeps messages meanwhile.
"""

import asyncio
import contextlib
import random
import secrets
import signal
import time
import uuid
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

import aiomqtt
import grpc
import structlog

from perseus.grid.broker import BrokerUnavailableError, Session, subscribe, until_disconnected
from perseus.grid.contract import messages, publishing
from perseus.grid.dsx_flex.breaches import BreachStatus
from perseus.grid.dsx_flex.budgets import KnownBudget
from perseus.grid.dsx_flex.commands import (
    ACCEPTED,
    Answer,
    AskForBudgets,
    BudgetAnswered,
    BudgetRefused,
    BudgetsListed,
    CoordinatorLost,
    FeedRead,
    FeedsListed,
    ForgetTargets,
    Input,
    KeepTargets,
    PublishAlert,
    PublishStatus,
    TargetsReceived,
    Tick,
    Verdict,
)
from perseus.grid.dsx_flex.gateway import Gateway
from perseus.grid.dsx_flex.values import Trace
from perseus.grid.journal import Journal, JournalError
from perseus.grid.power_client import PowerClient, is_transient
from perseus.grid.settings import DsxFlexSettings
from perseus.grid.signing import KeyFileError, SenderKeys, SignatureRefusedError, Signer
from perseus.rate_limited_log import RateLimitedLog
from perseus.retry import Retry
from perseus.tls.channels import Channels
from perseus.tls.tokens import TokenSource

_TICK_S = 1.0
_POLL_INTERVAL_S = 20.0
"""How often the coordinator's feeds and budgets are listed, which also shows whether it is there."""
_FIRST_WAIT_S, _MAX_WAIT_S = 1.0, 15.0
_MAX_UNSENT = 1000

_log = structlog.get_logger(__name__)


async def run(settings: DsxFlexSettings, token: TokenSource | None) -> None:
    """Run a gateway until SIGTERM or SIGINT.

    Raises:
        JournalError, KeyFileError, TlsError, TokenFileError: a file can't be used, at the start or later.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.set_exception_handler(_on_lost_error)
    journal = Journal(settings.state)
    try:
        agent = Agent(settings, journal, Channels(settings.coordinator, settings.tls_files, token))
        working = asyncio.ensure_future(agent.run())
        stopped: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for task in (working, stopped):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
    finally:
        journal.close()


def _on_lost_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ignore a JournalError from a callback of the loop, as `Agent.run` raises it."""
    if not isinstance(context.get("exception"), JournalError):
        loop.default_exception_handler(context)


@dataclass(slots=True)
class _Unsent:
    """A queued publication. It is written and signed when its turn comes, and unchanged when sent again."""

    publication: PublishStatus | PublishAlert
    written: bytes | None = None


class Agent:
    """The tasks of one gateway, and their shared state."""

    def __init__(self, settings: DsxFlexSettings, journal: Journal, channels: Channels) -> None:
        self._settings = settings
        self._journal = journal
        self._channels = channels
        self._keys = SenderKeys(settings.keys)
        self._signer = Signer(settings.signing_key)
        self._session = Session(settings, self._take_message)
        kept = journal.breaches()
        self._gateway = Gateway(
            settings.identifier,
            settings.heartbeat_s,
            lambda: str(uuid.uuid4()),
            journal.targets(),
            [each for each in kept if each.status is not BreachStatus.RESOLVED],
        )
        over = (each for each in kept if each.status is BreachStatus.RESOLVED)
        self._unsent = deque((_Unsent(PublishAlert(each, (), (), None)) for each in over), maxlen=_MAX_UNSENT)
        self._has_unsent = asyncio.Event()
        self._asks = asyncio.Event()
        self._is_met = asyncio.Event()
        self._client: PowerClient | None = None
        self._unknown: tuple[str, ...] = ()
        self._refused: dict[str, str | None] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_ending = False

    async def run(self) -> None:
        """Run until cancelled, or until an accepted message can't be stored."""
        tasks = [self._follow_coordinator(), self._follow_broker(), self._tick()]
        working = [asyncio.ensure_future(task) for task in tasks]
        try:
            await asyncio.wait({*working, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._is_ending = True
            for task in working:
                task.cancel()
            ends = await asyncio.gather(*working, return_exceptions=True)
        if self._failed.done():
            self._failed.result()
        for end in ends:
            if isinstance(end, Exception):
                raise _flat(end)[0]

    def _check_going_on(self) -> None:
        """End a cancelled task: Python 3.11's task groups lose a cancellation that comes with an error."""
        if self._is_ending:
            raise asyncio.CancelledError

    # --- The machine ----------------------------------------------------------------------------------------

    def _take(self, event: Input) -> None:
        for command in self._gateway.handle(event, time.time()):
            match command:
                case KeepTargets(some):
                    self._journal.keep_targets(some)
                case ForgetTargets(event_ids):
                    self._journal.forget_targets(event_ids)
                case AskForBudgets():
                    self._asks.set()
                case Answer():
                    self._log_answer(command)
                case PublishStatus():
                    self._queue(_Unsent(command))
                case PublishAlert(breach):
                    self._journal.keep_breach(breach)
                    _log.warning(
                        "power breach",
                        feed=breach.feed,
                        status=breach.status.value,
                        breach_id=breach.breach_id,
                        measured_w=round(breach.measured_w, 1),
                        target_w=breach.constraint.limit_w,
                    )
                    self._queue(_Unsent(command))

    def _log_answer(self, answer: Answer) -> None:
        some = answer.some
        is_good = answer.verdict in ACCEPTED or answer.verdict is Verdict.DUPLICATE
        (_log.info if is_good else _log.warning)(
            "load targets",
            verdict=answer.verdict.value,
            detail=answer.detail,
            sender=some.sender,
            event_id=some.event_id,
            correlation_id=some.correlation_id,
        )

    def _queue(self, unsent: _Unsent) -> None:
        publication = unsent.publication
        if self._unsent and isinstance(publication, PublishStatus) and publication.is_heartbeat:
            return  # heartbeats must not pile up without a broker
        self._unsent.append(unsent)
        self._has_unsent.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._take(Tick())

    # --- Messages -------------------------------------------------------------------------------------------

    def _take_message(self, topic: str, payload: bytes) -> None:
        """Handle a message. Refusals are logged; a message that can't be stored is not acknowledged."""
        if (
            self._failed.done()
        ):  # the machine has the message that was not stored, and would report a duplicate
            raise JournalError("no more messages are accepted after a failure")
        try:
            self._read(topic, payload)
        except (messages.MalformedError, SignatureRefusedError, KeyFileError) as error:
            _log.warning("message refused", topic=topic, reason=str(error))
        except Exception as error:
            if not self._failed.done():
                self._failed.set_exception(error)
            raise

    def _read(self, topic: str, payload: bytes) -> None:
        parts = topic.split("/")
        is_targets = parts[2:3] == ["isv"]
        wanted = messages.LOAD_TARGET_SET if is_targets else messages.POWER_BREACH_ENFORCEMENT
        envelope = messages.read_envelope(payload, wanted)
        role, identifier = envelope.sender
        if parts[2:4] != [role, identifier]:
            expected = f"//grid/v1/{'/'.join(parts[2:4])}"
            raise messages.MalformedError(f"source: expected {expected}, found {envelope.source}")
        signed = self._keys.verified(role, identifier, envelope.data)
        if is_targets:
            self._take(TargetsReceived(messages.read_load_targets(envelope, signed)))
            return
        outcome = messages.read_enforcement(signed)
        _log.info(
            "power breach enforcement",
            sender=identifier,
            breach_id=outcome.breach_id,
            feed=outcome.feed_tag,
            action=outcome.action,
            code=outcome.code,
            message=outcome.diag_msg,
            resource_count=len(outcome.results),
        )

    # --- The broker -----------------------------------------------------------------------------------------

    async def _follow_broker(self) -> None:
        await self._is_met.wait()
        retry, problems = _retry(), RateLimitedLog(_log)
        while True:
            try:
                async with self._session.client() as client:
                    await subscribe(client)
                    _log.info("connected to the broker", broker=self._settings.broker)
                    retry.succeeded()
                    problems.reset()
                    async with asyncio.TaskGroup() as group:
                        group.create_task(until_disconnected(client))
                        group.create_task(self._publish(client))
            except* (aiomqtt.MqttError, BrokerUnavailableError, OSError) as several:
                reason = str(_flat(several)[0])
            self._check_going_on()
            problems.warning("no broker", broker=self._settings.broker, reason=reason)
            await asyncio.sleep(retry.failed())

    async def _publish(self, client: aiomqtt.Client) -> None:
        while True:
            while self._unsent:
                unsent = self._unsent[0]
                if unsent.written is None:
                    unsent.written = await self._written(unsent.publication)
                topic, qos = self._place(unsent.publication)
                await client.publish(topic, unsent.written, qos=qos)
                if self._unsent and self._unsent[0] is unsent:  # a full queue drops its oldest
                    self._unsent.popleft()
                publication = unsent.publication
                if (
                    isinstance(publication, PublishAlert)
                    and publication.breach.status is BreachStatus.RESOLVED
                ):
                    self._journal.forget_breach(publication.breach.breach_id)
            self._has_unsent.clear()
            await self._has_unsent.wait()

    def _place(self, publication: PublishStatus | PublishAlert) -> tuple[str, int]:
        base = f"grid/v1/dsx-flex-agent/{self._settings.identifier}"
        return (
            (f"{base}/powerstate/status", 1)
            if isinstance(publication, PublishStatus)
            else (f"{base}/powerbreach", 2)
        )

    async def _written(self, publication: PublishStatus | PublishAlert) -> bytes:
        if isinstance(publication, PublishStatus):
            event_type, correlation_id = messages.POWER_STATE_STATUS, publication.correlation_id
            content = publishing.status(publication)
        else:
            event_type, correlation_id = messages.POWER_BREACH_ALERT, publication.breach.correlation_id
            nodes = {
                job_id: await self._nodes(job_id) for job_id in {*publication.to_pause, *publication.held}
            }
            content = publishing.alert(publication, nodes)
        return messages.write_envelope(
            event_id=str(uuid.uuid4()),
            agent=self._settings.identifier,
            event_type=event_type,
            time_s=time.time(),
            data=self._signer.sign(messages.write_data(content)),
            trace=_continued(publication.trace),
            correlation_id=correlation_id,
        )

    async def _nodes(self, job_id: str) -> tuple[str, ...]:
        """Return a job's nodes; none if unknown: better fewer hints than a late alert."""
        if self._client is None:
            return ()
        try:
            return await self._client.nodes(job_id)
        except grpc.aio.AioRpcError as error:
            _log.warning("nodes of a job are unknown", job_id=job_id, reason=error.details())
            return ()

    # --- The coordinator ------------------------------------------------------------------------------------

    async def _follow_coordinator(self) -> None:
        retry, problems = _retry(), RateLimitedLog(_log)
        while True:
            reason, tried = "", self._channels.beside()
            try:
                async with PowerClient(self._channels) as client:
                    self._take(FeedsListed(await client.feeds()))
                    self._take(BudgetsListed(await client.budgets()))
                    _log.info("connected to the coordinator", coordinator=tried.address)
                    retry.succeeded()
                    problems.reset()
                    self._client = client
                    if self._gateway.knows_feeds:
                        self._is_met.set()
                    else:
                        _log.warning(
                            "no feed has limit_w in the coordinator's configuration, so none is served"
                        )
                    async with asyncio.TaskGroup() as group:
                        group.create_task(self._watch(client))
                        group.create_task(self._poll_feeds(client))
                        group.create_task(self._ask(client))
            except* grpc.aio.AioRpcError as several:
                (error, *_) = [each for each in _flat(several) if isinstance(each, grpc.aio.AioRpcError)]
                reason = error.details() or error.code().name
                self._channels.move_on(error)
            self._client = None
            self._check_going_on()
            self._take(CoordinatorLost())
            reason = await tried.diagnosis() or reason
            problems.warning("no coordinator", coordinator=tried.address, reason=reason)
            await asyncio.sleep(retry.failed())

    async def _watch(self, client: PowerClient) -> None:
        async for reading in client.watch():
            self._take(FeedRead(reading))

    async def _poll_feeds(self, client: PowerClient) -> None:
        """List feeds and budgets regularly: others may have cancelled a budget."""
        while True:
            await asyncio.sleep(_POLL_INTERVAL_S)
            self._take(FeedsListed(await client.feeds()))
            self._take(BudgetsListed(await client.budgets()))
            if self._gateway.knows_feeds:
                self._is_met.set()

    async def _ask(self, client: PowerClient) -> None:
        """Request the needed budgets whenever they may have changed, and again if one is refused."""
        retry = _retry()
        while True:
            await self._asks.wait()
            self._asks.clear()
            if await self._ask_once(client):
                retry.succeeded()
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(retry.failed()):
                    await self._asks.wait()
            self._asks.set()

    async def _ask_once(self, client: PowerClient) -> bool:
        """Set the needed budgets and cancel the others; return whether all requests were granted."""
        refused: dict[str, str | None] = {}
        asked: set[str] = set()
        let_go: set[str] = set()
        while True:
            changes = self._gateway.changes(time.time())
            if changes.unknown != self._unknown:
                self._unknown = changes.unknown
                _log.warning("budgets of this gateway are for unknown messages", budget_ids=changes.unknown)
            for budget in changes.to_defer:
                if await self._ask_for(budget.budget_id, client.set(budget), refused):
                    await self._ask_for(budget.budget_id, client.cancel(budget.budget_id), refused)
            to_set = [budget for budget in changes.to_set if budget.request_id not in asked]
            to_cancel = [budget_id for budget_id in changes.to_cancel if budget_id not in let_go]
            if not to_set and not to_cancel:
                self._refused = refused
                return not refused
            for budget in to_set:
                asked.add(budget.request_id)
                if not await self._ask_for(budget.budget_id, client.set(budget), refused):
                    self._take(BudgetRefused(budget.budget_id))
            for budget_id in to_cancel:
                let_go.add(budget_id)
                if await self._ask_for(budget_id, client.cancel(budget_id), refused):
                    asked.clear()  # there may be room now for refused ones
                    refused.clear()

    async def _ask_for(
        self, budget_id: str, call: Awaitable[KnownBudget], refused: dict[str, str | None]
    ) -> bool:
        try:
            self._take(BudgetAnswered(await call))
        except grpc.aio.AioRpcError as error:
            if is_transient(error):
                raise
            refused[budget_id] = error.details()
            if self._refused.get(budget_id) != error.details():  # log only the first of equal refusals
                _log.error("budget refused", budget_id=budget_id, reason=error.details())
            return False
        return True


def _retry() -> Retry:
    return Retry(_FIRST_WAIT_S, _MAX_WAIT_S, jitter=1.0, random=random.random)


def _continued(trace: Trace | None) -> Trace:
    """Return the next span of a trace, or the first of a new one."""
    span_id = secrets.token_hex(8)
    if trace is None:
        return Trace(f"00-{secrets.token_hex(16)}-{span_id}-01")
    version, trace_id, _, flags = trace.traceparent.split("-")
    return Trace(f"{version}-{trace_id}-{span_id}-{flags}", trace.tracestate)


def _flat(error: BaseException) -> list[BaseException]:
    """Return the errors in a group, nested ones included, or a single error."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for each in error.exceptions for leaf in _flat(each)]
