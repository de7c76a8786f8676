"""Jobs get runs, and events typed evidence. Of SQLite only: nothing else has had this schema.

Every job becomes its run 1. What is not known gets its least: no request to register is known any more, what
profiling cost is 0, of periods the last iteration is counted from the first, and their times are those of the
job's registration. Profiles have no key by which other jobs could adopt them.

Evidence was printed Python. What can be read of it becomes what it is now: registrations, changes of state
and of ranks, profiled clocks, failed solves, offers of plans and of stock, refusals, GPU errors, requested
baselines. Of all other events the message stays, and the evidence is dropped: it lacks what is there now.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from alembic import op
from sqlalchemy import text

revision = "0005"
down_revision = "0004"

_SCHEMA = """
ALTER TABLE coordinator ADD COLUMN deleted_version INTEGER NOT NULL DEFAULT 0;
CREATE TABLE runs (
    job_id TEXT, run_number INTEGER, create_time_s REAL NOT NULL, spec TEXT NOT NULL,
    registrations TEXT NOT NULL, record TEXT, PRIMARY KEY (job_id, run_number)) WITHOUT ROWID;
ALTER TABLE ranks RENAME TO old_ranks;
CREATE TABLE ranks (
    job_id TEXT, run_number INTEGER, pipeline INTEGER, stage INTEGER, tensor INTEGER, rank TEXT NOT NULL,
    PRIMARY KEY (job_id, run_number, pipeline, stage, tensor)) WITHOUT ROWID;
INSERT INTO ranks SELECT job_id, 1, pipeline, stage, tensor, rank FROM old_ranks;
ALTER TABLE offers RENAME TO old_offers;
CREATE TABLE offers (
    job_id TEXT, run_number INTEGER, pipeline INTEGER, stage_versions TEXT NOT NULL,
    start_iteration INTEGER NOT NULL, clocks_type TEXT NOT NULL, clocks TEXT NOT NULL,
    PRIMARY KEY (job_id, run_number, pipeline)) WITHOUT ROWID;
INSERT INTO offers
    SELECT job_id, 1, pipeline, stage_versions, start_iteration, clocks_type, clocks FROM old_offers;
ALTER TABLE profiles RENAME TO old_profiles;
CREATE TABLE profiles (
    job_id TEXT, run_number INTEGER, stage INTEGER, clock_mhz INTEGER, measurements TEXT NOT NULL,
    blocking_power_w REAL, blocking_power_se_w REAL NOT NULL,
    PRIMARY KEY (job_id, run_number, stage, clock_mhz)) WITHOUT ROWID;
INSERT INTO profiles
    SELECT job_id, 1, stage, clock_mhz, measurements, blocking_power_w, blocking_power_se_w FROM old_profiles;
CREATE TABLE profiled_work (
    job_id TEXT, run_number INTEGER, stage INTEGER, work_key TEXT NOT NULL,
    PRIMARY KEY (job_id, run_number, stage)) WITHOUT ROWID;
CREATE INDEX profiled_work_by_key ON profiled_work (work_key);
ALTER TABLE periods RENAME TO old_periods;
CREATE TABLE periods (
    job_id TEXT, run_number INTEGER, number INTEGER, period TEXT NOT NULL,
    PRIMARY KEY (job_id, run_number, number)) WITHOUT ROWID;
ALTER TABLE open_iterations RENAME TO old_open_iterations;
CREATE TABLE open_iterations (
    job_id TEXT, run_number INTEGER, pipeline INTEGER, stage INTEGER, tensor INTEGER, iteration INTEGER,
    plan_version INTEGER NOT NULL, duration_s REAL NOT NULL, energy_j REAL NOT NULL,
    is_regular INTEGER NOT NULL,
    PRIMARY KEY (job_id, run_number, iteration, pipeline, stage, tensor)) WITHOUT ROWID;
INSERT INTO open_iterations
    SELECT job_id, 1, pipeline, stage, tensor, iteration, plan_version, duration_s, energy_j, is_regular
    FROM old_open_iterations;
ALTER TABLE events RENAME TO old_events;
CREATE TABLE events (
    job_id TEXT, run_number INTEGER, sequence INTEGER, create_time_s REAL NOT NULL, type TEXT NOT NULL,
    message TEXT NOT NULL, evidence TEXT,
    PRIMARY KEY (job_id, run_number, sequence)) WITHOUT ROWID;
CREATE INDEX events_by_type ON events (job_id, run_number, type, sequence);
CREATE INDEX events_by_time ON events (job_id, run_number, create_time_s);
"""

_OLD = ("jobs", "old_ranks", "old_offers", "old_profiles", "old_periods", "old_open_iterations", "old_events")

_NO_COST = {"iteration_count": 0, "time_s": 0.0, "extra_time_s": 0.0, "energy_j": 0.0, "extra_energy_j": 0.0}


def upgrade() -> None:
    """Make the new tables of the old ones."""
    connection = op.get_bind()
    for statement in _SCHEMA.split(";"):
        if statement.strip():
            connection.execute(text(statement))
    create_times_s = {}
    for job_id, create_time_s, spec, record in connection.execute(text("SELECT * FROM jobs")).all():
        create_times_s[job_id] = create_time_s
        changes = connection.execute(
            text(
                "SELECT create_time_s, attributes FROM old_events "
                "WHERE job_id = :job_id AND type = 'state changed' ORDER BY sequence DESC LIMIT 1"
            ),
            {"job_id": job_id},
        ).all()
        connection.execute(
            text("INSERT INTO runs VALUES (:job_id, 1, :create_time_s, :spec, '[]', :record)"),
            {
                "job_id": job_id,
                "create_time_s": create_time_s,
                "spec": spec,
                "record": record and _changed(record, partial(_record, changes)),
            },
        )
    for job_id, number, period in connection.execute(text("SELECT * FROM old_periods")).all():
        time_s = create_times_s.get(job_id, 0.0)
        connection.execute(
            text("INSERT INTO periods VALUES (:job_id, 1, :number, :period)"),
            {
                "job_id": job_id,
                "number": number,
                "period": _changed(period, partial(_period, time_s)),
            },
        )
    events = connection.execute(text("SELECT * FROM old_events")).all()
    for job_id, sequence, create_time_s, kind, message, attributes in events:
        connection.execute(
            text("INSERT INTO events VALUES (:job_id, 1, :sequence, :time_s, :kind, :message, :evidence)"),
            {
                "job_id": job_id,
                "sequence": sequence,
                "time_s": create_time_s,
                "kind": kind,
                "message": message,
                "evidence": _evidence(kind, attributes),
            },
        )
    for table in _OLD:
        connection.execute(text(f"DROP TABLE {table}"))


def _changed(content: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
    """Change values in JSON; what can't be read stays as it is, and is found when its job is loaded."""
    try:
        return json.dumps(change(json.loads(content)))
    except (ValueError, LookupError, TypeError):
        return content


