"""Power budgets. There are none yet: nobody could set any."""

from alembic import op
from sqlalchemy import Column, Double, Text
from sqlalchemy.dialects import sqlite
from sqlalchemy.types import TypeEngine

revision = "0010"
down_revision = "0009"

_KEY = Text().with_variant(Text(collation="C"), "postgresql")
_FIGURE: TypeEngine[float] = Double().with_variant(sqlite.REAL(), "sqlite")


def upgrade() -> None:
    """Make the table, in either engine."""
    op.create_table(
        "budgets",
        Column("budget_id", _KEY, primary_key=True),
        Column("budget", Text(), nullable=False),
        Column("over_time_s", _FIGURE),
        sqlite_with_rowid=False,
    )
