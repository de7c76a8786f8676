"""The statements of commits, compiled once for an engine: rows go straight to the driver.

SQLAlchemy knows how the engines differ; its own binding of values would cost more than everything else here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Delete,
    Dialect,
    Insert,
    Select,
    Table,
    Update,
    bindparam,
    delete,
    literal_column,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine.interfaces import DBAPICursor

from perseus.service.storage import schema

Row = tuple[Any, ...]

UPDATE_RECORD = "update_record"
UPDATE_REGISTRATIONS = "update_registrations"
UPDATE_ENDED_RUN = "update_ended_run"
INSERT_PLAN = "insert_plan"
PRUNE_PLANS = "prune_plans"
INSERT_ITERATION = "insert_iteration"
CLOSE_ITERATIONS = "close_iterations"
INSERT_RUN = "insert_run"
INSERT_EVENT = "insert_event"
UPSERT_RANK = "upsert_rank"
UPSERT_OFFER = "upsert_offer"
UPSERT_PROFILE = "upsert_profile"
UPSERT_WORK = "upsert_work"
UPSERT_PERIOD = "upsert_period"
UPSERT_HOUR = "upsert_hour"
UNCOMPARE_HOURS = "uncompare_hours"
UPSERT_TELEMETRY = "upsert_telemetry"
UPSERT_TOKEN = "upsert_token"
UPSERT_SESSION = "upsert_session"
DELETE_SESSION = "delete_session"
UPSERT_BUDGET = "upsert_budget"
UPSERT_SLOT_POWER = "upsert_slot_power"
UPSERT_RECORDING = "upsert_recording"
UPSERT_COUNTERS = "upsert_counters"

ORDER = (
    INSERT_RUN,
    UPDATE_RECORD,
    UPDATE_REGISTRATIONS,
    UPDATE_ENDED_RUN,
    UPSERT_RANK,
    INSERT_PLAN,
    UPSERT_OFFER,
    PRUNE_PLANS,
    UPSERT_PROFILE,
    UPSERT_WORK,
    UPSERT_PERIOD,
    UPSERT_HOUR,
    UNCOMPARE_HOURS,
    INSERT_ITERATION,
    CLOSE_ITERATIONS,
    INSERT_EVENT,
    UPSERT_TELEMETRY,
    UPSERT_TOKEN,
    DELETE_SESSION,
    UPSERT_SESSION,
    UPSERT_BUDGET,
    UPSERT_SLOT_POWER,
    UPSERT_RECORDING,
    UPSERT_COUNTERS,
)
"""The order in which a group's rows are written: a run before its changes, plans before rows that use
them."""

_OF_COMPARED = (
    "compared_count",
    "compared_energy_j",
    "energy_m2",
    "freedom_count",
    "profiling_count",
    "profiling_energy_j",
    "straggler_energy_j",
)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A statement of one engine. A row's values are in the order of `parameters`."""

    sql: str
    parameters: tuple[str, ...]

    def run(self, cursor: DBAPICursor, rows: Sequence[Row]) -> None:
        """Execute it once for each row."""
        cursor.executemany(self.sql, rows)

    def rows(self, cursor: DBAPICursor, row: Row) -> Sequence[Row]:
        """Execute it once, and return the found rows."""
        cursor.execute(self.sql, row)
        return cursor.fetchall()


