"""What holds for every test of the page."""

import pytest

from perseus.service.web import json_text


@pytest.fixture(scope="session", autouse=True)
def _json_thread() -> None:
    """The one thread that makes large answers is the process's, and starts with the first of them."""
    json_text._maker.submit(int).result()
