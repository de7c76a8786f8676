"""Fixtures for all tests of the page's server."""

import pytest

from perseus.service.web import json_text


@pytest.fixture(scope="session", autouse=True)
def _json_thread() -> None:
    """The one thread that makes large answers belongs to the process, and starts with the first of them."""
    json_text._maker.submit(int).result()
