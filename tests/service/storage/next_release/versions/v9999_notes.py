"""Runs may have a note. As every migration it only adds, so that releases before go on beside it."""

from alembic import op
from sqlalchemy import Column, Text

from tests.service.storage.next_release import NEXT, THIS

revision = NEXT
down_revision = THIS


def upgrade() -> None:
    """Add the column."""
    op.add_column("runs", Column("note", Text(), nullable=True))
