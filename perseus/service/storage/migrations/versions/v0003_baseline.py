"""The first schema: a new database gets the tables of `schema`, and this revision."""

revision = "v0003"
down_revision = None


def upgrade() -> None:
    """Do nothing: there is no earlier schema."""
