from collections.abc import AsyncIterator

import pytest_asyncio

from tests.service.web.conftest import _json_thread
from tests.web.browser import shared

__all__ = ["_json_thread"]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[None]:
    async with shared():
        yield
