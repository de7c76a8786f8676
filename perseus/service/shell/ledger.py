"""Clients' requests about the ledger, and its running totals."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import structlog

from perseus.service.domain.errors import DatabaseUnreadableError, InvalidFieldError
from perseus.service.domain.ledger import HOUR_S, HourFilter, RatesAt
from perseus.service.domain.members import ALONE, Fleet
from perseus.service.domain.statement import LedgerTotals, Statement
from perseus.service.fleet.ledger import statement
from perseus.service.fleet.ledger_totals import RunningTotals
from perseus.service.shell.writer import Writer
from perseus.service.storage.sql_store import SqlStore

_log = structlog.get_logger(__name__)

TOTALS_S = 60.0
"""How often the totals are added up."""

_PAUSE_S = 0.2
"""Between two windows of the past, so that commits go first."""


class Ledger:
    """The ledger of all jobs, as clients see it."""

    def __init__(
        self,
        store: SqlStore,
        writer: Writer,
        rates_at: RatesAt,
        age_s: float,
        fleet: Fleet = ALONE,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`age_s` is how long hours are kept, `clock` is the wall clock."""
        self._store = store
        self._writer = writer
        self._rates_at = rates_at
        self._fleet = fleet
        self._clock = clock
        self._totals = RunningTotals(max(0, int((clock() - age_s) // HOUR_S)))
        self._has_failed = False

    @property
    def totals(self) -> LedgerTotals | None:
        """The energy, cost and CO2 of all runs, as of the last minute; None until it is known."""
        return None if self._has_failed else self._totals.known

    async def run(self) -> None:
        """Add up the totals every minute, until cancelled. After a failure they are unknown."""
        while not self._has_failed:
            await self._writer.flush()
            with suppress(DatabaseUnreadableError):
                await self._add_up()
            await asyncio.sleep(TOTALS_S)
        await asyncio.Event().wait()

    async def _add_up(self) -> None:
        while True:
            window = self._totals.next_window(int(self._clock() // HOUR_S))
            groups = await self._store.ledger(window)
            try:
                await asyncio.to_thread(self._totals.add, window, groups, self._rates_at(self._clock()))
            except Exception:  # a bug in figures that nothing else depends on
                _log.exception("the ledger's totals can't be added up: they are no longer published")
                self._has_failed = True
                return
            if window.end_hour is None:
                return
            await asyncio.sleep(_PAUSE_S if groups else 0)

    async def statement(
        self,
        start_time_s: float | None = None,
        end_time_s: float | None = None,
        job_id: str = "",
        after: tuple[str, int, int] | None = None,
        run_count: int = 0,
    ) -> Statement:
        """Return what runs have used and saved between two times, of all jobs or of one; up to now.

        A time within an hour means the beginning of that hour. With `after`, a run as (job_id, deletion,
        run_number), the statement is of the `run_count` runs that follow it alone, which takes as much less.

        Raises:
            InvalidFieldError: `end_time_s` is before `start_time_s`.
            ServedElsewhereError: another coordinator serves the job.
        """
        if job_id:
            self._fleet.check_job(job_id)
        if start_time_s is not None and end_time_s is not None and end_time_s < start_time_s:
            raise InvalidFieldError(
                field="end_time", expected="a time that is not before start_time", found="an earlier one"
            )
        await self._writer.flush()
        wanted = HourFilter(_hour(start_time_s), _hour(end_time_s), job_id, after, run_count)
        groups = await self._store.ledger(wanted)
        return await asyncio.to_thread(statement, groups, self._rates_at(self._clock()))


def _hour(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s // HOUR_S)
