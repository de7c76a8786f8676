"""Coordinators that share a database: its members, and the slots that they hold."""

from alembic import op
from sqlalchemy import BigInteger, Column, Double, Text
from sqlalchemy.types import REAL, Integer, TypeEngine

revision = "v0005"
down_revision = "v0004"

_KEY = Text().with_variant(Text(collation="C"), "postgresql")
_NUMBER = BigInteger().with_variant(Integer(), "sqlite")
_FIGURE: TypeEngine[float] = Double().with_variant(REAL(), "sqlite")


def upgrade() -> None:
    """Add the tables, empty."""
    op.create_table(
        "members",
        Column("member_id", _KEY, primary_key=True),
        Column("address", Text(), nullable=False),
        Column("place", Text(), nullable=False),
        Column("expire_time_s", _FIGURE, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "slots",
        Column("number", _NUMBER, primary_key=True, autoincrement=False, nullable=False),
        Column("holder", Text(), nullable=False),
        Column("lease_epoch", _NUMBER, nullable=False),
        sqlite_with_rowid=False,
    )
