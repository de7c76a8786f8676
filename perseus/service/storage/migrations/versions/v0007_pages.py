"""Members say where their pages are, so that other coordinators' pages can link to them."""

from alembic import context, op
from sqlalchemy import Column, Text

revision = "v0007"
down_revision = "v0006"


def upgrade() -> None:
    """Add the column to the fleet's table; releases before leave it empty."""
    if context.config.attributes["schema"] is None:
        op.add_column("members", Column("page_url", Text(), nullable=False, server_default=""))
