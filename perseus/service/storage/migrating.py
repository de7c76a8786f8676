"""From whatever schema a database has to the present one, by Alembic; a new database gets it at once.

Alembic's table says which migration a database has had. SQLite files of earlier releases have none, but their
`user_version`, which was the schema's version then; it still says it, so that these releases refuse the file.
"""

from importlib import resources

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect

from perseus.service.domain.errors import DatabaseUnavailableError
from perseus.service.storage import schema

_OLDEST_VERSION, _LAST_VERSION = 4, 5
"""The `user_version`s from before Alembic's table."""


def schema_of(connection: Connection) -> str | None:
    """Return the schema that a database has, as the name of its migration; None if it is empty."""
    if tables := schema.tables_of_others(inspect(connection).get_table_names()):
        raise ValueError(f"expected an empty database or one of Perseus, found tables {', '.join(tables)}")
    revision = MigrationContext.configure(connection).get_current_revision()
    if revision is not None:
        return revision
    if connection.dialect.name == "sqlite":
        version = int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())
        if version:
            return f"{version:04}"
    return None


def migrate(connection: Connection, name: str) -> None:
    """Bring a database to the present schema, in the transaction that is open.

    Raises:
        DatabaseUnavailableError: its schema is newer, or too old to be migrated; nothing changes.
    """
    try:
        found = schema_of(connection)
    except ValueError as error:
        raise DatabaseUnavailableError(database=name, cause=error) from None
    if found == schema.HEAD:
        return
    config = _config(connection)
    if found is None:
        schema.metadata.create_all(connection)
        command.stamp(config, schema.HEAD)
    else:
        known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
        if found not in known:
            what = "newer than this Perseus" if found > schema.HEAD else "too old to be migrated"
            cause = f"expected schema {_OLDEST_VERSION:04} to {schema.HEAD}, found {found}, which is {what}"
            raise DatabaseUnavailableError(database=name, cause=cause)
        if int(found) <= _LAST_VERSION:
            command.stamp(config, found)
        command.upgrade(config, schema.HEAD)
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(f"PRAGMA user_version = {int(schema.HEAD)}")


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(resources.files("perseus.service.storage") / "migrations"))
    config.attributes["connection"] = connection
    return config
