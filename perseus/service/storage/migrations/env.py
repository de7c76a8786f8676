"""Alembic's entry point: the connection and its transaction are the store's."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
