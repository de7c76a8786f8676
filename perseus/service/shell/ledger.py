"""What clients ask of the ledger."""

import time
from collections.abc import Callable

from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.ledger import HOUR_S, HourFilter, RatesAt
from perseus.service.domain.statement import Statement
from perseus.service.fleet.ledger import statement
from perseus.service.shell.writer import Writer
from perseus.service.storage.store import JobStore


class Ledger:
    """The ledger of all jobs, as clients see it."""

    def __init__(
        self, store: JobStore, writer: Writer, rates_at: RatesAt, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock` is the wall clock."""
        self._store = store
        self._writer = writer
        self._rates_at = rates_at
        self._clock = clock

    async def statement(
        self, start_time_s: float | None = None, end_time_s: float | None = None, job_id: str = ""
    ) -> Statement:
        """Return what runs have used and saved between two times, of all jobs or of one; up to now.

        A time within an hour stands for the hour's begin.

        Raises:
            InvalidFieldError: it would end before it begins.
        """
        if start_time_s is not None and end_time_s is not None and end_time_s < start_time_s:
            raise InvalidFieldError(
                field="end_time", expected="a time that is not before start_time", found="an earlier one"
            )
        await self._writer.flush()
        groups = await self._store.ledger(HourFilter(_hour(start_time_s), _hour(end_time_s), job_id))
        return statement(groups, self._rates_at(self._clock()))


def _hour(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s // HOUR_S)
