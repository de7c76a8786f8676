"""The command `perseus` of that release, whose schema has a column of which this one knows nothing."""

from pathlib import Path

from alembic.config import Config
from sqlalchemy import Column, Connection, Text

from perseus.cli.entry import main
from perseus.service.storage import migrating, schema
from tests.service.storage.next_release import NEXT

_config = migrating._config


def _with_its_migration(connection: Connection, slot: int) -> Config:
    config = _config(connection, slot)
    folders = str(config.get_main_option("script_location")), Path(__file__).parent
    config.set_main_option("version_locations", "\n".join(f"{folder}/versions" for folder in folders))
    config.set_main_option("path_separator", "newline")
    return config


migrating._config = _with_its_migration
schema.HEAD = NEXT
schema.runs.append_column(Column("note", Text(), nullable=True))

if __name__ == "__main__":
    main()
