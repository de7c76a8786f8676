"""Deletes data that retention no longer keeps, in small steps between commits.

What is due is looked for on a reading connection, so commits wait for none of it, however much is kept. A
step on the writing connection is one statement: it deletes at most `STEP_ROWS` rows of one thing (a run's
events, a run due for archiving, some of the agents). As anything may have been written meanwhile, it deletes
what is archived only of the run that was due, and no agent or budget that has a later time now. Deleted rows
leave free pages, which later writes fill: for a fixed number of live jobs the file stops growing.

An archived run keeps its specification, its record and its report, the last of its events (later numbers
continue from it), and those profiles that a new job could still adopt.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    Delete,
    FromClause,
    Select,
    Table,
    Update,
    and_,
    delete,
    func,
    or_,
    select,
    tuple_,
    update,
)

from perseus.service.domain.ledger import HOUR_S
from perseus.service.domain.retention import Retention
from perseus.service.storage import codecs, schema

STEP_ROWS = 500
"""Rows that a step deletes at most: some milliseconds, for which a commit may have to wait."""


@dataclass(frozen=True, slots=True)
class Step:
    """A statement for the writing connection; `archived` are the runs that it archives, if it does."""

    statement: Delete | Update
    archived: tuple[tuple[str, int], ...] = ()


class Pruner:
    """Finds what is to be pruned from a slot, round by round: runs, then events, then agents and the ledger.

    `is_of_fleet`: also what belongs to the whole fleet, the budgets.
    """

    def __init__(self, step_rows: int = STEP_ROWS, *, is_of_fleet: bool = True) -> None:
        self._is_of_fleet = is_of_fleet
        self._step_rows = step_rows
        self._round: Iterator[Step] | None = None

    def next_step(self, connection: Connection, retention: Retention, now_s: float) -> Step | None:
        """Return the next step, as seen in the open transaction of a reading connection, after the last one
        was committed; None at the end of a round."""
        self._connection = connection
        if self._round is None:
            self._round = self._steps(retention, now_s)
        step = next(self._round, None)
        if step is None:
            self._round = None
        return step

    def _steps(self, retention: Retention, now_s: float) -> Iterator[Step]:
        """Yield the steps of one round. Anything may be written between two steps."""
        runs, events, telemetry, budgets = schema.runs, schema.events, schema.telemetry, schema.budgets
        is_due = partial(retention.is_run_due, now_s=now_s)
        has_ended = runs.c.is_archived == 0, runs.c.ended_job.is_not(None)
        due = _oldest(runs.c.finish_time_s, is_due, *has_ended)
        for job_id, run_number, time_s, _ in self._connection.execute(due).all():
            yield from self._archive((job_id, run_number), time_s)
        before_s = now_s - retention.event_age_s
        for run in self._runs_with_events_due(retention, before_s):
            of_run, last = _of_run(events, run), _last_sequence(run)
            # Each uses an index: as nothing is above the last one, != is <.
            yield from self._emptied(events, of_run, events.c.sequence < retention.first_event_kept(last))
            is_old = events.c.create_time_s < before_s
            yield from self._emptied(events, of_run, is_old, events.c.sequence != last)
        is_due = partial(retention.is_telemetry_due, now_s=now_s)
        yield from self._without_oldest(telemetry.c.write_time_s, is_due)
        oldest_hour = int((now_s - retention.ledger_age_s) // HOUR_S)
        yield from self._emptied(schema.ledger, schema.ledger.c.hour < oldest_hour)
        if self._is_of_fleet:
            is_due = partial(retention.is_budget_due, now_s=now_s)
            over_s = budgets.c.over_time_s
            yield from self._without_oldest(over_s, is_due, over_s <= now_s)

    # ------------------------------------------------------------------ runs

    def _archive(self, run: tuple[str, int], finish_time_s: float) -> Iterator[Step]:
        """Delete the rows that an archived run does not keep, then archive it."""
        runs, events = schema.runs, schema.events
        is_own = and_(_of_run(runs, run), runs.c.is_archived == 0, runs.c.finish_time_s == finish_time_s)
        # A deleted job's name may be another's by now.
        is_still = select(runs.c.job_id).where(is_own).exists()
        for table in (
            schema.recordings,
            schema.counters,
            schema.open_iterations,
            schema.offers,
            schema.plans,
            schema.ranks,
        ):
            yield from self._emptied(table, _of_run(table, run), is_still)
        yield from self._emptied(
            events, _of_run(events, run), events.c.sequence < _last_sequence(run), is_still
        )
        # Profiles that no job can adopt: work without a key, or measured by a younger run.
        work, profiles = schema.profiled_work, schema.profiles
        superseded = _superseded_stages(run).where(is_still).limit(self._step_rows)
        while stages := self._connection.scalars(superseded).all():
            yield Step(delete(work).where(_of_run(work, run), work.c.stage.in_(stages), is_still))
        adoptable = select(work.c.stage).where(_of_run(work, run))
        yield from self._emptied(
            profiles, _of_run(profiles, run), profiles.c.stage.not_in(adoptable), is_still
        )
        archived = {"is_archived": 1, "registrations": codecs.NO_REGISTRATIONS}
        yield Step(update(runs).where(is_own).values(archived), (run,))

    # ------------------------------------------------------------------ events

    def _runs_with_events_due(self, retention: Retention, before_s: float) -> list[tuple[str, int]]:
        runs, events = schema.runs.c, schema.events.c

        def of_events(figure: Any) -> Any:
            of_run = events.job_id == runs.job_id, events.run_number == runs.run_number
            return select(figure).where(*of_run).scalar_subquery()

        # Each is one search in an index.
        first, last = of_events(func.min(events.sequence)), of_events(func.max(events.sequence))
        is_old = and_(of_events(func.min(events.create_time_s)) < before_s, first < last)
        found = self._connection.execute(
            select(runs.job_id, runs.run_number).where(
                runs.is_archived == 0, or_(is_old, first < retention.first_event_kept(last))
            )
        )
        return [(row.job_id, row.run_number) for row in found]

    # ------------------------------------------------------------------ what is due

    def _emptied(self, table: Table, *conditions: Any) -> Iterator[Step]:
        """Delete the rows that meet all conditions."""
        keys = list(table.primary_key.columns)
        due = select(*keys).where(*conditions).correlate(None)
        while self._connection.execute(due.limit(1)).first() is not None:
            yield Step(delete(table).where(tuple_(*keys).in_(due.limit(self._step_rows))))

    def _without_oldest(
        self, time_s: Column[float], is_due: Callable[[Any, Any], Any], *conditions: Any
    ) -> Iterator[Step]:
        """Delete the rows that are due by their time, unless it was changed meanwhile."""
        (key,) = time_s.table.primary_key.columns
        query = _oldest(time_s, is_due, *conditions).limit(self._step_rows)
        while due := self._connection.execute(query).all():
            latest_s = max(row.time_s for row in due)
            is_own = key.in_([row[0] for row in due])
            yield Step(delete(time_s.table).where(is_own, time_s <= latest_s))


def _oldest(time_s: Column[float], is_due: Callable[[Any, Any], Any], *conditions: Any) -> Select[Any]:
    """Return the query for the keys and times of a table's rows that are due, by how many have a later
    time."""
    keys = list(time_s.table.primary_key.columns)
    later_count = func.row_number().over(order_by=(time_s.desc(), *keys)) - 1
    columns = *keys, time_s.label("time_s"), later_count.label("later_count")
    ranked = select(*columns).where(time_s.is_not(None), *conditions).subquery()
    is_chosen = is_due(ranked.c.time_s, ranked.c.later_count)
    return select(ranked).where(is_chosen).order_by(ranked.c.later_count)


def _of_run(table: FromClause, run: tuple[str, int]) -> Any:
    return and_(table.c.job_id == run[0], table.c.run_number == run[1])


def _last_sequence(run: tuple[str, int]) -> Any:
    events = schema.events.alias()
    return select(func.max(events.c.sequence)).where(_of_run(events, run)).scalar_subquery()


def _superseded_stages(run: tuple[str, int]) -> Any:
    """Return the query for the stages of a run whose work a younger run has measured."""
    work, runs = schema.profiled_work, schema.runs
    younger_work, younger = work.alias(), runs.alias()
    own_time_s = select(runs.c.create_time_s).where(_of_run(runs, run)).scalar_subquery()
    is_superseded = (
        select(younger_work.c.work_key)
        .join(
            younger,
            and_(
                younger.c.job_id == younger_work.c.job_id,
                younger.c.run_number == younger_work.c.run_number,
            ),
        )
        .where(younger_work.c.work_key == work.c.work_key, younger.c.create_time_s > own_time_s)
        .exists()
    )
    return select(work.c.stage).where(_of_run(work, run), is_superseded)
