"""What a run's iterations add to has a table of its own; until it is written, the record has it."""

from alembic import op
from sqlalchemy import BigInteger, Column, Text
from sqlalchemy.types import Integer

revision = "v0008"
down_revision = "v0007"

_KEY = Text().with_variant(Text(collation="C"), "postgresql")
_NUMBER = BigInteger().with_variant(Integer(), "sqlite")


def upgrade() -> None:
    """Add the table to every slot."""
    op.create_table(
        "counters",
        Column("job_id", _KEY, primary_key=True),
        Column("run_number", _NUMBER, primary_key=True),
        Column("counters", Text(), nullable=False),
        sqlite_with_rowid=False,
    )
