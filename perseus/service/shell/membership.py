"""This coordinator's membership in the fleet on its database: carries out what `fleet.membership` decides."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar, assert_never

import structlog

from perseus.clock_skew import SkewWatch
from perseus.rate_limited_log import RateLimitedLog
from perseus.service.domain.errors import (
    DatabaseUnavailableError,
    LeaseLostError,
    StoreFailedError,
)
from perseus.service.domain.members import Fleet, Slot
from perseus.service.fleet.membership import (
    RENEWALS_PER_LEASE,
    Command,
    Depart,
    Event,
    Expired,
    LeaveRequested,
    Membership,
    Renew,
    RenewalFailed,
    Renewed,
    Serve,
    Stop,
    Take,
    Taken,
    Ticked,
)
from perseus.service.storage.engines import Opened
from perseus.service.storage.membership import MemberRows

log = structlog.get_logger(__name__)

T = TypeVar("T")

_TICKS_PER_RENEWAL = 4


class FleetMember:
    """A member of a fleet: it stands by until it takes a slot of jobs, and ends when it loses it.

    Attributes:
        fleet: what it knows of the others.
        taken: the slot, once it is taken.
        connections: the store's, opened by then.
        ended: done once the membership has ended; with an error unless it was left in order.
    """

    def __init__(
        self,
        rows: MemberRows,
        lease_s: float,
        open_connections: Callable[[int], Sequence[Opened]],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_connections` opens the store's connections for a slot: who can't takes none."""
        self.fleet = Fleet(rows.member_id, None, (), ())
        self.taken: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.connections: Sequence[Opened] = ()
        self._rows = rows
        self._open_connections = open_connections
        self._lease_s = lease_s
        self._monotonic = monotonic
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="membership")
        self._commands: asyncio.Queue[Command] = asyncio.Queue()
        self._machine: Membership | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._failures = RateLimitedLog(log)
        self._failure = ""
        self._database_clock = SkewWatch()

    async def join(self, address: str, place: str, page_url: str) -> None:
        """Become a member, as `MemberRows.join`, and take part until `leave` or until the lease is lost.

        Raises:
            StoreFailedError: the database failed.
        """
        joined_s = self._monotonic()
        await self._in_thread(partial(self._rows.join, address, place, page_url))
        self._machine = Membership(self._rows.member_id, self._lease_s, joined_s)
        self._tasks = [asyncio.create_task(self._tick()), asyncio.create_task(self._work())]
        for task in self._tasks:
            task.add_done_callback(self._note_end)
        log.info("joined the fleet of this database", member_id=self._rows.member_id, address=address)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """End the membership with a task that has failed: nobody would renew the lease any more."""
        if not task.cancelled() and (error := task.exception()) is not None and not self.ended.done():
            self.ended.set_exception(error)

    async def leave(self) -> None:
        """Be a member no longer: a slot that is held is free. What is to be stored must be stored."""
        if self._machine is not None and not self._machine.has_ended:
            self._handle(LeaveRequested())
            await asyncio.wait({self.ended}, timeout=self._lease_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._thread.shutdown(wait=False)
        await asyncio.to_thread(self._rows.close)
        self._close_connections()
        if self.ended.done():
            self.ended.exception()  # it has been seen

    async def _tick(self) -> None:
        while not self.ended.done():
            self._handle(Ticked())
            await asyncio.sleep(self._lease_s / RENEWALS_PER_LEASE / _TICKS_PER_RENEWAL)

    def _handle(self, event: Event) -> None:
        machine = self._machine
        assert machine is not None, "expected a member that has joined"
        for command in machine.handle(event, self._monotonic()):
            match command:
                case Serve(number, lease_epoch):
                    log.info("took over the jobs", slot=number, lease_epoch=lease_epoch)
                    taken = Slot(number, self._rows.member_id, lease_epoch)
                    self.fleet.served = number
                    self.fleet.slots = [taken if slot.number == number else slot for slot in self.fleet.slots]
                    self.taken.set_result(taken)
                case Stop(cause):
                    for each in self.connections:  # nothing may be stored any more, so nobody waits for it
                        each.abort()
                    if not self.ended.done():
                        causes = filter(None, (cause, self._failure))
                        self.ended.set_exception(LeaseLostError(cause=": ".join(causes)))
                case _:
                    self._commands.put_nowait(command)

    async def _work(self) -> None:
        """Carry out commands in order, and return their answers to the machine."""
        while not self.ended.done():
            command = await self._commands.get()
            sent_s = self._monotonic()
            try:
                answer = await self._in_thread(partial(self._done, command, sent_s))
            except (StoreFailedError, DatabaseUnavailableError) as error:
                self._failure = str(error)
                if isinstance(command, Take):
                    self._failures.warning("the slot is not taken", str(error), cause=str(error))
                else:
                    self._failures.warning("the lease is not renewed", str(error), cause=str(error))
                    self.fleet.late_renewal_count += 1
                answer = _failed(command)
            if answer is None:  # departed
                if not self.ended.done():
                    self.ended.set_result(None)
                return
            if isinstance(answer, Renewed):
                self._failures.reset()
                self._failure = ""
                self.fleet.members, self.fleet.slots = answer.members, answer.slots
                self._note_clock(self._rows.database_ahead_s)
            self._handle(answer)

    def _note_clock(self, database_ahead_s: float) -> None:
        if self._database_clock.take(database_ahead_s):
            log.warning(
                "the database's clock differs from this coordinator's: keep both by NTP, as power budgets, "
                "tokens and the ledger's hours go by the clock of whichever coordinator serves"
                if self._database_clock.is_large
                else "the database's clock agrees with this coordinator's again",
                database_ahead_s=round(database_ahead_s, 3),
            )
        self.fleet.database_skew_s = abs(database_ahead_s)

    def _done(self, command: Command, sent_s: float) -> Event | None:
        match command:
            case Renew():
                found = self._rows.renew()
                return Expired() if found is None else Renewed(sent_s, *found)
            case Take(number, lease_epoch):
                self.connections = self._open_connections(number)
                taken = None
                try:
                    taken = self._rows.take(number, lease_epoch)
                finally:
                    if taken is None:
                        self._close_connections()
                return Taken(number, taken)
            case Depart():
                self._rows.depart()
                return None
            case Serve() | Stop():
                raise AssertionError(f"expected a command for the database, found {command}")
        assert_never(command)

    def _close_connections(self) -> None:
        for each in self.connections:
            each.close()
        self.connections = ()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _failed(command: Command) -> Event | None:
    """Return what a command's failure, of unknown outcome, means."""
    match command:
        case Renew():
            return RenewalFailed()
        case Take(number):
            return Taken(number, None)
        case _:
            return None  # not departed: the lease expires by itself
