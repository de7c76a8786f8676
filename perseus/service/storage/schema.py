"""The tables, for every engine. A change here needs a migration in `migrations/versions`.

A fleet is upgraded one by one: while one coordinator of a new release migrates the database, others of the
release before go on serving. So a migration only adds: tables, and columns that may be null or have a
server's default. What nobody uses any more is dropped a release later.

On PostgreSQL jobs may be spread over slots. Each slot has these tables in a schema of its own (`schema_of`),
but for those of the whole fleet (`OF_FLEET`), which are beside slot 0's alone: a connection for a slot finds
both by its search path, so that statements name no schemas.

Values are stored as JSON text (`codecs`) beside their search keys. There are no foreign keys: the same few
statements write and delete all rows of a run, and `checking` finds dangling rows.
"""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import (
    REAL,
    BigInteger,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
)
from sqlalchemy.types import TypeEngine

HEAD = "v0008"
"""The latest migration, which names this schema."""

# Ordered by bytes in both engines, as SQLite orders all texts.
_KEY = Text().with_variant(Text(collation="C"), "postgresql")
_NUMBER = BigInteger().with_variant(Integer(), "sqlite")
_FIGURE: TypeEngine[float] = Double().with_variant(REAL(), "sqlite")

metadata = MetaData()


def _table(name: str, *parts: Column[Any] | Index) -> Table:
    return Table(name, metadata, *parts, sqlite_with_rowid=False)


def _run_columns() -> tuple[Column[Any], Column[Any]]:
    return Column("job_id", _KEY, primary_key=True), Column("run_number", _NUMBER, primary_key=True)


def _number(name: str, *, primary_key: bool = False) -> Column[Any]:
    return Column(name, _NUMBER, primary_key=primary_key, nullable=False, autoincrement=False)


def _text(name: str, *, nullable: bool = False) -> Column[Any]:
    return Column(name, Text(), nullable=nullable)


def _figure(name: str, *, nullable: bool = False) -> Column[Any]:
    return Column(name, _FIGURE, nullable=nullable)


# One row. `commit_number` counts group commits; `secret` signs the commit markers (`commit_markers`), and
# `deleted_version` is the highest version of clocks that a deleted job has used.
coordinator = _table(
    "coordinator",
    Column("epoch", _KEY, primary_key=True),
    _number("deleted_version"),
    _text("secret"),
    _number("commit_number"),
)

# The latest starts of coordinators on this database: `token` is random, `first_commit` the number of commits
# before it.
boots = _table("boots", _number("number", primary_key=True), _text("token"), _number("first_commit"))

# `version` and `finish_time_s` repeat values of the record. `ended_job` is the serialised `perseus.v1.Job` of
# a run that has ended and has no served rank any more. Its frontier (`Frontier`) and timelines
# (`GetTimelineResponse`) are there if it had them. An archived run has these, its report and little else.
ENDED_COLUMNS = ("ended_job", "frontier", "last_timeline", "baseline_timeline")

runs = _table(
    "runs",
    *_run_columns(),
    _figure("create_time_s"),
    _text("spec"),
    _text("registrations"),
    _text("record", nullable=True),
    _number("version"),
    _figure("finish_time_s", nullable=True),
    _number("is_archived"),
    *(Column(name, LargeBinary(), nullable=True) for name in ENDED_COLUMNS),
    Index("runs_by_finish", "is_archived", "finish_time_s"),
)

ranks = _table(
    "ranks",
    *_run_columns(),
    _number("pipeline", primary_key=True),
    _number("stage", primary_key=True),
    _number("tensor", primary_key=True),
    _text("rank"),
)

# Clocks that are offered to pipelines, each once however many pipelines have them.
plans = _table(
    "plans",
    *_run_columns(),
    Column("digest", _KEY, primary_key=True),
    _text("clocks_type"),
    _text("clocks"),
)

offers = _table(
    "offers",
    *_run_columns(),
    _number("pipeline", primary_key=True),
    _text("stage_versions"),
    _number("start_iteration"),
    Column("plan_digest", _KEY, nullable=False),
)

profiles = _table(
    "profiles",
    *_run_columns(),
    _number("stage", primary_key=True),
    _number("clock_mhz", primary_key=True),
    _text("measurements"),
    _figure("blocking_power_w", nullable=True),
    _figure("blocking_power_se_w"),
)

profiled_work = _table(
    "profiled_work",
    *_run_columns(),
    _number("stage", primary_key=True),
    Column("work_key", _KEY, nullable=False),
    Index("profiled_work_by_key", "work_key"),
)

# What iterations add to: beside the record, whose row is long.
counters = _table("counters", *_run_columns(), _text("counters"))

# `is_baseline`: the period has measurements at stock. Against the latest of these, later ones save.
periods = _table(
    "periods",
    *_run_columns(),
    _number("number", primary_key=True),
    _text("period"),
    _number("is_baseline"),
)

open_iterations = _table(
    "open_iterations",
    *_run_columns(),
    _number("iteration", primary_key=True),
    _number("pipeline", primary_key=True),
    _number("stage", primary_key=True),
    _number("tensor", primary_key=True),
    _number("plan_version"),
    _figure("duration_s"),
    _figure("energy_j"),
    _number("is_regular"),
)

