"""A release that follows this one, with a migration of its own: what every later one must be able to do."""

from perseus.service.storage import schema

THIS = schema.HEAD
"""The schema of this release."""

NEXT = "v9999"