class Statements:
    """The statements of one engine: by name, and the few that don't write a group's rows.

    Attributes:
        by_name: those of ORDER.
        count_commit: sets the commit's number.
        telemetry_sequence: finds an instance's sequence and its principal.
        plan_digests: finds the plans of a run.
    """

    def __init__(self, dialect: Dialect) -> None:
        insert = postgresql.insert if dialect.name == "postgresql" else sqlite.insert

        def upsert(table: Table) -> Insert:
            keys = list(table.primary_key.columns)
            statement = insert(table)
            others = {
                column.name: statement.excluded[column.name] for column in table.columns if column not in keys
            }
            return statement.on_conflict_do_update(index_elements=keys, set_=others)

        def of_run(table: Table) -> list[Any]:
            return [
                table.c.job_id == bindparam("of_job_id"),
                table.c.run_number == bindparam("of_run_number"),
            ]

        runs, plans, offers, rows = schema.runs, schema.plans, schema.offers, schema.open_iterations
        hours = schema.ledger
        zero: ColumnElement[int] = literal_column("0")
        used = select(offers.c.plan_digest).where(
            offers.c.job_id == plans.c.job_id, offers.c.run_number == plans.c.run_number
        )
        by_name: dict[str, Insert | Update | Delete] = {
            INSERT_RUN: insert(runs),
            UPDATE_RECORD: update(runs)
            .where(*of_run(runs))
            .values({name: bindparam(name) for name in ("record", "version", "finish_time_s")}),
            UPDATE_REGISTRATIONS: update(runs)
            .where(*of_run(runs))
            .values(registrations=bindparam("registrations")),
            UPDATE_ENDED_RUN: update(runs)
            .where(*of_run(runs))
            .values({name: bindparam(name) for name in schema.ENDED_COLUMNS}),
            UPSERT_RANK: upsert(schema.ranks),
            INSERT_PLAN: insert(plans).on_conflict_do_nothing(),
            UPSERT_OFFER: upsert(offers),
            PRUNE_PLANS: delete(plans).where(*of_run(plans), plans.c.digest.not_in(used)),
            UPSERT_PROFILE: upsert(schema.profiles),
            UPSERT_WORK: upsert(schema.profiled_work),
            UPSERT_PERIOD: upsert(schema.periods),
            UPSERT_HOUR: upsert(schema.ledger),
            # As `EnergySums.uncompared`.
            UNCOMPARE_HOURS: update(hours)
            .where(
                *of_run(hours),
                hours.c.deletion == zero,
                hours.c.baseline_number == bindparam("of_baseline_number"),
            )
            .values(
                uncompared_energy_j=hours.c.uncompared_energy_j + hours.c.compared_energy_j,
                **dict.fromkeys(_OF_COMPARED, zero),
            ),
            INSERT_ITERATION: insert(rows).on_conflict_do_nothing(),
            CLOSE_ITERATIONS: delete(rows).where(
                *of_run(rows), rows.c.iteration <= bindparam("closed_through")
            ),
            INSERT_EVENT: insert(schema.events),
            UPSERT_TELEMETRY: upsert(schema.telemetry),
            UPSERT_TOKEN: upsert(schema.tokens),
            UPSERT_SESSION: upsert(schema.sessions),
            DELETE_SESSION: delete(schema.sessions).where(schema.sessions.c.digest == bindparam("digest")),
            UPSERT_BUDGET: upsert(schema.budgets),
            UPSERT_SLOT_POWER: upsert(schema.slot_powers),
            UPSERT_RECORDING: upsert(schema.recordings),
            UPSERT_COUNTERS: upsert(schema.counters),
        }
        self.by_name = {name: _compiled(statement, dialect) for name, statement in by_name.items()}
        self.count_commit = _compiled(
            update(schema.coordinator).values(commit_number=bindparam("commit_number")), dialect
        )
        sequences = schema.telemetry.c
        self.telemetry_sequence = _compiled(
            select(sequences.sequence, sequences.principal).where(
                sequences.instance_id == bindparam("of_instance_id")
            ),
            dialect,
        )
        self.plan_digests = _compiled(select(plans.c.digest).where(*of_run(plans)), dialect)


def _compiled(statement: Insert | Update | Delete | Select[Any], dialect: Dialect) -> Compiled:
    compiled = statement.compile(dialect=dialect)
    assert compiled.positiontup is not None, "the engine must be opened with positional parameters"
    return Compiled(str(compiled), tuple(compiled.positiontup))
