"""Ended runs keep their frontier and their last timelines."""

from alembic import op
from sqlalchemy import Column, LargeBinary

revision = "v0004"
down_revision = "v0003"


def upgrade() -> None:
    """Add the columns; earlier ended runs have none of it."""
    for name in ("frontier", "last_timeline", "baseline_timeline"):
        op.add_column("runs", Column(name, LargeBinary(), nullable=True))