# `event` is the serialised `perseus.v1.JobEvent`; the other columns repeat its search keys.
events = _table(
    "events",
    *_run_columns(),
    _number("sequence", primary_key=True),
    _figure("create_time_s"),
    _number("type"),
    Column("event", LargeBinary(), nullable=False),
    Index("events_by_type", "job_id", "run_number", "type", "sequence"),
    Index("events_by_time", "job_id", "run_number", "create_time_s"),
)

# `write_time_s`: when it was last written, on the wall clock. `principal`: the agent's principal then.
telemetry = _table(
    "telemetry",
    Column("instance_id", _KEY, primary_key=True),
    _number("sequence"),
    _figure("write_time_s"),
    _text("principal", nullable=True),
)

# Bearer tokens, never the secrets themselves. The patterns are JSON; times are of the wall clock.
tokens = _table(
    "tokens",
    Column("name", _KEY, primary_key=True),
    _text("digest"),
    _text("scope"),
    _text("job_patterns"),
    _figure("create_time_s"),
    _figure("expire_time_s", nullable=True),
    _figure("revoke_time_s", nullable=True),
    _text("host_patterns"),
)

# Logins of browsers: `digest` is of a session's identifier, `token_digest` of the token that began it.
sessions = _table(
    "sessions",
    Column("digest", _KEY, primary_key=True),
    _text("token_digest"),
    _text("principal_name"),
    _figure("end_time_s"),
)

# The energy of runs, by hours since 1970 (UTC) and the number of the baseline that it is compared with (-1
# for none): the values of `domain.ledger.EnergyHour`. Rows outlive their jobs: `deletion` is 0 while the job
# exists, and then counts how many jobs of that name were deleted.
ledger = _table(
    "ledger",
    Column("job_id", _KEY, primary_key=True),
    _number("deletion", primary_key=True),
    _number("run_number", primary_key=True),
    _number("hour", primary_key=True),
    _number("baseline_number", primary_key=True),
    _number("baseline_iteration_count"),
    _figure("baseline_energy_j"),
    _figure("baseline_energy_m2"),
    _figure("price_per_kwh", nullable=True),
    _figure("intensity_g_per_kwh", nullable=True),
    _number("iteration_count"),
    _number("unmeasured_count"),
    _figure("time_s"),
    _figure("stock_energy_j"),
    _figure("uncompared_energy_j"),
    _number("compared_count"),
    _figure("compared_energy_j"),
    _figure("energy_m2"),
    _number("freedom_count"),
    _number("profiling_count"),
    _figure("profiling_energy_j"),
    _figure("straggler_energy_j"),
    Index("ledger_by_hour", "hour"),
)

# Power budgets. `over_time_s` repeats a value of the record: the time when the budget ends.
budgets = _table(
    "budgets",
    Column("budget_id", _KEY, primary_key=True),
    _text("budget"),
    _figure("over_time_s", nullable=True),
)

# Quarantined runs: their inputs up to the coordinator's fault (`job/recording.py`).
recordings = _table("recordings", *_run_columns(), _text("document"))

# Coordinators that share the database, on PostgreSQL (`membership`). `expire_time_s` is of the server's
# clock; `place` is where a member listens, empty if others may listen there too; `page_url` is empty if it is
# unknown.
members = _table(
    "members",
    Column("member_id", _KEY, primary_key=True),
    _text("address"),
    _text("place"),
    _figure("expire_time_s"),
    Column("page_url", Text(), nullable=False, server_default=""),
)

# Who serves a slot of jobs, "" for nobody; `lease_epoch` rises with every holder, and never falls.
slots = _table("slots", _number("number", primary_key=True), _text("holder"), _number("lease_epoch"))

# For power budgets over several slots: what the coordinator of each publishes under a lease epoch, and (in
# slot 0's row) how it divides the feeds.
slot_powers = _table(
    "slot_powers",
    _number("slot", primary_key=True),
    _number("lease_epoch"),
    _text("power"),
    _text("division"),
)

# GPUs by the principal whose agents name them: the slot that has claimed a GPU, and its rank there.
gpu_claims = _table(
    "gpu_claims",
    Column("principal", _KEY, primary_key=True),
    Column("gpu_uuid", _KEY, primary_key=True),
    _number("slot"),
    _text("job_id"),
    _number("pipeline"),
    _number("stage"),
    _number("tensor"),
)

OF_FLEET = (tokens, budgets, members, slots, slot_powers, gpu_claims)
"""The tables of the whole fleet; every slot has all others."""

OF_RUNS = (
    recordings,
    counters,
    runs,
    ranks,
    offers,
    plans,
    profiles,
    profiled_work,
    periods,
    open_iterations,
    events,
)
"""The tables whose rows are deleted with a job."""


def tables_of(slot: int) -> list[Table]:
    """Return the tables in a slot's schema."""
    return [table for table in metadata.sorted_tables if slot == 0 or table not in OF_FLEET]


def schema_of(slot: int) -> str | None:
    """Return the name of a slot's schema; None for slot 0's, the connection's own."""
    return f"slot_{slot}" if slot else None


_IN_EVERY_SCHEMA = {"coordinator", "events", "offers"}


def tables_of_others(tables: Iterable[str]) -> list[str]:
    """Return the tables of a database if it belongs to another application; none if it is ours or empty."""
    found = set(tables) - {"alembic_version"}
    return [] if found >= _IN_EVERY_SCHEMA else sorted(found)
