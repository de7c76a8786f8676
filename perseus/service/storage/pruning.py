"""Deletes data that retention no longer keeps, in small steps between commits.

A step takes one thing (a run's events, a run due for archiving, some of the agents), deletes at most
`STEP_ROWS` rows of it, and the next step continues from there. Deleted rows leave free pages, which later
writes fill: for a fixed number of live jobs the file stops growing.

An archived run keeps its specification, its record and its report, the last of its events (later numbers
continue from it), and those profiles that a new job could still adopt.
"""

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Table, and_, delete, func, select, tuple_, update

from perseus.service.domain.ledger import HOUR_S
from perseus.service.domain.retention import Retention
from perseus.service.storage import codecs, schema
from perseus.service.storage.store import Pruned

STEP_ROWS = 500
"""Rows that a step deletes at most: some milliseconds, for which a commit may have to wait."""


class Pruner:
    """Prunes a slot of a database, round by round: runs, then events, then agents and the ledger.

    `is_of_fleet`: also what belongs to the whole fleet, the budgets.
    """

    def __init__(
        self, connection: Connection, step_rows: int = STEP_ROWS, *, is_of_fleet: bool = True
    ) -> None:
        self._connection = connection
        self._is_of_fleet = is_of_fleet
        self._step_rows = step_rows
        self._round: Iterator[Pruned] | None = None

    def step(self, retention: Retention, now_s: float) -> Pruned:
        """Do one step in the open transaction; return `is_done` at the end of a round."""
        if self._round is None:
            self._round = self._steps(retention, now_s)
        pruned = next(self._round, None)
        if pruned is None:
            self._round = None
            return Pruned(0, (), is_done=True)
        return pruned

    def _steps(self, retention: Retention, now_s: float) -> Iterator[Pruned]:
        """Yield the result of each step of one round. Anything may be written between two steps."""
        for run in self._runs_due(retention, now_s):
            while count := self._empty_archived(run):
                yield Pruned(count, (), is_done=False)
            yield self._archive(run)
        for job_id, run_number in self._live_runs():
            while count := self._prune_events(job_id, run_number, retention, now_s):
                yield Pruned(count, (), is_done=False)
        while count := self._prune_telemetry(retention, now_s):
            yield Pruned(count, (), is_done=False)
        oldest_hour = int((now_s - retention.ledger_age_s) // HOUR_S)
        while count := self._delete_some(schema.ledger, schema.ledger.c.hour < oldest_hour):
            yield Pruned(count, (), is_done=False)
        while count := self._prune_budgets(retention, now_s) if self._is_of_fleet else 0:
            yield Pruned(count, (), is_done=False)

    # ------------------------------------------------------------------ runs

    def _runs_due(self, retention: Retention, now_s: float) -> list[tuple[str, int]]:
        runs = schema.runs.c
        finished = self._connection.execute(
            select(runs.job_id, runs.run_number, runs.finish_time_s)
            .where(runs.is_archived == 0, runs.finish_time_s.is_not(None), runs.ended_job.is_not(None))
            .order_by(runs.finish_time_s.desc(), runs.job_id, runs.run_number)
        )
        return [
            (row.job_id, row.run_number)
            for later_count, row in enumerate(finished)
            if retention.is_run_due(row.finish_time_s, later_count, now_s)
        ]

    def _empty_archived(self, run: tuple[str, int]) -> int:
        """Delete some of the rows that an archived run does not keep; return how many."""
        for table in (
            schema.recordings,
            schema.open_iterations,
            schema.offers,
            schema.plans,
            schema.ranks,
        ):
            if count := self._delete_some(table, _of_run(table, run)):
                return count
        events = schema.events
        last = self._last_sequence(run)
        if count := self._delete_some(events, and_(_of_run(events, run), events.c.sequence < last)):
            return count
        return self._delete_useless_profiles(run)

    def _delete_useless_profiles(self, run: tuple[str, int]) -> int:
        """Delete profiles that no job can adopt: work without a key, or measured by a younger run."""
        work, runs, profiles = schema.profiled_work, schema.runs, schema.profiles
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
        self._connection.execute(delete(work).where(_of_run(work, run), is_superseded))
        adoptable = select(work.c.stage).where(_of_run(work, run))
        return self._delete_some(profiles, and_(_of_run(profiles, run), profiles.c.stage.not_in(adoptable)))

    def _archive(self, run: tuple[str, int]) -> Pruned:
        self._connection.execute(
            update(schema.runs)
            .where(_of_run(schema.runs, run))
            .values(is_archived=1, registrations=codecs.NO_REGISTRATIONS)
        )
        return Pruned(0, (run,), is_done=False)

    # ------------------------------------------------------------------ events

    def _live_runs(self) -> list[tuple[str, int]]:
        runs = schema.runs.c
        found = self._connection.execute(select(runs.job_id, runs.run_number).where(runs.is_archived == 0))
        return [(row.job_id, row.run_number) for row in found]

    def _prune_events(self, job_id: str, run_number: int, retention: Retention, now_s: float) -> int:
        run, events = (job_id, run_number), schema.events
        last = self._last_sequence(run)
        # Two statements, so that each uses an index.
        by_count = and_(_of_run(events, run), events.c.sequence < retention.first_event_kept(last))
        if count := self._delete_some(events, by_count):
            return count
        before_s = now_s - retention.event_age_s
        by_age = and_(_of_run(events, run), events.c.create_time_s < before_s, events.c.sequence < last)
        return self._delete_some(events, by_age)

    def _last_sequence(self, run: tuple[str, int]) -> int:
        events = schema.events
        return int(
            self._connection.scalar(
                select(func.coalesce(func.max(events.c.sequence), 0)).where(_of_run(events, run))
            )
            or 0
        )

    # ------------------------------------------------------------------ agents

    def _prune_telemetry(self, retention: Retention, now_s: float) -> int:
        table = schema.telemetry
        old = table.c.write_time_s < now_s - retention.telemetry_age_s
        if count := self._delete_some(table, old):
            return count
        excess = (
            self._connection.scalar(select(func.count()).select_from(table)) or 0
        ) - retention.keep_telemetry_count
        if excess <= 0:
            return 0
        oldest = self._connection.execute(
            select(table.c.instance_id).order_by(table.c.write_time_s).limit(min(excess, self._step_rows))
        ).all()
        self._connection.execute(delete(table).where(table.c.instance_id.in_([row[0] for row in oldest])))
        return len(oldest)

    # ------------------------------------------------------------------ budgets

    def _prune_budgets(self, retention: Retention, now_s: float) -> int:
        table = schema.budgets
        over = self._connection.execute(
            select(table.c.budget_id, table.c.over_time_s).where(table.c.over_time_s <= now_s)
        )
        due = retention.budgets_due({row.budget_id: row.over_time_s for row in over}, now_s)
        some = due[: self._step_rows]
        if some:
            self._connection.execute(delete(table).where(table.c.budget_id.in_(some)))
        return len(some)

    # ------------------------------------------------------------------ deleting

    def _delete_some(self, table: Table, condition: Any) -> int:
        keys = list(table.primary_key.columns)
        some = self._connection.execute(select(*keys).where(condition).limit(self._step_rows)).all()
        if some:
            self._connection.execute(delete(table).where(tuple_(*keys).in_([tuple(key) for key in some])))
        return len(some)


def _of_run(table: Table, run: tuple[str, int]) -> Any:
    return and_(table.c.job_id == run[0], table.c.run_number == run[1])
