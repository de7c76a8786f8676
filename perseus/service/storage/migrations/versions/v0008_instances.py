"""Agents' instances are those of who speaks for them; of the ones that are stored, that is not known."""

from alembic import op
from sqlalchemy import Column, Text

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add the column, in either engine."""
    op.add_column("telemetry", Column("principal", Text()))
