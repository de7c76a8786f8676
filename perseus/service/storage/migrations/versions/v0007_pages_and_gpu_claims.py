"""Members say where their pages are, so that others can link to them, and slots claim their ranks' GPUs."""

from alembic import context, op
from sqlalchemy import BigInteger, Column, Text
from sqlalchemy.types import Integer

revision = "v0007"
down_revision = "v0006"

_KEY = Text().with_variant(Text(collation="C"), "postgresql")
_NUMBER = BigInteger().with_variant(Integer(), "sqlite")


def upgrade() -> None:
    """Extend the fleet's tables: releases before leave the column empty, and claim nothing."""
    if context.config.attributes["schema"] is not None:
        return
    op.add_column("members", Column("page_url", Text(), nullable=False, server_default=""))
    op.create_table(
        "gpu_claims",
        Column("principal", _KEY, primary_key=True),
        Column("gpu_uuid", _KEY, primary_key=True),
        Column("slot", _NUMBER, nullable=False),
        Column("job_id", Text(), nullable=False),
        Column("pipeline", _NUMBER, nullable=False),
        Column("stage", _NUMBER, nullable=False),
        Column("tensor", _NUMBER, nullable=False),
        sqlite_with_rowid=False,
    )
