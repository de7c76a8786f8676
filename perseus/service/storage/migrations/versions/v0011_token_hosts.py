"""Agents' tokens may be for some hosts alone; those that there are, are for any."""

from alembic import op
from sqlalchemy import Column, Text

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Add the column, in either engine."""
    op.add_column("tokens", Column("host_patterns", Text(), nullable=False, server_default="[]"))
