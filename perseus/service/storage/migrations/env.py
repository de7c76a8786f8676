"""Alembic's entry point: the connection and its transaction are the store's."""

from alembic import context

attributes = context.config.attributes
context.configure(connection=attributes["connection"], version_table_schema=attributes["schema"])
context.run_migrations()
