"""Bearer tokens. There are none yet: the coordinator makes the first one when it starts."""

from alembic import op
from sqlalchemy import Column, Double, Text
from sqlalchemy.dialects import sqlite
from sqlalchemy.types import TypeEngine

revision = "0007"
down_revision = "0006"

_KEY = Text().with_variant(Text(collation="C"), "postgresql")
_FIGURE: TypeEngine[float] = Double().with_variant(sqlite.REAL(), "sqlite")


def upgrade() -> None:
    """Make the table, in either engine."""
    op.create_table(
        "tokens",
        Column("name", _KEY, primary_key=True),
        Column("digest", Text(), nullable=False),
        Column("scope", Text(), nullable=False),
        Column("job_patterns", Text(), nullable=False),
        Column("create_time_s", _FIGURE, nullable=False),
        Column("expire_time_s", _FIGURE),
        Column("revoke_time_s", _FIGURE),
        sqlite_with_rowid=False,
    )
