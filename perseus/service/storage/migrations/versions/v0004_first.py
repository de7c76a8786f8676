"""The first schema that can be migrated: it is there, or it is not."""

revision = "0004"
down_revision = None


def upgrade() -> None:
    """Do nothing: databases of this schema are marked as such, and none is made."""
