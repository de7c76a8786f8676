"""Jobs may be spread over slots, each with a schema of its own (`schema.schema_of`).

Releases before would serve slot 0 as if it had all jobs: the new name of the schema keeps them out.
"""

revision = "v0006"
down_revision = "v0005"


def upgrade() -> None:
    """Change nothing: what is there is slot 0's, and others' schemas are created as they are used."""