def _record(changes: Any, values: dict[str, Any]) -> dict[str, Any]:
    time_s = values.pop("baseline_time_s")
    reason, change_time_s = "", None
    if changes:
        change_time_s, attributes = changes[0]
        reason = json.loads(attributes).get("reason", "")
    return {
        **values,
        "state_reason": reason or "the database is of an earlier release",
        "baseline": {"time_s": time_s, "energy_j": 0.0} if time_s else None,
        "profiling_cost": _NO_COST,
        "given_up_clocks": [],
        "stall": None,
        "finish_time_s": change_time_s if values["state"] == "finished" else None,
        "baseline_request_ids": [],
    }


def _period(time_s: float, values: dict[str, Any]) -> dict[str, Any]:
    last = values["first_iteration"] + values["iteration_count"] - 1
    return {**values, "last_iteration": last, "start_time_s": time_s, "end_time_s": time_s}


def _evidence(kind: str, attributes: str) -> str | None:
    """Return an event's evidence as JSON, None where its attributes don't tell it."""
    make = _EVIDENCE.get(kind)
    if make is None:
        return None
    try:
        evidence = make(json.loads(attributes))
    except (ValueError, LookupError, TypeError):
        return None
    return json.dumps(evidence) if evidence is not None else None


def _value(name: str) -> str:
    """Return the value of an enum's member by its name."""
    return name.lower().replace("_", " ").replace("gpu", "GPU")


def _rank(old: Mapping[str, str]) -> dict[str, int]:
    return {name: int(old[name]) for name in ("pipeline", "stage", "tensor")}


def _state_changed(old: Mapping[str, str]) -> dict[str, Any]:
    return {"before": _value(old["before"]), "after": _value(old["after"]), "reason": old["reason"]}


def _rank_changed(old: Mapping[str, str]) -> dict[str, Any]:
    texts = {name: old[name] for name in ("instance_id", "hostname", "gpu_uuid", "reason")}
    return {"rank": _rank(old), "state": _value(old["state"]), **texts}


def _clock_profiled(old: Mapping[str, str]) -> dict[str, Any]:
    prefix = "blocking_power_w."
    return {
        "clocks_mhz": json.loads(old["clocks_mhz"]),
        "iteration_count": int(old["iteration_count"]),
        "blocking_powers": [
            {"stage": int(name.removeprefix(prefix)), "power_w": float(power)}
            for name, power in old.items()
            if name.startswith(prefix)
        ],
    }


def _pipeline_clocks(old: Mapping[str, str]) -> dict[str, Any] | None:
    plan = None
    if "iteration_time_s" in old:
        plan = {"iteration_time_s": float(old["iteration_time_s"]), "energy_j": float(old["energy_j"])}
    elif old["clocks"] != "stock":
        return None  # Which stage held which clock was not told.
    return {
        "pipeline": int(old["pipeline"]),
        "version": int(old["version"]),
        "changed_stages": json.loads(old["changed_stages"]),
        "start_iteration": int(old["start_iteration"]),
        "held_clocks_mhz": None,
        "plan": plan,
    }


def _plan_refused(old: Mapping[str, str]) -> dict[str, Any]:
    return {
        "rank": _rank(old),
        "version": int(old["version"]),
        "start_iteration": int(old["start_iteration"]),
        "iteration": int(old["iteration"]),
        "reason": _value(old["reason"]),
        "refused_clocks_mhz": json.loads(old["refused_clocks_mhz"]),
        "agent_message": old["agent_message"],
    }


def _gpu_error(old: Mapping[str, str]) -> dict[str, Any]:
    texts = {name: old[name] for name in ("gpu_uuid", "agent_message")}
    return {"rank": _rank(old), "reason": _value(old["reason"]), **texts}


_EVIDENCE: Mapping[str, Callable[[Mapping[str, str]], dict[str, Any] | None]] = {
    "registered": lambda old: {
        "parallelism": {name: int(old[name]) for name in ("pipeline_count", "stage_count", "tensor_count")}
    },
    "state changed": _state_changed,
    "rank changed": _rank_changed,
    "clock profiled": _clock_profiled,
    "solve failed": lambda old: {"cause": old["cause"]},
    "plan offered": _pipeline_clocks,
    "plan in force": _pipeline_clocks,
    "plan refused": _plan_refused,
    "GPU error": _gpu_error,
    "baseline requested": lambda old: {"baseline_time_s": float(old["baseline_time_s"])},
}
