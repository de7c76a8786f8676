"""Plans are kept once, not once for every pipeline; the database counts its commits and its coordinators.

Of SQLite only: nothing else has had the schema before. What agents were acknowledged counts as written now.
"""

import hashlib
import json
import math
import secrets
import time

from alembic import op
from sqlalchemy import text

revision = "0006"
down_revision = "0005"

_SCHEMA = """
ALTER TABLE coordinator RENAME TO old_coordinator;
CREATE TABLE coordinator (
    epoch TEXT PRIMARY KEY, deleted_version INTEGER NOT NULL, secret TEXT NOT NULL,
    commit_number INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE generations (
    number INTEGER PRIMARY KEY, token TEXT NOT NULL, first_commit INTEGER NOT NULL) WITHOUT ROWID;
ALTER TABLE runs ADD COLUMN version INTEGER NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN finish_time_s REAL;
ALTER TABLE runs ADD COLUMN is_archived INTEGER NOT NULL DEFAULT 0;
CREATE INDEX runs_by_finish ON runs (is_archived, finish_time_s);
CREATE TABLE plans (
    job_id TEXT, run_number INTEGER, digest TEXT, clocks_type TEXT NOT NULL, clocks TEXT NOT NULL,
    PRIMARY KEY (job_id, run_number, digest)) WITHOUT ROWID;
ALTER TABLE offers RENAME TO old_offers;
CREATE TABLE offers (
    job_id TEXT, run_number INTEGER, pipeline INTEGER, stage_versions TEXT NOT NULL,
    start_iteration INTEGER NOT NULL, plan_digest TEXT NOT NULL,
    PRIMARY KEY (job_id, run_number, pipeline)) WITHOUT ROWID;
ALTER TABLE telemetry RENAME TO old_telemetry;
CREATE TABLE telemetry (
    instance_id TEXT PRIMARY KEY, sequence INTEGER NOT NULL, write_time_s REAL NOT NULL) WITHOUT ROWID;
"""


def upgrade() -> None:
    """Make the new tables of the old ones."""
    connection = op.get_bind()
    for statement in _SCHEMA.split(";"):
        if statement.strip():
            connection.execute(text(statement))
    connection.execute(
        text("INSERT INTO coordinator SELECT epoch, deleted_version, :secret, 0 FROM old_coordinator"),
        {"secret": secrets.token_hex(16)},
    )
    connection.execute(
        text("INSERT INTO telemetry SELECT instance_id, sequence, :time_s FROM old_telemetry"),
        {"time_s": time.time()},
    )
    for job_id, run_number, record in connection.execute(
        text("SELECT job_id, run_number, record FROM runs WHERE record IS NOT NULL")
    ).all():
        version, finish_time_s = _figures(record)
        connection.execute(
            text(
                "UPDATE runs SET version = :version, finish_time_s = :finish_time_s "
                "WHERE job_id = :job_id AND run_number = :run_number"
            ),
            {
                "version": version,
                "finish_time_s": finish_time_s,
                "job_id": job_id,
                "run_number": run_number,
            },
        )
    keys = connection.execute(text("SELECT job_id, run_number, pipeline FROM old_offers")).all()
    for key in keys:
        of_offer = {"job_id": key.job_id, "run_number": key.run_number, "pipeline": key.pipeline}
        offer = connection.execute(
            text(
                "SELECT * FROM old_offers "
                "WHERE job_id = :job_id AND run_number = :run_number AND pipeline = :pipeline"
            ),
            of_offer,
        ).one()
        content = f"{offer.clocks_type}\n{offer.clocks}".encode()
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        connection.execute(
            text("INSERT OR IGNORE INTO plans VALUES (:job_id, :run_number, :digest, :kind, :clocks)"),
            {**of_offer, "digest": digest, "kind": offer.clocks_type, "clocks": offer.clocks},
        )
        connection.execute(
            text("INSERT INTO offers VALUES (:job_id, :run_number, :pipeline, :versions, :start, :digest)"),
            {
                **of_offer,
                "versions": offer.stage_versions,
                "start": offer.start_iteration,
                "digest": digest,
            },
        )
    for table in ("old_coordinator", "old_offers", "old_telemetry"):
        connection.execute(text(f"DROP TABLE {table}"))


def _figures(record: str) -> tuple[int, float | None]:
    """Return version and end of a record; none of one that can't be read, which its job will show."""
    try:
        values = json.loads(record)
        version, finish_time_s = values["version"], values["finish_time_s"]
        is_finite = finish_time_s is None or math.isfinite(finish_time_s)
        return int(version), finish_time_s if is_finite else None
    except (ValueError, LookupError, TypeError):
        return 0, None
