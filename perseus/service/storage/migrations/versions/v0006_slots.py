"""Jobs may be spread over slots, each with a schema of its own (`schema.schema_of`).

Releases before would serve slot 0 as if it had all jobs: the new name of the schema keeps them out.
"""

from alembic import context, op
from sqlalchemy import BigInteger, Column, Text
from sqlalchemy.types import Integer

revision = "v0006"
down_revision = "v0005"

_NUMBER = BigInteger().with_variant(Integer(), "sqlite")


def upgrade() -> None:
    """Add the fleet's table; what is there is slot 0's, and others' schemas are created as they are used."""
    if context.config.attributes["schema"] is not None:
        return
    op.create_table(
        "slot_powers",
        Column("slot", _NUMBER, primary_key=True, autoincrement=False, nullable=False),
        Column("lease_epoch", _NUMBER, nullable=False),
        Column("power", Text(), nullable=False),
        Column("division", Text(), nullable=False),
        sqlite_with_rowid=False,
    )
