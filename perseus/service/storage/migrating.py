"""Migrations from any known schema to the present one, by Alembic; a new database gets the present one at
once.

Alembic's table records the latest migration of a database.
"""

from importlib import resources

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect

from perseus.service.domain.errors import DatabaseUnavailableError
from perseus.service.storage import schema


def schema_of(connection: Connection) -> str | None:
    """Return a database's schema, as the name of its migration; None if it is empty.

    Raises:
        ValueError: it belongs to another application, or its schema is unknown.
    """
    tables = inspect(connection).get_table_names()
    if others := schema.tables_of_others(tables):
        raise ValueError(f"expected an empty database or one of Perseus, found tables {', '.join(others)}")
    found = MigrationContext.configure(connection).get_current_revision()
    scripts = ScriptDirectory.from_config(_config(connection)).walk_revisions()
    if tables and found not in {script.revision for script in scripts}:
        # Before the first release schemas were numbered without a v, and at first not named at all.
        what = (
            "is newer than this Perseus"
            if (found or "") > schema.HEAD
            else "is older than the first release and can't be migrated: start with an empty database"
        )
        raise ValueError(
            f"expected schema {schema.HEAD}, found {found or 'one without a name'}, which {what}"
        )
    return found


def migrate(connection: Connection, name: str) -> None:
    """Bring a database to the present schema, in the open transaction.

    Raises:
        DatabaseUnavailableError: its schema is newer, or too old to be migrated; nothing changes.
    """
    try:
        found = schema_of(connection)
    except ValueError as error:
        raise DatabaseUnavailableError(database=name, cause=error) from None
    if found is None:
        schema.metadata.create_all(connection)
        command.stamp(_config(connection), schema.HEAD)
    else:
        command.upgrade(_config(connection), schema.HEAD)


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(resources.files("perseus.service.storage") / "migrations"))
    config.attributes["connection"] = connection
    return config
