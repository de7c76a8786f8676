"""The table of GPUs that the slots' ranks have claimed, on PostgreSQL (`fleet.gpu_claims`).

A slot inserts rows, and changes its own alone. Coordinators that claim the same GPUs at once can't wait for
each other in a circle: all insert in the same order, and before anything for which others may wait. They may
wait for one that was cut off before its commit, until the server ends its session: so claims have a
connection of their own, on which no group commit waits.
"""

import json
from dataclasses import astuple
from typing import Any

from sqlalchemy import Connection, select, text

from perseus.service.domain.gpu_claims import ClaimChanges, Gpu, Place
from perseus.service.domain.specification import Coordinates
from perseus.service.storage import schema

_CLAIM = """
INSERT INTO gpu_claims (principal, gpu_uuid, slot, job_id, pipeline, stage, tensor)
SELECT principal, gpu_uuid, :slot, job_id, pipeline, stage, tensor FROM json_to_recordset(CAST(:rows AS json))
    AS new (principal text, gpu_uuid text, job_id text, pipeline bigint, stage bigint, tensor bigint)
ON CONFLICT DO NOTHING"""

_UPDATE = """
UPDATE gpu_claims AS own
SET job_id = new.job_id, pipeline = new.pipeline, stage = new.stage, tensor = new.tensor
FROM json_to_recordset(CAST(:rows AS json))
    AS new (principal text, gpu_uuid text, job_id text, pipeline bigint, stage bigint, tensor bigint)
WHERE own.principal = new.principal AND own.gpu_uuid = new.gpu_uuid AND own.slot = :slot
    AND (own.job_id, own.pipeline, own.stage, own.tensor)
        <> (new.job_id, new.pipeline, new.stage, new.tensor)"""

_FIND = """
SELECT gpu_claims.* FROM gpu_claims
JOIN json_to_recordset(CAST(:rows AS json)) AS wanted (principal text, gpu_uuid text)
    ON gpu_claims.principal = wanted.principal AND gpu_claims.gpu_uuid = wanted.gpu_uuid"""

_RELEASE = """
DELETE FROM gpu_claims AS own
USING json_to_recordset(CAST(:rows AS json)) AS ended (principal text, gpu_uuid text)
WHERE own.principal = ended.principal AND own.gpu_uuid = ended.gpu_uuid AND own.slot = :slot"""

_NAMES = ("principal", "gpu_uuid", "job_id", "pipeline", "stage", "tensor")


def load(connection: Connection, slot: int) -> dict[Gpu, Place]:
    """Return the claims of a slot."""
    query = select(schema.gpu_claims).where(schema.gpu_claims.c.slot == slot)
    return {gpu: place for gpu, (_, place) in _claims(connection.execute(query)).items()}


def change(connection: Connection, slot: int, changes: ClaimChanges) -> dict[Gpu, tuple[int, Place]]:
    """Claim and release GPUs for a slot in the open transaction.

    Returns whose those are that it wanted to claim, by slot and rank.
    """
    found: dict[Gpu, tuple[int, Place]] = {}
    if changes.claimed:
        rows = _json(
            (*gpu, job_id, *astuple(rank)) for gpu, (job_id, rank) in sorted(changes.claimed.items())
        )
        connection.execute(text(_CLAIM), {"rows": rows, "slot": slot})
        connection.execute(text(_UPDATE), {"rows": rows, "slot": slot})
        found = _claims(connection.execute(text(_FIND), {"rows": rows}))
    if changes.released:
        connection.execute(text(_RELEASE), {"rows": _json(changes.released), "slot": slot})
    return found


def _json(rows: Any) -> str:
    return json.dumps([dict(zip(_NAMES, row, strict=False)) for row in rows])


def _claims(rows: Any) -> dict[Gpu, tuple[int, Place]]:
    return {
        (row.principal, row.gpu_uuid): (
            row.slot,
            (row.job_id, Coordinates(row.pipeline, row.stage, row.tensor)),
        )
        for row in rows
    }
