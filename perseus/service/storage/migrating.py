"""Migrations from any known schema to the present one, by Alembic; a new database gets the present one at
once.

Alembic's table records the latest migration, in every slot's schema by itself. A migration of the fleet's
tables (`schema.OF_FLEET`) is for slot 0 alone: `context.config.attributes["schema"]` is then None.
"""

import secrets
import uuid
from importlib import resources

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, func, insert, inspect, select
from sqlalchemy.schema import CreateSchema

from perseus.service.domain.errors import DatabaseUnavailableError
from perseus.service.storage import schema
from perseus.service.storage.engines import enter


def version_of(connection: Connection, slot: int = 0) -> str | None:
    """Return the schema of a database, or of a slot in it, as the name of its migration; None if it is empty.

    Raises:
        ValueError: it belongs to another application, or its schema is unknown.
    """
    tables = inspect(connection).get_table_names(schema.schema_of(slot))
    if others := schema.tables_of_others(tables):
        raise ValueError(f"expected an empty database or one of Perseus, found tables {', '.join(others)}")
    found = MigrationContext.configure(
        connection, opts={"version_table_schema": schema.schema_of(slot)}
    ).get_current_revision()
    scripts = ScriptDirectory.from_config(_config(connection, slot)).walk_revisions()
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


def migrate(connection: Connection, name: str, slot: int = 0) -> bool:
    """Bring a database, or a slot in it, to the present schema in the open transaction.

    Until its end, statements are about that slot. Return whether it was empty.

    Raises:
        DatabaseUnavailableError: its schema is newer, or too old to be migrated; nothing changes.
    """
    if (own := schema.schema_of(slot)) is not None:
        if not inspect(connection).has_schema(own):
            connection.execute(CreateSchema(own))
        enter(connection, slot)
    try:
        found = version_of(connection, slot)
    except ValueError as error:
        raise DatabaseUnavailableError(database=name, cause=error) from None
    if found is None:
        schema.metadata.create_all(connection, schema.tables_of(slot), checkfirst=False)
        command.stamp(_config(connection, slot), schema.HEAD)
    else:
        command.upgrade(_config(connection, slot), schema.HEAD)
    return found is None


def create_state(connection: Connection) -> None:
    """Create the state of a new database, or of a new slot in it."""
    connection.execute(
        insert(schema.coordinator).values(
            epoch=uuid.uuid4().hex, deleted_version=0, secret=secrets.token_hex(16), commit_number=0
        )
    )


def commit_number(connection: Connection) -> int | None:
    """Return the number of commits; None if there is no state."""
    return connection.scalar(select(schema.coordinator.c.commit_number))


def data_missing(name: str, slot: int) -> DatabaseUnavailableError:
    """Return the error for a slot that was served, and whose data is gone."""
    cause = f"the data of slot {slot} is missing, although it was served before: restore a copy"
    return DatabaseUnavailableError(database=name, cause=cause)


def slot_count(connection: Connection) -> int:
    """Return over how many slots a database's jobs are spread."""
    return connection.scalar(select(func.count()).select_from(schema.slots)) or 1


def _config(connection: Connection, slot: int) -> Config:
    config = Config()
    config.set_main_option("script_location", str(resources.files("perseus.service.storage") / "migrations"))
    config.attributes.update(connection=connection, schema=schema.schema_of(slot))
    return config
